"""Decode image files and arrays, and crop them to a set's sizes."""

import io
import math
import re
import warnings
from collections import Counter
from typing import NamedTuple

import numpy as np

from nanodiff.common import UserError
from nanodiff.files import raise_fault

EXIF_ORIENTATION = 0x0112
THINNEST = 32
MAX_PIXELS = 2**26  # at up to 16 bytes each, while WebP is decoded
FORMATS = "JPEG PNG WEBP BMP GIF TIFF PPM".split()  # decoded by Pillow itself; EPS would start Ghostscript


Payload = str | bytes | np.ndarray  # path or content of a file; (H, W, C) numbers


class Item(NamedTuple):
    """An image of a source."""

    name: str
    payload: Payload
    label: int
    is_val: bool
    rows: dict[str, int] = {}  # noqa: RUF012 (never changed): name of a condition -> row of the source's `arrays`
    caption: str = ""
    second: tuple = ()  # payload, scaling and channels of the second image


def import_pillow():
    try:
        from PIL import Image
    except ImportError:
        raise UserError("reading image files needs Pillow: pip install 'nanodiff[images]'") from None
    warnings.filterwarnings("ignore", module="PIL")
    return Image


# ---------------------------------------------------------------------------------------------------------------------
# One image


def open_image(payload: str | bytes):
    """An image file, by its path or content, as a PIL image whose pixels are not read yet."""
    Image = import_pillow()
    try:
        image = Image.open(io.BytesIO(payload) if isinstance(payload, bytes) else payload, formats=FORMATS)
    except Image.UnidentifiedImageError:
        raise ValueError(f"no image in a format of {', '.join(FORMATS)}") from None
    if math.prod(image.size) > MAX_PIXELS:
        raise ValueError(f"{image.width}x{image.height} pixels; accepted: {MAX_PIXELS:,} in all")
    return image


def orientation(image) -> int:
    """EXIF's code, 1 to 8: how the camera was held."""
    try:
        return image.getexif().get(EXIF_ORIENTATION, 1)
    except Exception as error:  # damaged EXIF data are no reason to lose the image
        raise_fault(error)
        return 1


def aspect_ratio(payload: Payload) -> float:
    """Width / height of an image as it is displayed, from a file's header alone; NaN if it is unreadable."""
    if isinstance(payload, np.ndarray):
        return payload.shape[1] / payload.shape[0]
    try:
        with open_image(payload) as image:
            width, height = image.size
            if orientation(image) > 4 and image.format != "TIFF":  # on its side; a TIFF's size is turned
                return height / width
    except Exception as error:  # Pillow raises nearly every kind on damaged files
        raise_fault(error, "an image")
        return math.nan
    return width / height


def kept_area(ratios, sizes: list) -> np.ndarray:
    """(n, len(sizes)): the fraction that each size (H, W) keeps of images of these ratios (n,), width / height."""
    fit = np.divide.outer(ratios, [width / height for height, width in sizes])
    return np.minimum(fit, 1 / fit)


def center_crop(image, height: int, width: int, scaling: str = "bicubic"):
    """A PIL image of this size, cropped as ADM and DiT do: halve while twice too large, scale bicubically to cover the
    size, crop the centre. Another `scaling`, nearest or area, scales once.

    Unlike ADM, refuses an image of which less than 1 / THINNEST would be left: a file of 75 bytes with 10,000x1 pixels,
    scaled to cover 256x256, would take 2.9 GB.
    """
    Image = import_pillow()
    if kept_area(image.width / image.height, [(height, width)]) < 1 / THINNEST:
        raise ValueError(f"{image.width}x{image.height} pixels, too thin for {width}x{height}")
    while scaling == "bicubic" and image.width >= 2 * width and image.height >= 2 * height:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = max(width / image.width, height / image.height)
    size = round(image.width * scale), round(image.height * scale)
    image = image.resize(size, Image.Resampling["BOX" if scaling == "area" else scaling.upper()])
    left_margin = (image.width - width) // 2
    top_margin = (image.height - height) // 2
    return image.crop((left_margin, top_margin, left_margin + width, top_margin + height))


def upright(image):
    from PIL import ImageOps

    image.load()  # getexif loads a PNG, too, but orientation would hide that it is damaged
    if orientation(image) > 1:
        return ImageOps.exif_transpose(image)
    return image


def lossy_parts(image) -> list[str]:
    """What to_rgb drops of a PIL image whose pixels are not read yet: bits beyond 8, frames after the first."""
    notes = []
    # Pillow's decoder of 16 bits ends in ;16B, ;16L, ...; of PPM it is given the largest value
    if image.mode[0] in "IF" or re.search(r";16|', \d{4,}\)", str(image.tile)):
        notes.append("16 bits cut to the upper 8 (--range=0,65535 keeps those of gray images)")
    if getattr(image, "is_animated", False):
        notes.append("first of several frames")
    return notes


