"""Features of many images, a set's, a file's or a model's: taken by all ranks, kept beside the set, compared.

A network is Inception, for the FID, or a Judge: `name`, `num_features`, and features(images) -> (N, F), logits (N, K).
"""

import hashlib
import io
import json
import math
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from nanodiff.common import Progress, UserError, collective, get_dist, make_generator, print0
from nanodiff.data.dataset import Dataset, open_dataset
from nanodiff.data.images import reading
from nanodiff.data.sources import open_npz
from nanodiff.diffusion.sampling import SampleSettings, network_evaluations, sample_images
from nanodiff.files import write_atomic
from nanodiff.formats.sample_store import stored_protocol
from nanodiff.metrics.classifier import get_judge
from nanodiff.metrics.distances import (
    FeatureStats,
    frechet_distance,
    inception_score,
    kernel_distance,
    load_stats,
    precision_recall,
)
from nanodiff.metrics.inception import load_inception

KEPT = 10_000  # KID, precision and recall look at so many images of a set; 82 MB of Inception's features
VERSION = 1  # of what is kept beside a set: raise it when the features of an image change

# ---------------------------------------------------------------------------------------------------------------------
# Where images come from, and what looks at them


def image_set(name: str, split: str) -> Dataset:
    """The image set of that name; of a set of latents, the one that they were made from."""
    dataset = open_dataset(name, split)
    return dataset if dataset.meta["kind"] == "images" else open_dataset(dataset.meta["latents"]["source"], split)


def load_network(metric: str, data: str, device, inception: str = ""):
    """Whose features `metric` compares: Inception's for "fid" (`inception`: path of its weights), else those of a
    judge, trained on the labelled set `data`. Called by all ranks. Raises UserError where neither can be had."""
    if metric == "fid":
        return load_inception(inception, device)
    return get_judge(image_set(data, "train"), image_set(data, "val"), device)


class SampleFile:
    """An .npz of images as scripts/sample.py, ADM and EDM write it, read in pieces.

    `shape` (C, H, W); `num_classes`, 0 where there are no labels but 0; `protocol`, a dict: which file, and what the
    images are samples of if it tells; `class_names` likewise, else None. Raises UserError for a file that is absent,
    damaged, or holds something else.
    """

    def __init__(self, path: Path):
        if not path.is_file():
            raise UserError(f"samples={str(path)!r}: no such file")
        self.path = path
        self._file, (self.num_images, h, w, c), labels = open_npz(path)
        self._start, self.shape = self._file.tell(), (c, h, w)
        self._labels = np.zeros(self.num_images, np.int64) if labels is None else labels
        self.num_classes = 1 + int(self._labels.max()) if self._labels.any() else 0
        self.protocol = {"samples": str(path)}
        with suppress(ValueError):  # none, or not JSON
            self.protocol["samples_protocol"] = json.loads(stored_protocol(path))
        drawn = self.protocol.get("samples_protocol")
        self.class_names = drawn.get("class_names") if isinstance(drawn, dict) else None

    def __len__(self) -> int:
        return self.num_images

    def labels(self, ids) -> torch.Tensor:
        """(n,) int64."""
        return torch.from_numpy(self._labels[ids])

    def images(self, ids) -> np.ndarray:
        """(n,) consecutive numbers of images -> (n, C, H, W) uint8."""
        c, h, w = self.shape
        with reading(self.path):
            self._file.seek(self._start + int(ids[0]) * c * h * w)  # in a compressed file it reads up to there
            data = self._file.read(len(ids) * c * h * w)
        return np.frombuffer(data, np.uint8).reshape(len(ids), h, w, c).transpose(0, 3, 1, 2).copy()


