"""Image files and arrays -> blocks of images of one size, decoded by worker processes."""

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
from typing import NamedTuple

import numpy as np

from nanodiff.common import UserError

TASK_BYTES = 2**22  # of files and pixels that a worker gets at a time
TASK_IMAGES = 256
EXIF_ORIENTATION = 0x0112
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF", "PPM")  # decoded by Pillow itself; EPS would start Ghostscript


class Item(NamedTuple):
    """An image of a source."""

    name: str
    payload: str | bytes | np.ndarray  # path or content of a file; (H, W, C) uint8, or fp16 in [-1, 1]
    label: int
    is_val: bool
    row: int = 0  # of the source's `arrays`


def import_pillow():
    try:
        from PIL import Image
    except ImportError:
        raise UserError("reading image files needs Pillow: pip install 'nanodiff[images]'") from None
    return Image


# ---------------------------------------------------------------------------------------------------------------------
# One image


def open_image(payload: str | bytes):
    """An image file, by its path or content, as a PIL image whose pixels are not read yet."""
    Image = import_pillow()
    file = io.BytesIO(payload) if isinstance(payload, bytes) else payload
    try:
        return Image.open(file, formats=FORMATS)
    except Image.UnidentifiedImageError:
        raise ValueError(f"no image in a format of {', '.join(FORMATS)}") from None


def orientation(image) -> int:
    """EXIF's code, 1 to 8, of how the camera was held."""
    try:
        return image.getexif().get(EXIF_ORIENTATION, 1)
    except Exception:  # damaged EXIF data are no reason to lose the image
        return 1


def aspect_ratio(payload: str | bytes) -> float:
    """Width / height of an image file as it is displayed, from its header alone; NaN if it is unreadable."""
    try:
        with warnings.catch_warnings(action="ignore"), open_image(payload) as image:
            width, height = image.size
            lies_on_its_side = orientation(image) > 4
    except UserError:
        raise
    except Exception:  # Pillow raises nearly every kind on damaged files
        return math.nan
    return height / width if lies_on_its_side else width / height


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
    if scaled != image.size:
        image = image.resize(scaled, Image.Resampling.BICUBIC)
    left = (image.width - width) // 2
    top = (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))


def to_rgb(image, ground: str = "white"):
    """PIL image -> its first frame in RGB as it is displayed, on `ground` where it is transparent.

    16-bit values keep their upper 8 bits.
    """
    from PIL import Image, ImageOps

    if orientation(image) > 1:
        image = ImageOps.exif_transpose(image)
    if image.mode == "F" or image.mode.startswith("I"):
        values = np.asarray(image)
        if image.mode == "F" or values.min() < 0 or values.max() >= 2**16:
            raise ValueError("32-bit pixels, whose range is unknown")
        image = Image.fromarray((values >> 8).astype(np.uint8))
    if image.mode.endswith(("A", "a")) or "transparency" in image.info:
        image = image.convert("RGBA")
        opaque = Image.new("RGB", image.size, ground)
        opaque.paste(image, mask=image.getchannel("A"))
        return opaque
    return image.convert("RGB")


def decode(payload: str | bytes | np.ndarray, sizes: list) -> tuple[np.ndarray, int]:
    """-> (C, H, W) uint8, or fp16 for an array of it, and the image's shorter side before scaling.

    C = 3 for files. The image gets the one of `sizes`, (H, W), nearest to it in shape; without sizes it keeps its own.
    Needs Pillow for files and for scaling.
    """
    if isinstance(payload, np.ndarray):
        height, width, channels = payload.shape
        if not sizes or (height, width) in sizes:
            return payload.transpose(2, 0, 1), min(height, width)
        if payload.dtype != np.uint8 or channels not in (1, 3):
            given = f"{payload.dtype} of {width}x{height} with {channels} channels"
            raise UserError(f"resolution: only uint8 with 1 or 3 channels can be scaled, not {given}")
        image = import_pillow().fromarray(payload.squeeze(2) if channels == 1 else payload)
    else:
        image = to_rgb(open_image(payload))
    side = min(image.size)
    if sizes:
        nearest = kept_area(image.width / image.height, sizes).argmax()
        image = center_crop(image, *sizes[nearest])
    pixels = np.asarray(image)
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    return pixels.transpose(2, 0, 1), side


# ---------------------------------------------------------------------------------------------------------------------
# Many images


def decode_all(source, resolution: int, workers: int) -> Iterator:
    """The images of a Source, in blocks of one shape.

    -> images (n, C, H, W), is_val (n,) bool, {"y": labels (n,), ...} of all conditions. Adds to the source's `skipped`
    and `num_enlarged`.
    """
    sizes = source.sizes
    if resolution and not sizes:
        sizes = [(resolution, resolution)]
    tasks = make_tasks(source.items, 3 * resolution**2, TASK_IMAGES, TASK_BYTES)
    first = None
    for results in ordered_map(functools.partial(decode_task, sizes=sizes), tasks, workers):
        by_shape = {}
        for item, side in results:
            image = item.payload
            if isinstance(image, str):
                source.skipped.append(f"{item.name!r}: {image}")
                continue
            first = first or item
            if not sizes:
                check_size(item, first)
            if side < min(image.shape[1:]):
                source.num_enlarged += 1
            by_shape.setdefault(image.shape, []).append(item)
        for items in by_shape.values():
            images = np.stack([item.payload for item in items])
            is_val = np.array([item.is_val for item in items], bool)
            rows = [item.row for item in items]
            cond = {name: array[rows] for name, array in source.arrays.items()}
            yield images, is_val, cond | {"y": np.array([item.label for item in items], np.int64)}


def make_tasks(
    items: Iterable[Item],
    image_bytes: int,
    most_images: int,
    most_bytes: int,
) -> Iterator[list[Item]]:
    task, size = [], 0
    for item in items:
        task.append(item)
        size += image_bytes
        if isinstance(item.payload, bytes):
            size += len(item.payload)
        elif isinstance(item.payload, np.ndarray):
            size += item.payload.nbytes
        if size >= most_bytes or len(task) == most_images:
            yield task
            task, size = [], 0
    if task:
        yield task


def decode_task(items: list[Item], sizes: list) -> list[tuple[Item, int]]:
    """Items with the image as payload, or a str, the reason if it is unreadable; its shorter side before scaling."""
    results = []
    with warnings.catch_warnings(action="ignore"):
        for item in items:
            try:
                image, side = decode(item.payload, sizes)
            except UserError:
                raise
            except Exception as error:  # Pillow raises nearly every kind on damaged files
                image, side = (str(error) or type(error).__name__).splitlines()[0], 0
            results.append((item._replace(payload=image), side))
    return results


def check_size(item: Item, first: Item) -> None:
    """UserError unless an image that keeps its size is a square of the first one's."""
    _, height, width = item.payload.shape
    if height != width or item.payload.shape != first.payload.shape:
        _, first_height, first_width = first.payload.shape
        sizes = f"{first.name!r} is {first_width}x{first_height}, {item.name!r} is {width}x{height}"
        raise UserError(f"{sizes}; without prepare_data's --resolution all images must be squares of one size")


def ordered_map(function: Callable, tasks: Iterable, workers: int) -> Iterator:
    """map() by worker processes, each with two tasks in flight."""
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
            while pending:
                yield pending.popleft().result()
    except BrokenProcessPool:
        raise UserError(f"a worker died, probably out of memory; use fewer than workers={workers}") from None


def _init_worker() -> None:
    """Leave Ctrl-C to the parent, and end with it, even if it is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def end_with_parent():
        multiprocessing.parent_process().join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
