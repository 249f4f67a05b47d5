"""The classifier learns the embedded shapes, is a function of data and seed, and is trained once for a data set."""

import io
import json
import os
from contextlib import redirect_stdout

import numpy as np
import pytest
import torch
from processes import on_ranks

from nanodiff.data.shapes import draw_shapes
from nanodiff.device import init_device
from nanodiff.metrics import classifier as module
from nanodiff.metrics.classifier import (
    Classifier,
    get_classifier,
    load_images,
    plan_training,
    shift,
    shrink,
    train_classifier,
)


class Images:
    """A labelled set in memory, with what a Dataset offers and a folder with a meta.json."""

    name = "in memory"

    def __init__(self, images, labels, num_classes, path=None):
        self._images, self._labels, self.num_classes, self.path = images, labels, num_classes, path
        self.num_images, self.channels, self.resolution = images.shape[:3]

    def batches(self, indices, batch_size):
        return np.split(indices, range(batch_size, len(indices), batch_size))

    def images(self, indices):
        return self._images[indices]

    def labels(self, indices):
        return self._labels[indices]


def color_set(num_images, seed, path=None):
    """Three classes that anything can tell apart: which of three channels is bright."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(3, size=num_images)
    images = rng.integers(0, 60, (num_images, 3, 8, 8))
    images[np.arange(num_images), labels] += 150
    return Images(images.astype(np.uint8), labels, 3, path)


@pytest.fixture
def easy(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MIN_TRAINED", 600)
    (tmp_path / "meta.json").write_text(json.dumps({"name": "easy"}))
    return color_set(200, 0, tmp_path), color_set(100, 1, tmp_path)


@pytest.mark.slow
def test_shapes_are_learned_and_noise_is_not():
    train, val = (Images(*draw_shapes(n, seed), 8) for n, seed in ((700, 0), (500, 1)))
    classifier = train_classifier(train, val, "cpu")
    assert classifier.accuracy > 0.9
    unrelated = Images(val.images(np.arange(500)), draw_shapes(500, 2)[1], 8)
    _, logits = classifier.features(unrelated.images(np.arange(500)))
    guessed = logits.argmax(1).numpy()
    assert float(classifier.accuracy) == pytest.approx((guessed == val.labels(np.arange(500))).mean())
    assert (guessed == unrelated.labels(np.arange(500))).mean() < 0.25  # by chance 1/8


def test_training_takes_as_long_as_the_set_is_large():
    def drawn(num_images):
        num_steps, batch_size = plan_training(num_images, epochs=3)
        assert batch_size <= num_images
        return num_steps * batch_size

    assert drawn(50_000) == 150_000
    assert 2000 <= drawn(171) < 2500
    assert all(2000 <= drawn(n) <= max(3 * n, 2000) + 250 for n in (2, 15, 100, 1000, 7000))


@pytest.mark.parametrize("shape", [(1, 28), (3, 16), (3, 33), (4, 8), (3, 64)])
def test_features_of_any_image_size(shape):
    channels, resolution = shape
    classifier = Classifier(channels, resolution, 5, width=4).eval()
    images = torch.randint(256, (7, channels, resolution, resolution), dtype=torch.uint8)
    features, logits = classifier.features(images)
    assert features.shape == (7, classifier.num_features) and features.dtype == torch.float32
    torch.testing.assert_close(classifier.head(features), logits)  # the logits are linear in the features
    alone = classifier.features(images.numpy(), batch_size=2)
    torch.testing.assert_close(alone, (features, logits), rtol=1e-4, atol=1e-5)


def test_training_is_a_function_of_the_seed(easy):
    one, same, other = (train_classifier(*easy, "cpu", seed).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["head.weight"], other["head.weight"])


def test_a_classifier_is_trained_once_and_again_for_other_data_or_if_corrupt(easy, monkeypatch):
    trainings = []

    def counted(*args):
        trainings.append(1)
        return train_classifier(*args)

    monkeypatch.setattr(module, "train_classifier", counted)
    folder = easy[0].path
    path = folder / "classifier.npz"
    first, again = (get_classifier(*easy, "cpu") for _ in range(2))
    assert len(trainings) == 1 and first.accuracy == again.accuracy == 1.0
    images = easy[1].images(np.arange(100))
    assert torch.equal(first.features(images)[0], again.features(images)[0])
    assert sorted(os.listdir(folder)) == ["classifier.npz", "meta.json"]
    (folder / "meta.json").write_text(json.dumps({"name": "changed"}))
    get_classifier(*easy, "cpu")
    assert len(trainings) == 2
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    get_classifier(*easy, "cpu")
    assert len(trainings) == 3 and path.read_bytes() == whole


@pytest.mark.slow
def test_the_first_rank_trains_for_all(easy, monkeypatch):
    def work(rank):
        init_device("cpu")
        with redirect_stdout(io.StringIO()) as printed:
            found = get_classifier(*easy, "cpu")
        return printed.getvalue(), found.state_dict()

    monkeypatch.setattr(module, "train_classifier", lambda *args: Classifier(3, 8, 3))  # of other weights on each rank
    (printed, first), (nothing, second) = on_ranks(work)
    assert "training a classifier" in printed and nothing == ""
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_large_sets_are_drawn_from(easy, monkeypatch):
    monkeypatch.setattr(module, "MAX_IMAGES", 30)
    images, labels = load_images(easy[0], 8, seed=0)
    again, _ = load_images(easy[0], 8, seed=0)
    other, _ = load_images(easy[0], 8, seed=1)
    assert len(images) == len(labels) == 30 and torch.equal(images, again) and not torch.equal(images, other)
    assert torch.equal(images.float().mean((2, 3)).argmax(1), labels)  # each image has kept its label


def test_shrinking_keeps_the_mean_and_small_images():
    images = torch.randint(256, (3, 3, 64, 64), dtype=torch.uint8)
    small = shrink(images, 16)
    assert small.shape == (3, 3, 16, 16) and small.dtype == torch.uint8
    blocks = images.float().unflatten(2, (16, 4)).unflatten(4, (16, 4)).mean((3, 5))
    assert (small.float() - blocks).abs().max() <= 0.5  # what rounding costs
    assert shrink(small, 32) is small


def test_shifts_move_whole_images_by_an_eighth_at_most():
    spot = torch.zeros(500, 1, 16, 16, dtype=torch.uint8)
    spot[:, :, 8, 8] = 200
    moved = shift(spot, torch.Generator().manual_seed(0)).flatten(1)
    assert torch.equal(moved.long().sum(1), torch.full((500,), 200))
    where = moved.argmax(1)
    assert set((where // 16).tolist()) == set((where % 16).tolist()) == {6, 7, 8, 9, 10}
    flat = torch.full((4, 2, 16, 16), 7, dtype=torch.uint8)
    assert torch.equal(shift(flat, torch.Generator().manual_seed(0)), flat)  # no border comes in