@dataclass
class ModelSamples:
    """Samples of a model by their numbers, as if they were in a file: drawn when they are looked at, and not kept.

    Sample i is the one that scripts/sample.py draws: a function of (seed, i) and its class, the classes coming in turn.
    """

    model: torch.nn.Module
    process: object
    codec: object
    settings: SampleSettings
    seed: int = 0

    def __post_init__(self):
        self.num_classes = self.model.config.num_classes
        if not self.num_classes:
            self.settings = replace(self.settings, cfg_scale=1.0)
        self.codec.keep_loaded()

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of the pixels."""
        c, h, w = self.codec.shape
        factor = self.codec.facts.get("latents", {}).get("downsample", 0)
        return (3, h * factor, w * factor) if factor else (c, h, w)

    @property
    def protocol(self) -> dict:
        """How they are drawn."""
        evaluations = network_evaluations(self.model, self.process, self.settings)
        drawn = {"sampler": self.settings.sampler, "steps": self.settings.steps, "network_evaluations": evaluations}
        drawn["cfg_scale"] = self.settings.cfg_scale
        rounding = "round(127.5 (x + 1)), clamped to 0..255"
        return drawn | {"classes": "all, balanced", "seed": self.seed, "rounding": rounding}

    def labels(self, ids) -> torch.Tensor:
        """(n,) numbers -> (n,) int64; zeros where the model has no classes."""
        return torch.as_tensor(ids) % max(self.num_classes, 1)

    def images(self, ids) -> torch.Tensor:
        """(n,) numbers -> (n, C, H, W) uint8 on the CPU."""
        cond = {"y": self.labels(ids)} if self.num_classes else {}
        seeds = [(self.seed << 32) + int(i) for i in ids]
        x0 = sample_images(self.model, self.process, seeds, cond, self.codec.shape, self.settings, len(ids))
        return self.codec.to_pixels(x0)


# ---------------------------------------------------------------------------------------------------------------------
# Features of N images


@dataclass
class Features:
    """What is known of N feature vectors: mean `mu` (F,) and covariance `sigma` (F, F) of all, in float64; `some` of
    them (n, F), up to KEPT, chosen at random and in random order; and the `logits` (N, K), in the images' order."""

    mu: torch.Tensor
    sigma: torch.Tensor
    some: torch.Tensor | None = None
    logits: torch.Tensor | None = None


@torch.no_grad()
def collect_features(images_of, num_images: int, network, batch_size: int = 64, label: str = "") -> Features | None:
    """Features of images 0 ... num_images - 1, by all ranks; on the first rank, None on the others.

    `images_of` takes consecutive numbers, an array (n,), and gives these images, (n, C, H, W) uint8. Batches are dealt
    out in turn, so that what is in one does not depend on the number of ranks; nor does the result, up to the order of
    float64 sums. `label` is the progress line's.
    """
    rank, _, world = get_dist()
    generator, is_kept = make_generator(0), torch.zeros(num_images, dtype=torch.bool)
    is_kept[torch.randperm(num_images, generator=generator)[:KEPT]] = True
    batches = list(enumerate(torch.arange(num_images).split(batch_size)))[rank::world]
    stats, rows = FeatureStats(network.num_features), {}
    with Progress(sum(len(ids) for _, ids in batches), "images", label) as bar:
        for k, ids in batches:
            x, logits = network.features(images_of(ids.numpy()))  # (n, F), (n, K)
            stats.update(x)
            rows[k] = x[is_kept[ids]], logits
            bar.update(len(ids))
    stats.all_reduce()
    if dist.is_initialized():
        parts = [None] * world if rank == 0 else None
        with collective("the gathering of features"):
            dist.gather_object(rows, parts)
        if rank > 0:
            return None
        rows = {k: row for part in parts for k, row in part.items()}
    some, logits = (torch.cat(column) for column in zip(*(rows[k] for k in sorted(rows))))
    shuffled = torch.randperm(len(some), generator=generator)  # so that the first few are a random choice too
    return Features(stats.mu, stats.sigma, some[shuffled], logits)


