"""Samples that start from a given image (SDEdit) or keep a part of it (inpainting)."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from nanodiff.common import UserError
from nanodiff.data.decode import center_crop, open_image, to_rgb
from nanodiff.data.sources import Options
from nanodiff.files import reading
from nanodiff.sampling.inputs import decoded_items, open_images, with_hash


@dataclass(frozen=True)
class Known:
    """The images that a batch of samples starts from, and the part to keep.

    At `strength` s the sampler starts from the image with the noise of t = s (SDEdit, Meng et al. 2021,
    arXiv:2108.01073): 1 is plain sampling, 0 the image itself. Where `mask` is True the image, noised to the level that
    each step reaches, is put back after the step (RePaint, Lugmayr et al. 2022, arXiv:2201.09865, without resampling).
    """

    x0: torch.Tensor  # (N, C, H, W)
    strength: float
    mask: torch.Tensor  # (1, 1, H, W) bool


class GivenImages:
    """Images of an .npz (arr_0), .npy, folder: sample i starts from image i, modulo their number. `mask`: an image."""

    def __init__(self, where: str, strength: float, mask: str, codec, device):
        if codec.undecodable:
            raise UserError(f"from_images={where!r}: {codec.undecodable}")
        codec.keep_loaded()
        side = codec.image_size
        source = open_images("from_images", where, Options(val_fraction=0, range=codec.description.get("range")))
        sizes = [(side, side)] if source.unread else []  # files are scaled
        self.images = decoded_items("from_images", where, list(source.items), sizes)
        channels = 3 if "latents" in codec.description else codec.shape[0]
        shape, wanted = self.images.shape[1:], (channels, side, side)
        if shape != wanted:
            raise UserError(f"from_images={where!r}: (channels, height, width) {shape}; accepted: {wanted}")
        self.codec = codec
        self.device = device
        self.strength = strength
        self.mask = torch.zeros(1, 1, *codec.shape[1:], dtype=torch.bool, device=device)
        self.described = {"from_images": with_hash(where, self.images), "strength": strength}
        if mask:
            pixels = read_mask(mask, side)
            self.described["mask"] = with_hash(mask, pixels)
            known = torch.from_numpy(pixels).float()[None, None]
            share = F.interpolate(known, size=codec.shape[1:], mode="area")
            self.mask = (share == 1).to(device)  # a latent is known where all its pixels are
            if not self.mask.any():
                raise UserError(f"mask={mask!r} keeps nothing: no part of the {side}x{side} pixels used is white")

    def known(self, ids) -> Known:
        numbers = np.asarray(ids) % len(self.images)
        stored = torch.from_numpy(self.images[numbers]).to(self.device)
        return Known(self.codec.to_x0(stored), self.strength, self.mask)


def read_mask(path: str, side: int) -> np.ndarray:
    """(side, side) bool: white parts are kept, others drawn. From an image file, cropped and scaled like the images, or
    from an .npy of numbers or bools."""
    file = Path(path).expanduser()
    if file.suffix == ".npy":
        with reading(file):
            mask = np.load(file)
            mask = mask if mask.dtype == bool else mask >= 128
        if mask.shape != (side, side):
            raise UserError(f"mask={path!r} is of shape {mask.shape}; accepted: {(side, side)}")
        return mask
    with reading(file, "is no image"):
        image = center_crop(to_rgb(open_image(str(file)), "black"), side, side)
        return np.asarray(image.convert("L")) >= 128
