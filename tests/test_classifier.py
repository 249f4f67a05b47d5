"""The classifier learns the embedded shapes, is a function of the data, and is trained once for a data set."""

import pytest
import torch
from processes import on_ranks
from tiny_runs import assert_identical, make_data
from torch.testing import assert_close

from nanodiff.data.dataset import open_dataset
from nanodiff.data.shapes import draw_shapes
from nanodiff.device import init_device
from nanodiff.metrics.classifier import Classifier, get_classifier, shrink, train_classifier


@pytest.fixture
def tiny(base, monkeypatch):
    monkeypatch.setattr("nanodiff.metrics.classifier.MIN_TRAINED", 100)
    make_data()
    return open_dataset("tiny"), open_dataset("tiny", "val")


@pytest.mark.slow
def test_shapes_are_learned_and_noise_is_not(base):
    make_data(train=700, val=500)
    val = open_dataset("tiny", "val")
    classifier = train_classifier(open_dataset("tiny"), val, "cpu")
    _, logits = classifier.features(val.images(range(500)))
    guessed = logits.argmax(1).numpy()
    right = (guessed == val.labels(range(500))).mean()
    assert float(classifier.accuracy) == pytest.approx(right)
    assert right > 0.9
    _, unrelated = draw_shapes(500, seed=2)
    assert (guessed == unrelated).mean() < 0.25  # by chance 1/8


@pytest.mark.parametrize(
    "shape",
    [
        (1, 28),
        (3, 33),
        (4, 8),
    ],
)
def test_features_of_any_image_size(shape):
    channels, resolution = shape
    classifier = Classifier(channels, resolution, 5, width=4).eval()
    images = torch.randint(256, (7, channels, resolution, resolution), dtype=torch.uint8)
    features, logits = classifier.features(images)
    assert features.shape == (7, classifier.num_features)
    assert features.dtype == torch.float32
    assert_close(classifier.head(features), logits)  # the logits are linear in the features
    classifier.batch_size = 2
    alone = classifier.features(images.numpy())
    assert_close(alone, (features, logits), rtol=1e-4, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):  # as while a model is sampled
        assert torch.equal(classifier.features(images)[0], alone[0])


def test_training_is_a_function_of_the_data(tiny):
    assert_identical(*(train_classifier(*tiny, "cpu").state_dict() for _ in range(2)))


@pytest.mark.slow
def test_the_first_rank_trains_for_all(tiny, monkeypatch):
    def work(rank):
        init_device("cpu")
        torch.manual_seed(rank)
        return get_classifier(*tiny, "cpu").state_dict()

    monkeypatch.setattr("nanodiff.metrics.classifier.train_classifier", lambda *args: Classifier(3, 16, 8))
    assert_identical(*on_ranks(work))


def test_shrinking_keeps_the_mean_and_small_images():
    images = torch.randint(256, (3, 3, 64, 64), dtype=torch.uint8)
    small = shrink(images, 16)
    assert small.shape == (3, 3, 16, 16)
    assert small.dtype == torch.uint8
    blocks = images.float().unflatten(2, (16, 4)).unflatten(4, (16, 4))
    means = blocks.mean((3, 5))
    assert (small.float() - means).abs().max() <= 0.5  # what rounding costs
    assert shrink(small, 32) is small
