"""Image files and arrays -> blocks of uint8 images of one size, decoded by worker processes. Needs Pillow."""

import functools
import io
import itertools
import multiprocessing
import os
import signal
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import numpy as np

from nanodiff.common import UserError

MAX_FILE_BYTES = 2**28  # larger files are skipped
MAX_PIXELS = 2**26  # after scaling: a strip of 1 x 60,000 pixels is no picture
CHUNK_BYTES = 2**22  # of pixels per task of a worker
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")  # for others Pillow may start Ghostscript
TURNS = {2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE", 6: "ROTATE_270", 7: "TRANSVERSE",
         8: "ROTATE_90"}  # by EXIF orientation  # fmt: skip


def import_pillow():
    try:
        from PIL import Image
    except ImportError:
        raise UserError("reading image files needs Pillow: pip install 'nanodiff[images]'") from None
    return Image


def center_crop(image, size: int):
    """PIL image -> size x size, as ADM and DiT do: halve while twice too large, scale bicubically, crop the centre."""
    Image = import_pillow()
    while min(image.size) >= 2 * size:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = size / min(image.size)
    scaled = round(image.width * scale), round(image.height * scale)
    if scaled[0] * scaled[1] > MAX_PIXELS:
        raise ValueError(f"too elongated: {image.width} x {image.height}")
    if scaled != image.size:
        image = image.resize(scaled, Image.Resampling.BICUBIC)
    left, top = (image.width - size) // 2, (image.height - size) // 2
    return image.crop((left, top, left + size, top + size))


def decode(payload, resolution: int) -> np.ndarray:
    """An image file (path or bytes), or (H, W, C) uint8 -> (C, H, W) uint8; C = 3 for files. resolution 0: as it is.

    Applies EXIF rotation, drops alpha, keeps the upper 8 of 16 bits and the first frame of an animation.
    """
    Image = import_pillow()
    if payload is None or (isinstance(payload, str) and os.path.getsize(payload) > MAX_FILE_BYTES):
        raise ValueError(f"larger than {MAX_FILE_BYTES >> 20} MiB")
    if isinstance(payload, np.ndarray):
        image = Image.fromarray(payload.squeeze(2) if payload.shape[2] == 1 else payload)
    else:
        with Image.open(io.BytesIO(payload) if isinstance(payload, bytes) else payload, formats=FORMATS) as file:
            try:
                turn = TURNS.get(file.getexif().get(0x0112))
            except Exception:  # damaged EXIF data are no reason to lose the image
                turn = None
            image = file.transpose(Image.Transpose[turn]) if turn else file
            image.load()
        if image.mode == "I" or image.mode.startswith("I;16"):
            image = Image.fromarray((np.asarray(image).clip(0, 65535) >> 8).astype(np.uint8))
        if image.mode == "F":
            raise ValueError("floating-point pixels of unknown range")
        image = image.convert("RGB")
    array = np.asarray(center_crop(image, resolution) if resolution else image)
    return array.reshape(*array.shape[:2], -1).transpose(2, 0, 1)


def decode_chunk(chunk: list, resolution: int) -> list:
    """[(index, name, payload)] -> [(index, name, image)]; why not, as a str, in place of an unreadable image."""
    Image = import_pillow()
    results = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        for index, name, payload in chunk:
            try:
                image = decode(payload, resolution)
            except Exception as error:  # Pillow raises nearly every kind on damaged files
                image = str(error).splitlines()[0] if str(error) else type(error).__name__
            results.append((index, name, image))
    return results


def decode_all(items: Iterator, labels: np.ndarray, is_val: np.ndarray, resolution: int, workers: int, skipped: list):
    """(index, name, payload) in any order -> blocks as in Source; unreadable images are skipped, a line each."""
    size = min(256, max(8, CHUNK_BYTES // (3 * (resolution or 128) ** 2)))  # images per task
    chunks = iter(lambda: list(itertools.islice(items, size)), [])
    first = None  # description and shape of the first image
    for results in ordered_map(functools.partial(decode_chunk, resolution=resolution), chunks, workers):
        images, rows = [], []
        for index, name, image in results:
            if isinstance(image, str):
                skipped.append(f"{name!r}: {image}")
                continue
            _, height, width = image.shape
            this = f"{name!r} is {width}x{height}"
            first = first or (this, image.shape)
            if height != width:
                raise UserError(f"image {this}, not square; prepare_data's --resolution crops it")
            if image.shape != first[1]:
                raise UserError(f"images of several sizes: {first[0]}, {this}; prepare_data's --resolution makes one")
            images.append(image)
            rows.append(index)
        if images:
            yield np.stack(images), labels[rows], is_val[rows]


def ordered_map(function: Callable, tasks: Iterable, workers: int) -> Iterator:
    """map() by worker processes, with few tasks in flight."""
    if workers == 1:
        yield from map(function, tasks)
        return
    pending = deque()
    try:
        with ProcessPoolExecutor(workers, initializer=_init_worker) as pool:
            for task in tasks:
                pending.append(pool.submit(function, task))
                if len(pending) > 2 * workers:
                    yield pending.popleft().result()
            for future in pending:
                yield future.result()
    except BrokenProcessPool:
        raise UserError(f"a worker died, probably out of memory; use fewer than workers={workers}") from None


def _init_worker() -> None:
    """Leave Ctrl-C to the parent, and end with it: workers of a killed parent would wait forever."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def end_with_parent():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
