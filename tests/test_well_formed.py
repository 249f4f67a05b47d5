"""Well-formedness of shapes: real ones have it whatever their colour, and no damaged one does."""

import hashlib

import numpy as np

from nanodiff.data.shapes import CLASS_NAMES, COLOURS, GROUND, draw_shapes, paint
from nanodiff.metrics.well_formed import LIMIT, distances, measure_form


def test_the_embedded_images_stay_as_they_are():
    """Runs and figures of earlier versions belong to these bytes."""
    images, labels = draw_shapes(1000, (0, 1, 1000), 32)
    digest = hashlib.sha256(images.tobytes() + labels.tobytes())
    assert digest.hexdigest().startswith("5a213aba67afc170")


def test_fresh_shapes_of_known_classes_are_well_formed():
    images, labels = draw_shapes(100, seed=11)
    figures = measure_form(images, labels)
    assert figures["well_formed"] >= 0.95
    assert figures["median_distance"] < LIMIT
    assert list(figures["well_formed_of"]) == CLASS_NAMES
    labels[[2, 4, 5]] = 8
    assert measure_form(images[:6], labels[:6])["well_formed"] == 0.5


def test_damaged_shapes_are_not():
    whole, labels = draw_shapes(60, seed=12)
    rng = np.random.default_rng(0)
    whole = whole.astype(np.float32)
    padded = np.pad(whole, ((0, 0), (0, 0), (1, 1), (1, 1)), mode="edge")
    half = whole.copy()
    half[..., :8] = GROUND[:, None, None]
    place = np.full((60, 3), [0.22, 0.5, 0.5])
    small = paint(labels, COLOURS[labels % 6], place, 16)
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(2, 3))
    damaged = {
        "blur": windows.mean((4, 5)),
        "noise": whole + rng.normal(scale=25, size=whole.shape),
        "mixture": (whole + np.roll(whole, 1, axis=0)) / 2,
        "half": half,
        "grey": np.broadcast_to(whole.mean(1, keepdims=True), whole.shape),
        "too small": small,
        "another class": whole,
    }
    images = np.concatenate(list(damaged.values()))
    images = np.rint(images).clip(0, 255).astype(np.uint8)
    other = (labels + rng.integers(1, 8, size=60)) % 8
    all_labels = np.concatenate([*[labels] * 6, other])
    distance = np.empty(len(images))
    for label in range(8):  # all damages at once, since the renders to compare with take most of the time
        is_label = all_labels == label
        distance[is_label] = distances(images[is_label], label)
    shares = (distance.reshape(7, 60) <= LIMIT).mean(1)
    for damage, share in zip(damaged, shares):
        assert share < 0.055, damage
