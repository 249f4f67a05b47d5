"""Pillow reads our PNG files; grids hold the pixels given."""

import io

import numpy as np
import pytest
from PIL import Image

from nanodiff.png import encode_png, make_grid


@pytest.mark.parametrize("height, width", [(5, 7), (1, 1), (16, 16), (33, 20)])
def test_pillow_reads_back_pixels_and_text(height, width):
    array = np.random.default_rng(0).integers(0, 256, (height, 2 * width, 3), np.uint8)[::-1, ::2]
    text = {"seed": "3", "protocol": '{"steps": 50, "name": "\\u56f3"}'}
    data = encode_png(array, **text)
    Image.open(io.BytesIO(data)).verify()  # every chunk's checksum
    with Image.open(io.BytesIO(data)) as image:
        np.testing.assert_array_equal(np.asarray(image), array)
        assert image.text == text


@pytest.mark.parametrize("channels", [1, 3])
def test_each_tile_of_a_grid_is_its_image(channels):
    images = np.random.default_rng(0).integers(1, 256, (7, channels, 4, 16), np.uint8)
    grid = make_grid(images, columns=3)  # three times as large
    assert grid.shape == (3 * (12 + 2) + 2, 3 * (48 + 2) + 2, 3) and grid.dtype == np.uint8
    for i, image in enumerate(images):
        top, left = 2 + i // 3 * 14, 2 + i % 3 * 50
        tile = grid[top : top + 12, left : left + 48]
        for dy, dx in ((0, 0), (2, 1)):  # any pixel of each 3 x 3 repetition
            np.testing.assert_array_equal(tile[dy::3, dx::3], np.broadcast_to(image.transpose(1, 2, 0), (4, 16, 3)))
    assert grid.astype(int).sum() == images.astype(int).sum() * 9 * 3 // channels  # the rest is black
    assert make_grid(images[:2], 8).shape == (16, 102, 3)  # fewer images than columns: one row
    shapes = [np.full((3, h, w), 9, np.uint8) for h, w in ((64, 48), (48, 64), (48, 48))]
    mixed = make_grid(shapes, 2)  # the second row is below the first row's highest image
    assert mixed.shape[0] == 2 + 64 + 2 + 48 + 2 and (mixed > 0).sum() == 3 * 48 * (64 + 64 + 48)
    several = make_grid([*images[:6], *images[:2, :, :2, :3]], columns=3)  # rows of two shapes
    np.testing.assert_array_equal(several[:28], grid[:28])
    assert several.shape == (28 + 8 + 2, grid.shape[1], 3) and not several[30:, 24:].any()
