"""Features do not depend on batches or ranks, order distances as they should, and are computed once for a set."""

from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import refused
from tiny_runs import make_data

from nanodiff.common import in_batches
from nanodiff.data.dataset import DatasetWriter, open_dataset
from nanodiff.data.shapes import CLASS_NAMES, draw_shapes
from nanodiff.metrics import cache, classifier, features
from nanodiff.metrics.distances import frechet_distance
from nanodiff.sampling.draw import ModelSamples


def make_network(seed=0):
    """An untrained classifier: random features tell images apart too."""
    torch.manual_seed(seed)
    return classifier.Classifier(3, 16, 8, width=4).requires_grad_(False).eval()


def distance(a, b):
    return frechet_distance(a.mu, a.sigma, b.mu, b.sigma)


def collect(images, network, batch_size=64):
    batches = in_batches(np.arange(len(images)), batch_size)
    return features.collect_features(images.__getitem__, batches, network)


@pytest.mark.parametrize("metric", ["fd_classifier", "fd_simclr"])
def test_the_order_of_distances(metric):
    n = 400
    network = features.load_network(metric, "", "cpu") if metric == "fd_simclr" else make_network()
    images, _ = draw_shapes(n, seed=0)
    whole = collect(images, network)
    half = collect(images[: n // 2], network)
    other_half = collect(images[n // 2 :], network)
    blurred_images = F.avg_pool2d(torch.from_numpy(images).float(), 3, 1, 1).round().to(torch.uint8)
    blurred = collect(blurred_images.numpy(), network)
    g = torch.Generator().manual_seed(0)
    noise_images = torch.randint(256, images.shape, generator=g, dtype=torch.uint8)
    noise = collect(noise_images.numpy(), network)
    again = distance(whole, collect(images, network, 100))
    apart = distance(half, other_half)
    to_blurred = distance(whole, blurred)
    assert again < 1e-6 < apart
    assert apart < 0.1 * to_blurred
    assert 0.1 * to_blurred < distance(whole, noise)
    near = features.compare(metric, other_half, half)
    noisy = features.compare(metric, noise, half)
    assert near[metric] == pytest.approx(apart)
    for figure in ("precision", "recall"):
        assert near[figure] > 0.8
        assert noisy[figure] < 0.1


def test_a_perfect_model_of_an_unbalanced_set_scores_as_real_images_do(base):
    """Where samples take the set's classes in its proportions. Of a balanced set they take them in turn."""
    images, labels = draw_shapes(2400, seed=1)
    kept = (labels == 0) | (np.arange(2400) % 40 < 8)
    with DatasetWriter("head", CLASS_NAMES) as writer:
        for split, part in (
            ("train", slice(1200)),
            ("val", slice(1200, 2400)),
        ):
            writer.append(split, images[part][kept[part]], y=labels[part][kept[part]])
    train = open_dataset("head")
    val = open_dataset("head", "val")
    n = len(val)
    network = make_network()
    known = val.labels(range(n))
    model = SimpleNamespace(config=SimpleNamespace(num_classes=8))
    codec = SimpleNamespace(data=SimpleNamespace(class_names=CLASS_NAMES))
    samples = ModelSamples(model, None, codec, None)
    samples.in_proportion("head", "train", n)
    chosen = samples.classes
    proportions = np.bincount(train.labels(range(len(train)))) / len(train)
    assert np.abs(np.bincount(chosen) - n * proportions).max() < 5
    pools = [np.flatnonzero(known == k) for k in range(8)]
    reference = collect(train.images(range(len(train))), network)

    def distance_of(classes):
        """Of a perfect model: held-out images of these classes."""
        ids = [pools[k][i % len(pools[k])] for i, k in enumerate(classes)]
        return distance(collect(val.images(ids), network), reference)

    real = distance(collect(val.images(range(n)), network), reference)
    in_turn = distance_of(np.arange(n) % 8)
    assert 1.5 * real < in_turn
    assert 1.5 * distance_of(chosen) < in_turn
    samples.classes = None
    make_data()
    samples.in_proportion("tiny", "train", 9)
    assert samples.classes is None


features_of = lambda name: features.reference_features(open_dataset(name), make_network()).mu
classifier_of = lambda name: classifier.get_classifier(open_dataset(name), open_dataset(name, "val"), "cpu").head.weight


@pytest.mark.parametrize(
    "module, computes, of, file",
    [
        (features, "collect_features", features_of, "stats_classifier_train.npz"),
        (classifier, "train_classifier", classifier_of, "classifier.npz"),
    ],
)
def test_what_a_set_gives_is_computed_once_and_again_if_it_changed(base, monkeypatch, module, computes, of, file):
    """By the hashes of its files, which are verified before: nothing is learned from damaged images."""
    computations = []
    compute = getattr(module, computes)
    monkeypatch.setattr(module, computes, lambda *args: computations.append(1) or compute(*args))
    monkeypatch.setattr(classifier, "MIN_TRAINED", 100)
    make_data()
    folder = base / "data" / "tiny"
    before = {*folder.iterdir()}
    assert torch.equal(of("tiny"), of("tiny"))
    assert len(computations) == 1
    assert {*folder.iterdir()} == before | {folder / file}
    image = folder / "train_images_000.npy"
    intact = image.read_bytes()
    image.write_bytes(intact[:-1] + bytes([intact[-1] ^ 1]))
    (folder / file).unlink()
    refused("train_images_000.npy is damaged", of, "tiny")
    assert len(computations) == 1
    assert not (folder / file).exists()
    image.write_bytes(intact)
    of("tiny")
    assert len(computations) == 2
    of_before = (folder / file).read_bytes()
    make_data(overwrite=True, train=26)
    (folder / file).write_bytes(of_before)
    of("tiny")
    assert len(computations) == 3
    (folder / file).write_bytes((folder / file).read_bytes()[:1000])
    refused(f"{file} is damaged: delete it", of, "tiny")


def test_features_are_those_of_one_network_in_a_file_of_reference_statistics(base):
    make_data()
    dataset = open_dataset("tiny")
    network = make_network()
    found = features.reference_features(dataset, network)
    other = features.reference_features(dataset, make_network(seed=1))
    assert not torch.equal(found.mu, other.mu)
    read = features.load_stats(dataset.path / "stats_classifier_train.npz", network.num_features)
    assert torch.equal(read.mu, other.mu)
    assert torch.equal(read.sigma, other.sigma)


def test_a_set_on_a_read_only_disk_can_be_a_reference(base, monkeypatch, capsys):
    make_data()
    monkeypatch.setattr(cache, "writing", Mock(side_effect=OSError(30, "Read-only file system")))
    reference = features.reference_features(open_dataset("tiny"), make_network())
    assert reference.some.shape == (24, 32)
    assert "cannot be written" in capsys.readouterr().out


def test_a_model_of_latents_is_compared_with_the_images_they_are_of(monkeypatch):
    sets = {
        "sd": SimpleNamespace(kind="latents", latents={"source": "photos"}),
        "photos": SimpleNamespace(kind="images", latents=None),
    }
    opened = lambda name, split: SimpleNamespace(data=sets[name], name=name, split=split, channels=3)
    monkeypatch.setattr(features, "open_dataset", opened)
    for source in sets:
        assert features.image_set(source, "val") == opened("photos", "val")
