"""Samples that start from a given image (SDEdit) or keep a part of it (inpainting)."""

import numpy as np
import torch
import torch.nn.functional as F

from nanodiff.common import UserError, at
from nanodiff.data.decode import center_crop, open_image, to_rgb
from nanodiff.files import reading
from nanodiff.sampling.draw import Known
from nanodiff.sampling.inputs import decoded_items, open_images, with_hash


def read_from_images(where: str, samples) -> np.ndarray:
    """The images of an .npz (arr_0), .npy, folder or file; those of 8 bits are scaled and cropped."""
    side = samples.codec.image_size
    source = open_images("from_images", where, samples.codec.description.get("range"))
    sizes = [] if "range" in source.meta else [(side, side)]
    return decoded_items("from_images", where, source.items, sizes)


def start_from(samples, images: np.ndarray, where: str, strength: float, mask: str = "") -> None:
    """Let ModelSamples start from images, which were read from `where`, and keep the white parts of `mask`, a file."""
    codec = samples.codec
    if images.shape[1:] != samples.shape:
        accepted = f"(channels, height, width) {images.shape[1:]}; accepted: {samples.shape}"
        raise UserError(f"from_images={where!r}: {accepted}")
    described = {"from_images": with_hash(where, images), "strength": strength}
    is_known = torch.zeros(1, 1, *codec.shape[1:], dtype=torch.bool)
    if mask:
        pixels = read_mask(mask, codec.image_size)
        described["mask"] = with_hash(mask, pixels)
        whites = torch.from_numpy(pixels).float()[None, None]  # (1, 1, H, W)
        share = F.interpolate(whites, size=codec.shape[1:], mode="area")
        is_known = share == 1  # a latent is known where all its pixels are
        if not is_known.any():
            raise UserError(f"mask={mask!r} keeps nothing: no part of the {codec.image_size} pixels used is white")
    samples.given = Known(torch.tensor(images), strength, is_known, described)
    samples.size = codec.shape


def read_mask(path: str, side: int) -> np.ndarray:
    """(side, side) bool: white parts are kept, others drawn. From an image file, cropped and scaled like the images, or
    from an .npy of bools or numbers, up to 1 or 255."""
    file = at(path)
    with reading(file, "is no image"):
        if file.suffix == ".npy":
            levels = np.load(file)
        else:
            image = to_rgb(open_image(str(file)), "black")
            gray = center_crop(image, side, side).convert("L")
            levels = np.asarray(gray)
        if levels.shape != (side, side):
            raise UserError(f"mask={path!r} is of shape {levels.shape}; accepted: {(side, side)}")
        return levels >= (128 if levels.max() > 1 else 0.5)
