"""Image features (Inception's or a classifier's) and the metrics computed from them.

A network maps images (N, C, H, W) uint8 to features (N, F) and logits (N, K): network.features(images). A distance
compares mean and covariance of the samples' features with those of real images: frechet_distance in distances.py.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nanodiff.common import Batches, UserError, at, is_first_rank, make_generator, print0
from nanodiff.data.dataset import Dataset, open_dataset
from nanodiff.dist import from_first_rank, gather_batches, over_ranks, rank_batch
from nanodiff.files import known_fields, reading
from nanodiff.metrics.cache import cached
from nanodiff.metrics.classifier import get_classifier, load_classifier
from nanodiff.metrics.distances import (
    copies,
    frechet_distance,
    inception_score,
    mean_and_covariance,
    outer_sums,
    precision_recall,
)
from nanodiff.metrics.inception import load_inception
from nanodiff.sampling.draw import ModelSamples, SampleSettings, inputs_of

DISTANCES = ("fid", "fd_classifier", "fd_simclr")
MAX_VECTORS = 10_000  # feature vectors, and images, kept for precision, recall and copies: 113 MB for Inception
SIMCLR = Path(__file__).parents[2] / "runs/records/simclr_cifar10.safetensors"
VERSION = 2  # bump when an image's features change: cached ones are then recomputed


@dataclass
class Features:
    """Statistics of N feature vectors."""

    mu: Tensor  # (F,) float64
    sigma: Tensor  # (F, F) float64
    some: Tensor | None = None  # (n, F): up to MAX_VECTORS of the vectors, chosen at random and in random order
    logits: Tensor | None = None  # (N, K) in the order of the images
    images: Tensor | None = None  # (n, 3, 32, 32) uint8: the images of `some`, in another order


def image_set(name: str, split: str) -> Dataset:
    """An image set by name; for a set of latents, the images they were made from."""
    dataset = open_dataset(name, split)
    if source := (dataset.data.latents or {}).get("source"):  # unlike those that others have made
        return open_dataset(source, split)
    if dataset.data.kind != "images" or dataset.channels not in (1, 3):
        raise UserError(
            f"data={name!r} holds {dataset.data.kind} of {dataset.channels} channels; "
            "metrics of features accept uint8 images of 1 or 3 channels"
        )
    return dataset


def load_network(metric: str, data: str, device, weights: str = ""):
    """The network of a metric: Inception for "fid", else a classifier. Called by all ranks.

    `weights`: a file; "" = the published Inception, the shipped SimCLR network, or a classifier trained on `data`.
    """
    if metric == "fid":
        return load_inception(weights, device)
    if metric == "fd_simclr":
        weights = weights or SIMCLR
    if weights:
        return load_classifier(at(weights), device)
    return get_classifier(image_set(data, "train"), image_set(data, "val"), device)


def collect_features(images_of, batches: Batches, network, label: str = "") -> Features | None:
    """Features of the images with the ids in `batches`, computed by all ranks; None on all but the first.

    `batches`: ascending ids, (n,) each; `images_of` maps a batch to images (n, C, H, W) uint8. The number of ranks
    changes the result only by the rounding of float64 sums.
    """
    all_ids = np.concatenate(batches)
    generator = make_generator(0)
    places = torch.randperm(len(all_ids), generator=generator)[:MAX_VECTORS]
    subset = all_ids[places]
    sums = torch.zeros(network.num_features + 1, network.num_features + 1, dtype=torch.float64)

    def compute(ids):
        images = torch.as_tensor(images_of(ids))
        x, logits = network.features(images)  # (n, F), (n, K)
        sums.add_(outer_sums(x))
        kept = np.isin(ids, subset)
        small = torch.nn.functional.adaptive_avg_pool2d(images[kept].float(), 32)
        return x[kept], logits, small.byte().expand(-1, 3, -1, -1)

    rows = gather_batches(compute, batches, label)
    mu, sigma = mean_and_covariance(over_ranks(sums))
    if not is_first_rank():
        return None
    some, logits, images = map(torch.cat, zip(*rows))
    order = torch.randperm(len(some), generator=generator)  # so that the first few are a random choice, too
    return Features(mu, sigma, some[order], logits, images)


def load_stats(path: str, num_features: int) -> Features:
    """Reference statistics in an .npz: mu and sigma, as in ADM's and EDM's files; ours also have `some`."""
    with reading(path), np.load(at(path)) as file:
        names = ["mu", "sigma", *({"some"} & file.keys())]
        stats = Features(*(torch.from_numpy(file[name].astype(np.float64)) for name in names))
    if stats.sigma.shape != (num_features, num_features):
        raise UserError(f"{path} holds a sigma of shape {tuple(stats.sigma.shape)}, expected {num_features} features")
    return stats


def reference_features(dataset: Dataset, network) -> Features | None:
    """Features of a split, computed once by all ranks; returned on the first, None on the others.

    Cached beside the set in stats_NETWORK_SPLIT.npz, which load_stats reads too.
    """
    if len(dataset) < 10:
        raise UserError(f"distances need 10 images or more, {dataset.name!r}, {dataset.split}, has {len(dataset)}")
    weights = [x.cpu() for x in network.state_dict().values()]

    def compute():
        print0(f"computing features of {dataset.name!r}, {dataset.split}, once ({len(dataset):,} images)")
        batches = dataset.batches(np.arange(len(dataset)), 64)
        stats = collect_features(dataset.images, batches, network, "reference")
        return stats and known_fields(replace(stats, logits=None))

    path = dataset.path / f"stats_{network.name}_{dataset.split}.npz"
    tensors = cached(path, [dataset], [f"{VERSION} {MAX_VECTORS}".encode(), *weights], compute)
    return tensors and Features(**tensors)


def compare(metric: str, samples: Features, reference: Features) -> dict:
    """The Frechet distance; precision and recall if the reference keeps features; the Inception score for "fid"."""
    result = {metric: frechet_distance(samples.mu, samples.sigma, reference.mu, reference.sigma)}
    real = reference.some
    if real is not None:
        fake = samples.some
        n = min(len(fake), len(real))
        result["precision"], result["recall"] = precision_recall(real[:n], fake[:n])
        if reference.images is not None and len(real) < MAX_VECTORS:  # all images of the set
            result["copies"] = copies(reference.images, samples.images)
    if metric == "fid":
        result["inception_score"] = inception_score(samples.logits)
    return result


def sample_quality(metric: str, dataset, num_images: int, codec, model_config):
    """For training: return measure(model, process, settings, batch_size) -> figures, which compares samples with the
    training images as base_eval does, with seed 0. All ranks call both functions, and all get the figures.
    """
    if model_config.low_res:
        raise UserError(f"no {metric} here: low_res_size makes it super-resolution")
    inputs = inputs_of(dataset, codec, model_config)
    network = load_network(metric, dataset.name, codec.device)
    reference = reference_features(image_set(dataset.name, "train"), network)

    def measure(model, process, settings: SampleSettings, batch_size: int) -> dict[str, float]:
        codec.keep_loaded()
        samples = ModelSamples(model, process, codec, settings, inputs=inputs)
        samples.in_proportion(dataset.name, "train", num_images)
        batches = samples.batches(np.arange(num_images), rank_batch(batch_size, num_images))
        stats = collect_features(samples.images, batches, network, "samples")
        samples.check_finite(num_images)
        return from_first_rank(stats and compare(metric, stats, reference), "samples' figures")

    return measure
