"""Image files and arrays -> blocks of uint8 images of one size, decoded by worker processes."""

import contextlib
import functools
import io
import math
import multiprocessing
import os
import signal
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np

from nanodiff.common import UserError

MAX_FILE_BYTES = 2**27  # larger files are skipped
MAX_PIXELS = 2**26  # after scaling, which blows up a strip of 1 x 60,000
MAX_SIDE = 4096  # pixels; larger images are scaled or refused
LARGE_PIXELS = 2**24  # larger images are decoded one at a time: one of 80 megapixels takes 0.7 GB
CHUNK_BYTES = 2**22  # of files and pixels per task of a worker
QUEUE_BYTES = 2**26  # of tasks in flight per worker: an image of MAX_SIDE
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")  # for others Pillow may start Ghostscript
TURNS = {2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE", 6: "ROTATE_270", 7: "TRANSVERSE",
         8: "ROTATE_90"}  # by EXIF orientation  # fmt: skip
_large = threading.Lock()  # held while a large image is decoded; the workers share one


def import_pillow():
    try:
        from PIL import Image
    except ImportError:
        raise UserError("reading image files needs Pillow: pip install 'nanodiff[images]'") from None
    return Image


def aspect_ratio(payload) -> float:
    """Width / height of an image file (path or bytes), rotated by EXIF, from its header alone; NaN if unreadable."""
    Image = import_pillow()
    if isinstance(payload, str) and not os.path.isfile(payload):
        return math.nan
    file = payload if isinstance(payload, str) else io.BytesIO(payload)
    try:
        with warnings.catch_warnings(action="ignore"), Image.open(file, formats=FORMATS) as image:
            ratio = image.width / image.height
            return 1 / ratio if image.getexif().get(0x0112, 0) > 4 else ratio
    except Exception:  # Pillow raises nearly every kind on damaged files
        return math.nan


def kept_area(ratios, sizes: list) -> np.ndarray:
    """(n, len(sizes)): the fraction that each size (H, W) keeps of images of these ratios (n,), width / height."""
    fit = np.divide.outer(ratios, [width / height for height, width in sizes])
    return np.minimum(fit, 1 / fit)


def center_crop(image, height: int, width: int):
    """PIL image of this size, made as ADM and DiT do: halve while twice too large, scale bicubically to cover it, crop
    the centre."""
    Image = import_pillow()
    while image.width >= 2 * width and image.height >= 2 * height:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = max(width / image.width, height / image.height)
    scaled = round(image.width * scale), round(image.height * scale)
    if scaled[0] * scaled[1] > MAX_PIXELS:
        raise ValueError(f"too elongated: {image.width} x {image.height}")
    if scaled != image.size:
        image = image.resize(scaled, Image.Resampling.BICUBIC)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))


def to_rgb(file):
    """An open image file -> its first frame as RGB PIL image, rotated by EXIF, on white where transparent.

    16-bit values are scaled by their type's range; 32-bit ones by the 8- or 16-bit range if it fits, else their own.
    """
    Image = import_pillow()
    try:
        turn = TURNS.get(file.getexif().get(0x0112))
    except Exception:  # damaged EXIF data are no reason to lose the image
        turn = None
    image = file.transpose(Image.Transpose[turn]) if turn else file
    image.load()
    if image.mode == "F":
        raise ValueError("floating-point pixels of unknown range")
    if image.mode == "I" or image.mode.startswith("I;16"):
        bits, image = image.mode, image.convert("I")
        low, high = image.getextrema()
        if bits != "I" or (low >= 0 and high < 2**16):
            low, high = 0, 255 if bits == "I" and high < 256 else 2**16 - 1
        scale = 256 / (high - low + 1)
        image = image.point(lambda value: value * scale - low * scale).convert("L")
        image.info.pop("transparency", None)  # a value of the old range
    if image.mode.endswith(("A", "a")) or "transparency" in image.info:
        image = image.convert("RGBA")
        ground = Image.new("RGB", image.size, "white")
        ground.paste(image, mask=image.getchannel("A"))
        image = ground
    return image if image.mode == "RGB" else image.convert("RGB")  # convert would copy


