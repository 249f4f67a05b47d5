"""PNG files, grids of images and previews in a terminal, by zlib and numpy alone."""

import shutil
import struct
import zlib

import numpy as np


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _text_chunk(key: str, value: str) -> bytes:
    """tEXt where Latin-1 holds the value, else iTXt (UTF-8, uncompressed, no language)."""
    keyword = key.encode("latin-1")
    assert 1 <= len(keyword) <= 79 and b"\0" not in keyword, key
    try:
        return _chunk(b"tEXt", keyword + b"\0" + value.encode("latin-1"))
    except UnicodeEncodeError:
        return _chunk(b"iTXt", keyword + b"\0\0\0\0\0" + value.encode())


def encode_png(array: np.ndarray, text: dict[str, str] | None = None) -> bytes:
    """The bytes of a PNG file of `array`: uint8 (H, W) gray, (H, W, 1) gray, (H, W, 3) RGB or (H, W, 4) RGBA.

    `text` goes into tEXt/iTXt chunks, e.g. {"seed": "3"}. Source: the PNG specification, RFC 2083.
    """
    array = np.ascontiguousarray(array)
    array = array[:, :, None] if array.ndim == 2 else array
    height, width, channels = array.shape
    assert array.dtype == np.uint8 and min(height, width) > 0, (array.dtype, array.shape)
    colour_type = {1: 0, 3: 2, 4: 6}[channels]
    rows = np.zeros((height, 1 + width * channels), np.uint8)
    # Filter 1 ("sub", the difference to the pixel on the left) everywhere: a fraction of the size of no filter.
    pixels = array.copy()
    pixels[:, 1:] -= array[:, :-1]  # modulo 256, as the specification wants
    rows[:, 0] = 1
    rows[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, colour_type, 0, 0, 0)
    texts = b"".join(_text_chunk(key, str(value)) for key, value in (text or {}).items())
    data = _chunk(b"IDAT", zlib.compress(rows.tobytes(), 6))
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + texts + data + _chunk(b"IEND", b"")


def decode_png(data: bytes) -> np.ndarray:
    """The array (H, W, C) uint8 of what encode_png wrote. Raises ValueError for other files, and for a torn one."""
    try:
        chunks, at = {}, 8
        while at < len(data):
            size, kind = struct.unpack_from(">I4s", data, at)
            chunks[kind] = data[at + 8 : at + 8 + size]
            at += 12 + size
        width, height = struct.unpack_from(">II", chunks[b"IHDR"])
        rows = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, -1)
        if (rows[:, 0] != 1).any():
            raise ValueError("another filter than 1")
        return rows[:, 1:].reshape(height, width, -1).cumsum(1, dtype=np.uint8)  # modulo 256
    except (KeyError, ValueError, struct.error, zlib.error) as e:
        raise ValueError(f"not a PNG of encode_png's: {e}") from e


def make_grid(images: np.ndarray, columns: int, padding: int = 2, scale: int = 1) -> np.ndarray:
    """One picture (H, W, 3) uint8 of images (N, C, H, W) uint8, C = 1 or 3, row by row on black.

    `scale` repeats each pixel so many times both ways, so that 16 x 16 images can be looked at. `padding` counts
    pixels of the finished picture, between the images and around them.
    """
    num, channels, height, width = images.shape
    assert images.dtype == np.uint8 and channels in (1, 3) and num > 0 and columns > 0, (images.dtype, images.shape)
    columns = min(columns, num)
    rows = -(-num // columns)
    tiles = np.zeros((rows * columns, height * scale + padding, width * scale + padding, 3), np.uint8)
    pixels = images.transpose(0, 2, 3, 1).repeat(scale, 1).repeat(scale, 2)
    tiles[:num, padding:, padding:] = pixels  # one channel is broadcast to three
    grid = tiles.reshape(rows, columns, *tiles.shape[1:]).swapaxes(1, 2)
    grid = grid.reshape(rows * tiles.shape[1], columns * tiles.shape[2], 3)
    return np.pad(grid, ((0, padding), (0, padding), (0, 0)))


def terminal_preview(grid: np.ndarray, width: int | None = None) -> str:
    """`grid` (H, W, 3) uint8 as lines of 24-bit colour half blocks, two pixels a character.

    A picture wider than `width` characters (None: the terminal's) is averaged down by an integer factor.
    """
    width = shutil.get_terminal_size().columns if width is None else width
    factor = -(-grid.shape[1] // width)
    rows, columns = -(-grid.shape[0] // factor), -(-grid.shape[1] // factor)
    rows += rows % 2  # a character holds two
    margin = (rows * factor - grid.shape[0], columns * factor - grid.shape[1])
    grid = np.pad(grid, ((0, margin[0]), (0, margin[1]), (0, 0)))
    grid = grid.reshape(rows, factor, columns, factor, 3).mean((1, 3)).round().astype(int)
    lines = []
    for top, bottom in zip(grid[0::2].tolist(), grid[1::2].tolist()):
        cells = ("\033[38;2;{};{};{};48;2;{};{};{}m▀".format(*above, *below) for above, below in zip(top, bottom))
        lines.append("".join(cells) + "\033[0m")
    return "\n".join(lines)
