"""Image files and arrays -> blocks of uint8 images of one size, by worker processes. Needs Pillow."""

import functools
import io
import itertools
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import numpy as np

from nanodiff.common import UserError

MAX_FILE_BYTES = 2**28  # of one image file; larger ones are skipped
MAX_PIXELS = 2**26  # of one image after scaling: a strip of 1 x 60,000 pixels is no picture
CHUNK_BYTES = 2**22  # of pixels, decoded as one task of a worker
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")  # by content; for others Pillow may start Ghostscript


def import_pillow():
    """PIL.Image, or a UserError that says what to install."""
    try:
        from PIL import Image
    except ImportError:
        raise UserError(
            "reading image files needs Pillow: pip install 'nanodiff[images]' (or pip install Pillow)"
        ) from None
    return Image


def center_crop(image, size: int):
    """PIL image -> size x size: halved by box filter while twice too large, bicubic, centre (as ADM and DiT do)."""
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
    """One image, a path, bytes or (H, W, C) uint8 array -> (C, H, W) uint8; C = 3 for files. resolution 0: as it is.

    EXIF rotation is applied, alpha dropped, 16 bit reduced to the upper 8, of an animation the first frame is taken.
    """
    Image = import_pillow()
    if payload is None or (isinstance(payload, str) and os.path.getsize(payload) > MAX_FILE_BYTES):
        raise ValueError(f"larger than {MAX_FILE_BYTES >> 20} MiB")
    if isinstance(payload, np.ndarray):
        image = Image.fromarray(payload.squeeze(2) if payload.shape[2] == 1 else payload)
    else:
        with Image.open(io.BytesIO(payload) if isinstance(payload, bytes) else payload, formats=FORMATS) as file:
            image = upright(file, Image)
            image.load()
        if image.mode == "I" or image.mode.startswith("I;16"):
            image = Image.fromarray((np.asarray(image).clip(0, 65535) >> 8).astype(np.uint8))
        if image.mode == "F":
            raise ValueError("floating-point pixels, whose range is unknown")
        image = image.convert("RGB")
    array = np.asarray(center_crop(image, resolution) if resolution else image)
    return array.reshape(*array.shape[:2], -1).transpose(2, 0, 1)


def upright(image, Image):
    """The image turned as its EXIF orientation tells; damaged EXIF data are no reason to lose the image."""
    turns = Image.Transpose
    turns = {2: turns.FLIP_LEFT_RIGHT, 3: turns.ROTATE_180, 4: turns.FLIP_TOP_BOTTOM, 5: turns.TRANSPOSE,
             6: turns.ROTATE_270, 7: turns.TRANSVERSE, 8: turns.ROTATE_90}  # fmt: skip
    try:
        orientation = image.getexif().get(0x0112)
    except Exception:
        orientation = None
    return image.transpose(turns[orientation]) if orientation in turns else image


def decode_chunk(chunk: list, resolution: int):
    """[(name, payload)] -> images (n, C, H, W), the first one's name, which of the chunk they are, ["name: reason"] of
    those that cannot be read. Raises UserError where sizes differ."""
    Image = import_pillow()
    images, kept, skipped = [], [], []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        for i, (name, payload) in enumerate(chunk):
            try:
                images.append(decode(payload, resolution))
            except Exception as error:  # Pillow raises nearly every kind on damaged files
                skipped.append(f"{name!r}: {str(error).splitlines()[0] if str(error) else type(error).__name__}")
                continue
            kept.append(i)
            same_size((chunk[kept[0]][0], images[0].shape), (name, images[-1].shape))
    first = chunk[kept[0]][0] if kept else ""
    return np.stack(images) if images else np.empty((0, 3, 1, 1), np.uint8), first, kept, skipped


def same_size(first: tuple, second: tuple) -> None:
    """Compare (name, (C, H, W)) of two images. Raises UserError where they differ."""
    (a, (_, ha, wa)), (b, (_, hb, wb)) = first, second
    if (ha, wa) != (hb, wb):
        raise UserError(f"images of several sizes: {a!r} is {wa}x{ha}, {b!r} is {wb}x{hb}; give --resolution=...")


def decode_all(items: Iterable, labels: np.ndarray, is_val: np.ndarray, resolution: int, workers: int, skipped: list):
    """(index, name, payload) in any order -> blocks as in Source; unreadable images are told in `skipped`."""
    size = min(256, max(8, CHUNK_BYTES // (3 * (resolution or 128) ** 2)))  # images a task
    indices = deque()  # of the tasks in flight

    def tasks():
        iterator = iter(items)
        while chunk := list(itertools.islice(iterator, size)):
            indices.append(np.array([index for index, _, _ in chunk]))
            yield [(name, payload) for _, name, payload in chunk]

    first, function = None, functools.partial(decode_chunk, resolution=resolution)
    for images, name, kept, bad in ordered_map(function, tasks(), workers):
        index = indices.popleft()[kept]
        skipped += bad
        if kept:
            first = first or (name, images.shape[1:])
            same_size(first, (name, images.shape[1:]))
            _, height, width = first[1]
            if height != width:
                raise UserError(f"image {name!r} is {width}x{height}, not square; give --resolution=...")
            yield images, labels[index], is_val[index]


def ordered_map(function: Callable, tasks: Iterable, workers: int) -> Iterator:
    """map() by worker processes: results in the order of the tasks, few of them in flight."""
    if workers == 1:
        yield from map(function, tasks)
        return
    # Forked workers start at once and import nothing; elsewhere than on Linux the system's libraries do not survive it.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    pending = deque()
    with ProcessPoolExecutor(workers, context, initializer=_init_worker) as pool:
        try:
            for task in tasks:
                pending.append(pool.submit(function, task))
                if len(pending) > 2 * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        except BrokenProcessPool:
            raise UserError(
                f"a worker process died, probably out of memory; use fewer than workers={workers}"
            ) from None
        finally:
            for future in pending:
                future.cancel()


def _init_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's affair

    def end_with_parent():  # else a killed parent would leave workers behind that wait for ever
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
