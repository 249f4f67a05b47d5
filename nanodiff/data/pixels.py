"""Codecs of images and arrays: stored data <-> x0 <-> uint8 images."""

import numpy as np
import torch
from torch import Tensor

from nanodiff.common import Tensors, UserError
from nanodiff.conditions import NUMBERS, SET_FIELDS, DataInfo

Shape = tuple[int, int, int]  # (C, H, W)


def to_model_range(images: Tensor, flip: Tensor | None = None) -> Tensor:
    """uint8 (N, C, H, W), or floats in [-1, 1] -> fp32 in [-1, 1]; mirrored left-right where `flip` (N,) is True."""
    x = images.float()
    if images.dtype == torch.uint8:
        x = x / 127.5 - 1
    if flip is None:
        return x
    flip = flip.to(x.device).view(-1, 1, 1, 1)
    return torch.where(flip, x.flip(3), x)


def from_stored(rows, data: DataInfo, flip=None, device=None) -> Tensors:
    """Stored rows {name: array or tensor} -> what models take.

    NUMBERS become fp32 with mean 0 and deviation 1 in each dimension, by the model's data; the zeros that pad a
    sequence stay. Second images (N, C, H, W) pass to_model_range, mirrored with their images.
    """
    cond = {name: torch.as_tensor(x, device=device) for name, x in rows.items()}
    if "given" in cond:
        cond["given"] = to_model_range(cond["given"], flip)
    for name in NUMBERS.keys() & cond:
        values = cond[name]
        numbers = getattr(data, name)
        mean_and_std = torch.tensor([numbers["mean"], numbers["std"]])  # (2, D)
        mean, std = mean_and_std.to(values.device, non_blocking=True)
        normal = (values.float() - mean) / std
        if values.ndim == 3:
            normal[~values.any(2)] = 0
        cond[name] = normal
    return cond


def to_uint8(x: Tensor) -> Tensor:
    """[-1, 1] -> uint8, rounded and clamped."""
    levels = (x.float() + 1) * 127.5
    return levels.round().clamp(0, 255).to(torch.uint8)


def visible(x):
    """Images (N, C, H, W), a tensor or an array -> their first three channels as colours, or the first as gray."""
    channels = 3 if x.shape[1] >= 3 else 1
    return x[:, :channels]


class Pixels:
    """Images: uint8 (N, C, H, W) <-> x0 in [-1, 1]. The base class of Arrays and Latents. `device`: the model's."""

    rounding = "round(127.5 (x + 1)), clamped to 0..255"
    downsample = 1  # pixels of the image per pixel of x0, along a side

    def __init__(self, data: DataInfo, device="cpu"):
        self.data = data
        self.device = device
        channels = data.channels
        side = data.resolution
        self.shape = (channels, side, side)  # (C, H, W) of x0; for a set in buckets, a square of about that area
        sizes = data.sizes or [(side, side, 1)]
        self.shapes = [(channels, height, width) for height, width, _ in sizes]  # of all buckets
        self.counts = np.cumsum([number for _, _, number in sizes])  # cumulative image counts
        self.image_size = side  # side of decoded images in pixels

    def sample_shape(self, number: int) -> Shape:
        """(C, H, W) of a sample's x0. Samples 8k to 8k + 7 share a shape, drawn in proportion to the data."""
        u = (number // 8 + 0.5) * 0.618033988749895 % 1  # multiples of the golden ratio spread evenly
        shares = self.counts / self.counts[-1]
        return self.shapes[np.searchsorted(shares, u, side="right")]

    def accept(self, dataset, **overrides) -> None:
        """Prepare to read a set. UserError unless its data agree with the model's; `overrides`: values in which the
        stored form differs."""
        facts = vars(self.data) | overrides
        for key in ("kind", "channels", "resolution", "range", *SET_FIELDS[1:]):  # classes are matched by name
            value = getattr(dataset.data, key)
            if value != facts[key]:
                raise UserError(f"data={dataset.name!r} has {key} {value}, the model wants {facts[key]}")

    def to_x0(self, batch, flip=None, randn_like=None) -> Tensor:
        """What the data set stores -> x0, fp32; mirrored where `flip` (N,) is True.

        Latents are distributions: `randn_like` (as torch's) draws a sample; None takes the mean.
        """
        return to_model_range(batch, flip)

    def read(self, dataset, ids, randn_like=None):
        """x0 (N, C, H, W) of images of a set, and their conditions as models take them."""
        images, rows = dataset.rows(ids)
        images = torch.from_numpy(images).to(self.device)
        x0 = self.to_x0(images, None, randn_like)
        return x0, from_stored(rows, self.data, device=self.device)

    def to_pixels(self, x0) -> Tensor:
        """x0 -> uint8 images (N, 1 or 3, H, W) on the CPU."""
        return to_uint8(visible(x0)).cpu()

    def to_output(self, x0) -> np.ndarray:
        """x0 -> (N, C, H, W) as in the data's source: all channels, its dtype and range."""
        return to_uint8(x0).cpu().numpy()

    def picture(self, output: np.ndarray) -> np.ndarray:
        """An array from to_output -> uint8 (N, 1 or 3, H, W)."""
        return visible(output)

    def preview(self, x0) -> Tensor:
        """x0 during sampling -> uint8 (N, 1 or 3, H, W) on the CPU, without decoding."""
        return self.to_pixels(x0)

    def keep_loaded(self) -> None:
        """Keep the decoder in memory, to decode batch after batch."""

    def decoder(self):
        """The model that decodes x0, or None if none is needed; UserError if its file is missing."""


class Arrays(Pixels):
    """Arrays beyond 8 bits: fp16 (N, C, H, W) in [-1, 1] <-> x0. The source's values in `range` became [-1, 1]."""

    rounding = "clamped to the range of the data"

    def to_output(self, x0):
        dtype = np.dtype(self.data.dtype)
        x = x0.cpu().numpy()
        values = np.interp(x, (-1, 1), self.data.range)  # in float64, clamped
        if dtype.kind in "ui":
            limits = np.iinfo(dtype)
            values = np.rint(values).clip(limits.min, limits.max)
        return values.astype(dtype)

    def picture(self, output):
        levels = np.interp(visible(output), self.data.range, (0, 255))
        return np.rint(levels).astype(np.uint8)
