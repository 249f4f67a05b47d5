"""Pillow reads our PNG files; grids hold the pixels given."""

import io

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from PIL import Image

from nanodiff.png import encode_png, make_grid


@pytest.mark.parametrize(
    "height, width",
    [
        (5, 7),
        (1, 1),
        (16, 16),
        (33, 20),
    ],
)
def test_pillow_reads_back_pixels_and_text(height, width):
    rng = np.random.default_rng(0)
    array = rng.integers(0, 256, (height, 2 * width, 3), np.uint8)[::-1, ::2]
    text = {"seed": "3", "protocol": '{"steps": 50, "name": "\\u56f3"}'}
    data = encode_png(array, **text)
    Image.open(io.BytesIO(data)).verify()  # every chunk's checksum
    with Image.open(io.BytesIO(data)) as image:
        assert_array_equal(np.asarray(image), array)
        assert image.text == text


@pytest.mark.parametrize("channels", [1, 3])
def test_each_tile_of_a_grid_is_its_image(channels):
    rng = np.random.default_rng(0)
    images = rng.integers(1, 256, (7, channels, 4, 16), np.uint8)
    grid = make_grid(images, columns=3)  # three times as large
    assert grid.shape == (3 * (12 + 2) + 2, 3 * (48 + 2) + 2, 3)
    assert grid.dtype == np.uint8
    for i, image in enumerate(images):
        top = 2 + i // 3 * 14
        left = 2 + i % 3 * 50
        tile = grid[top : top + 12, left : left + 48]
        expected = np.broadcast_to(image.transpose(1, 2, 0), (4, 16, 3))
        assert_array_equal(tile[::3, ::3], expected)  # any pixel of each 3 x 3 repetition
        assert_array_equal(tile[2::3, 1::3], expected)
    total = images.astype(int).sum() * 9 * 3 // channels
    assert grid.astype(int).sum() == total  # the rest is black
    assert make_grid(images[:2], 8).shape == (16, 102, 3)  # fewer images than columns: one row
    shapes = [np.full((3, h, w), 9, np.uint8) for h, w in ((64, 48), (48, 64), (48, 48))]
    mixed = make_grid(shapes, 2)  # the second row is below the first row's highest image
    assert mixed.shape[0] == 2 + 64 + 2 + 48 + 2
    assert (mixed > 0).sum() == 3 * 48 * (64 + 64 + 48)
    small = images[:2, :, :2, :3]
    several = make_grid([*images[:6], *small], columns=3)  # rows of two shapes
    assert_array_equal(several[:28], grid[:28])
    assert several.shape == (28 + 8 + 2, grid.shape[1], 3)
    assert not several[30:, 24:].any()
