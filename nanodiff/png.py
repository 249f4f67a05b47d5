"""PNG files and image grids, with zlib and numpy alone."""

import struct
import zlib

import numpy as np

PADDING = 2  # pixels between the images of a grid


def _chunk(kind: bytes, data: bytes) -> bytes:
    return len(data).to_bytes(4, "big") + kind + data + zlib.crc32(kind + data).to_bytes(4, "big")


def encode_png(array: np.ndarray, **text: str) -> bytes:
    """A PNG file (RFC 2083) of RGB (H, W, 3) uint8, with ASCII `text` in tEXt chunks."""
    height, width, _ = array.shape
    pixels = array.copy()
    pixels[:, 1:] -= array[:, :-1]  # filter 1, "sub", modulo 256: compresses far better than no filter
    rows = np.insert(pixels.reshape(height, -1), 0, 1, axis=1)  # each row begins with the number of its filter
    header = struct.pack(">IIBB3x", width, height, 8, 2)  # 8 bits a channel, 2: RGB, three zeros
    data = b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header)
    for key, value in text.items():
        data += _chunk(b"tEXt", f"{key}\0{value}".encode("ascii"))
    data += _chunk(b"IDAT", zlib.compress(rows.tobytes()))
    return data + _chunk(b"IEND", b"")


def make_grid(images, columns: int) -> np.ndarray:
    """Images (C, H, W) uint8, C = 1 or 3, arrays or tensors, row by row on black, small ones enlarged: (H, W, 3) uint8.

    A row is as high as its highest image.
    """
    scale = max(1, 48 // max(image.shape[2] for image in images))
    tiles = []  # (top, left, (H, W, C))
    y = PADDING
    width = 0
    for first in range(0, len(images), columns):
        x = PADDING
        row = images[first : first + columns]
        for image in row:
            tile = np.asarray(image).transpose(1, 2, 0).repeat(scale, 0).repeat(scale, 1)
            tiles.append((y, x, tile))
            x += tile.shape[1] + PADDING
        y += scale * max(image.shape[1] for image in row) + PADDING
        width = max(width, x)
    grid = np.zeros((y, width, 3), np.uint8)
    for y, x, tile in tiles:
        h, w, _ = tile.shape
        grid[y : y + h, x : x + w] = tile
    return grid
