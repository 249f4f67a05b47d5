"""PNG files, image grids and terminal previews, with zlib and numpy alone."""

import shutil
import struct
import zlib

import numpy as np


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def encode_png(array: np.ndarray, text: dict[str, str] | None = None) -> bytes:
    """A PNG file (RFC 2083) of uint8 (H, W) or (H, W, C), C = 1, 3 or 4, with ASCII `text` in tEXt chunks."""
    array = array[:, :, None] if array.ndim == 2 else array
    height, width, channels = array.shape
    colour_type = {1: 0, 3: 2, 4: 6}[channels]  # gray, RGB, RGBA
    pixels = array.copy()
    pixels[:, 1:] -= array[:, :-1]  # filter 1, "sub": modulo 256; it compresses far better than none
    rows = np.ones((height, 1 + width * channels), np.uint8)  # each row begins with the number of its filter
    rows[:, 1:] = pixels.reshape(height, -1)
    data = b"\x89PNG\r\n\x1a\n"
    data += _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, colour_type, 0, 0, 0))
    for key, value in (text or {}).items():
        data += _chunk(b"tEXt", f"{key}\0{value}".encode("ascii"))
    return data + _chunk(b"IDAT", zlib.compress(rows.tobytes(), 6)) + _chunk(b"IEND", b"")


def make_grid(images, columns: int, padding: int = 2, scale: int = 0) -> np.ndarray:
    """Images (C, H, W) uint8, C = 1 or 3, row by row on black, enlarged `scale` times: (H, W, 3) uint8.

    Images in a row share a shape. scale=0 enlarges small ones.
    """
    scale = scale or max(1, 48 // max(image.shape[2] for image in images))
    rows = []  # (3, H, W)
    for first in range(0, len(images), columns):
        row = np.stack(images[first : first + columns]).repeat(scale, 2).repeat(scale, 3)
        tiles = np.pad(row, ((0, 0), (0, 0), (padding, 0), (padding, 0)))
        tiles = np.broadcast_to(tiles, (len(row), 3, *tiles.shape[2:]))
        rows.append(np.concatenate(list(tiles), axis=2))
    width = max(row.shape[2] for row in rows)
    grid = np.concatenate([np.pad(row, ((0, 0), (0, 0), (0, width - row.shape[2]))) for row in rows], axis=1)
    return np.pad(grid, ((0, 0), (0, padding), (0, padding))).transpose(1, 2, 0)


def terminal_preview(grid: np.ndarray, width: int | None = None) -> str:
    """`grid` (H, W, 3) uint8 as half blocks, two pixels per character, averaged to `width` (None: the terminal's)."""
    width = shutil.get_terminal_size().columns if width is None else width
    factor = -(-grid.shape[1] // width)
    rows, columns = -(-grid.shape[0] // (2 * factor)) * 2, -(-grid.shape[1] // factor)  # a character holds two rows
    grid = np.pad(grid, ((0, rows * factor - grid.shape[0]), (0, columns * factor - grid.shape[1]), (0, 0)))
    grid = grid.reshape(rows, factor, columns, factor, 3).mean((1, 3)).round().astype(int)
    lines = []
    for top, bottom in zip(grid[0::2].tolist(), grid[1::2].tolist()):
        cells = ("\033[38;2;{};{};{};48;2;{};{};{}m▀".format(*above, *below) for above, below in zip(top, bottom))
        lines.append("".join(cells) + "\033[0m")
    return "\n".join(lines)