def reference_features(dataset: Dataset, network) -> Features | None:
    """Features of all images of a split: read from stats_NETWORK_SPLIT.npz beside the set if they are there, else taken
    by all ranks, once, and kept there. On the first rank; None on the others.

    The file is what ADM and EDM call reference statistics (mu, sigma), and more. It holds its own key, a hash of
    meta.json and of the network's weights: after a change of either, or damage, it is made anew.
    """
    rank, path = get_dist()[0], dataset.path / f"stats_{network.name}_{dataset.split}.npz"
    features = None
    if rank == 0:
        digest = hashlib.sha256(f"{VERSION} {KEPT}".encode() + (dataset.path / "meta.json").read_bytes())
        for weight in network.state_dict().values():
            digest.update(weight.cpu().contiguous().numpy())
        key = digest.hexdigest()
        features = read_features(path, key, network.num_features)
    there = [features is not None]
    if dist.is_initialized():
        with collective("the broadcast of what the first rank has found"):
            dist.broadcast_object_list(there, src=0)
    if there[0]:
        return features
    print0(f"taking features of {dataset.name!r}, {dataset.split}, once ({len(dataset):,} images)")
    features = collect_features(dataset.images, len(dataset), network, label="reference")
    if rank == 0:
        save_features(path, key, features)
    return features


def read_features(path: Path, key: str, num_features: int) -> Features | None:
    """The features in the file, or None where it is absent, of another key, or damaged."""
    try:
        with np.load(path, allow_pickle=False) as file:
            if str(file["key"]) != key:
                return None
            some = torch.from_numpy(file["some"])
        return Features(*load_stats(path, num_features), some)
    except FileNotFoundError:
        return None
    except Exception as error:  # zipfile and numpy raise nearly anything for a damaged file
        print0(f"warning: {path} cannot be read and is made anew: {type(error).__name__}")
        return None


def save_features(path: Path, key: str, features: Features) -> None:
    file = io.BytesIO()
    arrays = dict(mu=features.mu.numpy(), sigma=features.sigma.numpy(), some=features.some.numpy())
    np.savez(file, **arrays, key=key)
    try:
        write_atomic(path, file.getbuffer())
    except OSError as error:  # a data set on a read-only disk: nothing is lost but time
        print0(f"warning: the features cannot be kept in {path}: {error.strerror}")


def compare(metric: str, samples: Features, reference: Features) -> dict:
    """The figures of "fid" or "fd_classifier": Frechet distance; with features of the reference at hand also kernel
    distance, precision and recall, of as many images of each; of Inception's also the Inception score."""
    result = {metric: frechet_distance(samples.mu, samples.sigma, reference.mu, reference.sigma)}
    if reference.some is not None:
        kernel = {"fid": "kid", "fd_classifier": "kd_classifier"}[metric]
        n = min(len(samples.some), len(reference.some))
        result[kernel], result[f"{kernel}_std"] = kernel_distance(samples.some, reference.some)
        result["precision"], result["recall"] = precision_recall(reference.some[:n], samples.some[:n])
    if metric == "fid":
        result["inception_score"], result["inception_score_std"] = inception_score(samples.logits)
    return result


class FrechetDistance:
    """How far a model in training is: "fid" or "fd_classifier", as base_eval finds it, to the images of the set `data`.

    The network and what is known of the images are opened here, by all ranks, and made where they are not there.
    Raises UserError where they cannot be had, or samples have no pixels to look at.
    """

    def __init__(self, metric: str, data: str, num_images: int, codec, model_config, device):
        if model_config.low_res or codec.undecodable:
            raise UserError(f"no {metric} here: {codec.undecodable or 'low_res_size makes it super-resolution'}")
        self.num_images, self.network = num_images, load_network(metric, data, device)
        self.reference = reference_features(image_set(data, "train"), self.network)

    def measure(self, model, process, codec, settings: SampleSettings, batch_size: int) -> float:
        """The distance of samples of seed 0, drawn by all ranks; on the first rank, NaN on the others."""
        samples = ModelSamples(model, process, codec, settings)
        found = collect_features(samples.images, self.num_images, self.network, batch_size, "samples")
        if found is None:
            return math.nan
        return frechet_distance(found.mu, found.sigma, self.reference.mu, self.reference.sigma)