def decode(payload, sizes: list) -> tuple[np.ndarray, int]:
    """An image file (path or bytes), or (H, W, C) uint8 -> (C, H, W) uint8, and its shorter side before scaling.

    C = 3 for files. It gets the size (H, W) nearest in shape; without sizes it keeps its own, files up to
    MAX_SIDE. Pillow is needed for files and for scaling.
    """
    is_array = isinstance(payload, np.ndarray)
    if is_array and (not sizes or payload.shape[:2] in sizes):
        return payload.transpose(2, 0, 1), min(payload.shape[:2])
    Image = import_pillow()
    if isinstance(payload, str):
        if not os.path.isfile(payload):  # opening a pipe would wait for ever
            raise ValueError("not a regular file")
        payload = Path(payload).read_bytes() if os.path.getsize(payload) <= MAX_FILE_BYTES else None
    if payload is None:
        raise ValueError(f"larger than {MAX_FILE_BYTES >> 20} MiB")
    if is_array:
        image = Image.fromarray(payload.squeeze(2) if payload.shape[2] == 1 else payload)
    else:
        image = Image.open(io.BytesIO(payload), formats=FORMATS)
        if not sizes and max(image.size) > MAX_SIDE:
            raise UserError(f"{image.width}x{image.height}, above {MAX_SIDE} pixels; give --resolution=...")
    with _large if image.width * image.height > LARGE_PIXELS else contextlib.nullcontext():
        image = image if is_array else to_rgb(image)
        side = min(image.size)
        if sizes:
            image = center_crop(image, *sizes[kept_area(image.width / image.height, sizes).argmax()])
        array = np.asarray(image)
    return array.reshape(*array.shape[:2], -1).transpose(2, 0, 1), side


def decode_chunk(task: tuple, sizes: list) -> list:
    """(side of the images, [(name, payload, ...)]) -> [(name, image, its shorter side before scaling, ...)].

    An unreadable image becomes a str, the reason. Without sizes, an image of another size is the last: `decode_all`
    refuses it.
    """
    expected, chunk = task
    results = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", "Image size")  # Pillow's, of a decompression bomb
        for name, payload, *label in chunk:
            try:
                image, side = decode(payload, sizes)
            except UserError as error:
                raise UserError(f"image {name!r}: {error}") from None
            except Exception as error:  # Pillow raises nearly every kind on damaged files
                image, side = str(error).splitlines()[0] if str(error) else type(error).__name__, 0
            results.append((name, image, side, *label))
            if side and not sizes and image.shape[1:] != (expected, expected):
                break
    return results


def decode_all(source, options, workers: int) -> Iterator:
    """The blocks of a Source; updates its counts. An unreadable image is skipped; if it was drawn for validation, the
    next replaces it."""
    side = options.resolution or MAX_SIDE  # of the images; with resolution=0 the first one says
    sizes = source.sizes or ([(side, side)] if options.resolution else [])

    def tasks():
        chunk, size = [], 0
        for item in source.items:
            payload = item[1]
            chunk.append(item)
            size += 3 * side**2 + (payload.nbytes if isinstance(payload, np.ndarray) else len(payload or ""))
            if size >= CHUNK_BYTES or len(chunk) == 256:
                yield size, (side, chunk)
                chunk, size = [], 0
        if chunk:
            yield size, (side, chunk)

    first = None  # description and shape of the first image
    owed = num_train = 0
    decoder = functools.partial(decode_chunk, sizes=sizes)
    for results in ordered_map(decoder, tasks(), workers):
        blocks = {}  # shape -> [(image, label, is_val)]
        for name, image, shorter, label, is_val in results:
            if isinstance(image, str):
                source.skipped.append(f"{name!r}: {image}")
                owed += int(source.val_is_drawn and is_val)
                continue
            _, height, width = image.shape
            this = f"{name!r} is {width}x{height}"
            first = first or (this, image.shape)
            if not sizes and height != width:
                raise UserError(f"image {this}, not square; prepare_data's --resolution crops it")
            if not sizes and image.shape != first[1]:
                raise UserError(f"images of several sizes: {first[0]}, {this}; prepare_data --resolution resizes them")
            side = max(height, width)
            source.num_enlarged += shorter < min(height, width)
            blocks.setdefault(image.shape, []).append((image, label, is_val))
        for rows in blocks.values():
            images, labels, held_out = (np.array(column) for column in zip(*rows))
            spare = np.flatnonzero(~held_out)[int(num_train == 0) :][:owed]
            held_out[spare] = True
            owed -= len(spare)
            num_train += np.sum(~held_out)
            yield images, labels.astype(np.int64), held_out


def ordered_map(function: Callable, tasks: Iterable, workers: int) -> Iterator:
    """map() over pairs (size in bytes, task) by worker processes, with few tasks and bytes in flight."""
    if workers == 1:
        yield from (function(task) for _, task in tasks)
        return
    pending = deque()
    try:
        with ProcessPoolExecutor(workers, initializer=_init_worker, initargs=(multiprocessing.Lock(),)) as pool:
            for size, task in tasks:
                pending.append((size, pool.submit(function, task)))
                del task  # else it stays while the next is read
                while len(pending) > 2 * workers or sum(size for size, _ in pending) > workers * QUEUE_BYTES:
                    yield pending.popleft()[1].result()
            while pending:
                yield pending.popleft()[1].result()
    except BrokenProcessPool:
        raise UserError(f"a worker died, probably out of memory; use fewer than workers={workers}") from None


def _init_worker(large) -> None:
    """Leave Ctrl-C to the parent, and end with it, even if it is killed."""
    global _large
    _large = large
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def end_with_parent():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
