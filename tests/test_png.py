"""Pillow reads our PNG files; grids and previews hold the pixels given."""

import io
import re

import numpy as np
import pytest
from PIL import Image

from nanodiff.png import encode_png, make_grid, terminal_preview


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
    several = make_grid([*images[:6], *images[:2, :, :2, :3]], columns=3)  # rows of two shapes
    np.testing.assert_array_equal(several[:28], grid[:28])
    assert several.shape == (28 + 8 + 2, grid.shape[1], 3) and not several[30:, 24:].any()


def pixels_of(preview):
    cells = [re.findall(r"38;2;(\d+);(\d+);(\d+);48;2;(\d+);(\d+);(\d+)m▀", line) for line in preview.split("\n")]
    cells = np.array(cells, int)  # (rows / 2, columns, 6)
    return cells.reshape(len(cells), -1, 2, 3).swapaxes(1, 2).reshape(2 * len(cells), -1, 3)


def test_preview_shows_every_pixel_or_averages_to_the_width(monkeypatch):
    def preview(grid, width):
        monkeypatch.setenv("COLUMNS", str(width))  # of the terminal
        return pixels_of(terminal_preview(grid))

    grid = np.random.default_rng(0).integers(0, 256, (6, 9, 3), np.uint8)
    np.testing.assert_array_equal(preview(grid, 9), grid)
    grid = np.random.default_rng(0).integers(0, 256, (8, 40, 3), np.uint8)
    shown = preview(grid, 20)
    np.testing.assert_allclose(shown, grid.reshape(4, 2, 20, 2, 3).mean((1, 3)), atol=0.5)
    assert preview(grid, 7).shape[1] <= 7