def to_rgb(image, background: str = "white"):
    """PIL image -> its first frame in RGB as it is displayed, on `background` where it is transparent.

    16-bit values keep their upper 8 bits.
    """
    from PIL import Image

    image = upright(image)
    if image.mode[0] in "IF":
        values = np.asarray(image)
        if image.mode == "F" or values.min() < 0 or values.max() >= 2**16:
            raise ValueError("32-bit pixels, whose range is unknown")
        image = Image.fromarray((values >> 8).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        opaque = Image.new("RGB", image.size, background)
        opaque.paste(image, mask=image)
        return opaque
    return image.convert("RGB")


def decode(
    payload: Payload,
    sizes: list,
    limits: tuple = (),
    scaling: str = "bicubic",
    background: str = "white",
) -> tuple[np.ndarray, list[str]]:
    """-> (C, H, W) uint8, or fp16 in [-1, 1] if `limits`, the values that become -1 and 1; notes of what was lost.

    C = 3 for files; 1 with limits, for Pillow reads 16 bits of colours as 8. The image is cropped to
    the size (H, W) in `sizes` nearest in shape; without sizes it keeps its own. Needs Pillow for files and for scaling.
    """
    notes = []
    if limits:
        if not isinstance(payload, np.ndarray):
            image = open_image(payload)
            notes = lossy_parts(image)[1:]  # without that on bits
            if image.mode[0] not in "IF":
                raise ValueError(f"its mode is {image.mode}; --range takes gray images of 16 or 32 bits")
            payload = np.atleast_3d(upright(image))
        low, high = limits
        x = 2 * (payload.astype(np.float64) - low) / (high - low) - 1
        if not np.isfinite(x).all():
            raise ValueError("it holds NaN or infinity")
        if abs(x).max() > 1:
            notes.append("values clipped to the range")
        x, scaling_notes = decode(x.astype(np.float32), sizes, (), scaling)
        return x.clip(-1, 1).astype(np.float16), notes + scaling_notes  # bicubic scaling goes beyond
    if isinstance(payload, np.ndarray):
        if not sizes or payload.shape[:2] in sizes:
            return payload.transpose(2, 0, 1), notes
        images = [import_pillow().fromarray(plane) for plane in payload.transpose(2, 0, 1)]
    else:
        image = open_image(payload)
        notes = lossy_parts(image)
        if image.has_transparency_data:
            notes.append(f"transparency became {background}")
        images = [to_rgb(image, background)]
    if sizes:
        width, height = images[0].size
        size = sizes[kept_area(width / height, sizes).argmax()]
        if min(width, height) < min(size):
            notes.append("enlarged, as smaller than the resolution")
        images = [center_crop(image, *size, scaling) for image in images]
    return np.dstack(images).transpose(2, 0, 1), notes


def decode_second(payload: str | np.ndarray, scaling: str, channels: int, height: int, width: int) -> np.ndarray:
    """A second image -> (C, height, width) uint8, its own channels: gray and palette numbers 1, LA 2, RGB 3, RGBA 4.

    A palette of grays counts as gray, as its order is the program's that saved the file.
    `channels`: the C that it must have; 0 = any. `scaling`: nearest or area.
    """
    name = "an array"
    if not isinstance(payload, np.ndarray):
        name = payload
        image = open_image(payload)
        if lossy_parts(image):
            raise UserError(f"{name} has over 8 bits or several frames; accepted for second images: one of 0..255")
        image = upright(image)
        if image.mode == "P" and not np.ptp(np.reshape(image.getpalette(), (-1, 3)), axis=1).any():
            image = image.convert("L")
        if image.mode not in "L LA P RGB RGBA".split():
            image = to_rgb(image).convert("L" if image.mode == "1" else "RGB")
        payload = np.asarray(image)
    array = np.atleast_3d(payload)
    if channels and array.shape[2] != channels:
        raise UserError(f"{name} has {array.shape[2]} channels; accepted for a second image: {channels}")
    second, _ = decode(array, [(height, width)], (), scaling)
    return second


def with_second(item: Item, image: np.ndarray, notes: list[str]) -> np.ndarray:
    """Append the channels of the item's second image, cropped likewise, to its image (C, H, W)."""
    if not 0.98 < aspect_ratio(item.payload) / aspect_ratio(item.second[0]) < 1.02:
        raise ValueError("its second image is unreadable or has other proportions")
    second = decode_second(*item.second, *image.shape[1:])
    if second.max() < 64:
        notes.append("second image without a value above 63 of 255 (masks hold 0 and 255, not 0 and 1)")
    if image.dtype == np.float16:
        second = second / 127.5 - 1
    return np.concatenate([image, second.astype(image.dtype)])


# ---------------------------------------------------------------------------------------------------------------------
# Many images


def decode_items(items: list[Item], sizes: list, *look):
    """-> the readable items, with images (C, H, W) as payload; "name: reason" of the others; what the images lost,
    counted. `look`: limits, scaling and background."""
    done = []
    faults = []
    losses = Counter()
    for item in items:
        try:
            image, notes = decode(item.payload, sizes, *look)
            if image.dtype == np.uint8 and image.max() < 64:
                notes.append("nearly black, no value above 63 of 255 (as of 12 bits in a 16-bit file)")
            if item.second:
                image = with_second(item, image, notes)
        except UserError:
            raise
        except Exception as error:  # Pillow raises nearly every kind on damaged files
            raise_fault(error, item.name)
            reason = str(error) or type(error).__name__
            faults.append(f"{item.name!r}: {reason.splitlines()[0]}")
            continue
        done.append(item._replace(payload=image))
        losses.update(notes)
        if not sizes:
            check_size(item.name, image.shape, done[0].payload.shape)
    return done, faults, losses


def check_size(name: str, shape: tuple, first_shape: tuple) -> None:
    """Raise UserError unless an image, by its name and shape (C, H, W), is a square of the first image's size."""
    _, height, width = shape
    if height != width or tuple(shape) != tuple(first_shape):
        raise UserError(
            f"{name!r} is {width}x{height}; without prepare_data's --resolution all images must be "
            f"squares of one size, here {first_shape[1]}x{first_shape[1]}"
        )
