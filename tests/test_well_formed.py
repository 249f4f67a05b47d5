"""Well-formedness of shapes: real ones have it whatever their colour, and no damaged one does."""

import hashlib

import numpy as np
import pytest

from nanodiff.data.shapes import CLASS_NAMES, COLOURS, GROUND, draw_masks, draw_poses, draw_shapes
from nanodiff.metrics import well_formed
from nanodiff.metrics.well_formed import distances, measure_form


@pytest.fixture(autouse=True)
def few_real_shapes(monkeypatch):
    monkeypatch.setattr(well_formed, "NUM_REAL", 16)


def share(pixels, labels):
    return measure_form(np.rint(pixels).clip(0, 255).astype(np.uint8), labels)["well_formed"]


def test_the_embedded_images_stay_as_they_are():
    """Runs and figures of earlier versions belong to these bytes."""
    images, labels = draw_shapes(1000, (0, 1, 1000), 32)
    assert hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest().startswith("fa9e5923bf7a474f")


def test_fresh_shapes_are_well_formed():
    images, labels = draw_shapes(100, seed=11)
    figures = measure_form(images, labels)
    assert figures["well_formed"] >= 0.95 and figures["well_formed_of_real_images"] >= 0.9
    assert list(figures["well_formed_of"]) == CLASS_NAMES and 0.5 < figures["median_distance_ratio"] < 2


@pytest.mark.parametrize("damage", ["blur", "noise", "mixture", "half", "another class", "grey"])
def test_damaged_shapes_are_not(damage):
    images, labels = draw_shapes(24, seed=12)
    rng = np.random.default_rng(0)
    pixels = images.astype(np.float32)
    if damage == "blur":
        padded = np.pad(pixels, ((0, 0), (0, 0), (1, 1), (1, 1)), mode="edge")
        pixels = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3)).mean((4, 5))
    elif damage == "noise":
        pixels += rng.normal(scale=25, size=pixels.shape)
    elif damage == "mixture":
        pixels = (pixels + np.roll(pixels, 1, axis=0)) / 2
    elif damage == "half":
        pixels[..., :8] = GROUND[:, None, None]
    elif damage == "another class":
        labels = (labels + rng.integers(1, 8, size=24)) % 8
    else:
        pixels[:] = pixels.mean(1, keepdims=True)
    assert share(pixels, labels) <= 0.05


@pytest.mark.parametrize("label", range(8))
def test_the_distance_does_not_depend_on_the_colour(label):
    rng = np.random.default_rng(label)
    poses = draw_poses(6, rng)
    masks = draw_masks(label, poses, 16)[:, None]
    images = [GROUND[:, None, None] + masks * (colour - GROUND)[:, None, None] for colour in COLOURS]
    found = distances(np.rint(np.concatenate(images)).astype(np.uint8), label).reshape(len(COLOURS), -1)
    assert np.median(found) < 0.6
    assert np.ptp(found, axis=0).max() < 0.15  # rounding to 8 bits


def test_an_image_does_not_depend_on_the_others():
    images, _ = draw_shapes(20, seed=13, classes=[3] * 20)
    together = distances(images, 3)
    assert np.allclose(together, np.concatenate([distances(images[i : i + 13], 3) for i in (0, 13)]))
    assert np.array_equal(together, distances(images, 3))


def test_a_class_that_is_unknown_is_not_well_formed():
    images, labels = draw_shapes(6, seed=14)
    assert measure_form(images, np.where(labels == labels[0], 8, labels))["well_formed"] == (labels != labels[0]).mean()
