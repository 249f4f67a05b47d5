"""Codecs of images and arrays: stored data <-> x0 <-> uint8 images."""

import numpy as np
import torch

from nanodiff.conditions import to_model_range


def to_uint8(x: torch.Tensor) -> torch.Tensor:
    """[-1, 1] -> uint8, rounded and clamped."""
    levels = (x.float() + 1) * 127.5
    return levels.round().clamp(0, 255).to(torch.uint8)


def visible(x):
    """Images (N, C, H, W), a tensor or an array -> their first three channels as colours, or the first as gray."""
    if x.shape[1] >= 3:
        return x[:, :3]
    return x[:, :1]


class Pixels:
    """Images: uint8 (N, C, H, W) <-> x0 in [-1, 1]. The base class of Arrays and Latents.

    `undecodable`: why there are no pixels, or "".
    """

    undecodable = ""
    rounding = "round(127.5 (x + 1)), clamped to 0..255"

    def __init__(self, description: dict):
        self.description = description
        channels = description["channels"]
        side = description["resolution"]
        self.shape = (channels, side, side)  # (C, H, W) of x0; for a set in buckets, a square of the same area
        sizes = description.get("sizes") or [(side, side, 1)]
        self.shapes = [(channels, height, width) for height, width, _ in sizes]  # all there are
        self.counts = np.cumsum([number for _, _, number in sizes])  # cumulative image counts
        self.image_size = side  # side of decoded images in pixels

    def sample_shape(self, number: int) -> tuple[int, int, int]:
        """(C, H, W) of a sample's x0. Samples 8k to 8k + 7 share a shape, drawn in proportion to the data."""
        u = (number // 8 + 0.5) * 0.618033988749895 % 1  # multiples of the golden ratio spread evenly
        shares = self.counts / self.counts[-1]
        return self.shapes[np.searchsorted(shares, u, side="right")]

    def to_x0(self, stored, flip=None, randn_like=None) -> torch.Tensor:
        """What the data set stores -> x0, float32; mirrored where `flip` (N,).

        A stored latent is a distribution, from which `randn_like` (as torch's) draws; None takes its mean.
        """
        return to_model_range(stored, flip)

    def to_pixels(self, x0) -> torch.Tensor:
        """x0 -> uint8 images (N, 1 or 3, H, W) on the CPU."""
        return to_uint8(visible(x0)).cpu()

    def to_output(self, x0) -> np.ndarray:
        """x0 -> (N, C, H, W) as the source of the data had them: all channels, dtype and range."""
        return to_uint8(x0).cpu().numpy()

    def picture(self, output: np.ndarray) -> np.ndarray:
        """What to_output gave -> uint8 (N, 1 or 3, H, W)."""
        return visible(output)

    def preview(self, x0) -> torch.Tensor:
        """x0 during sampling -> uint8 (N, 1 or 3, H, W) on the CPU, without decoding."""
        return self.to_pixels(x0)

    def keep_loaded(self) -> None:
        """Keep the decoder in memory, to decode batch after batch."""


class Arrays(Pixels):
    """Arrays beyond 8 bits: fp16 (N, C, H, W) in [-1, 1] <-> x0. `range` of the source's values became [-1, 1]."""

    rounding = "clamped to the range of the data"

    def to_output(self, x0):
        low, high = self.description["range"]
        dtype = np.dtype(self.description["dtype"])
        share = (x0.double().clamp(-1, 1).cpu().numpy() + 1) / 2
        values = low + share * (high - low)
        if dtype.kind in "ui":
            limits = np.iinfo(dtype)
            values = np.rint(values).clip(limits.min, limits.max)
        return values.astype(dtype)

    def picture(self, output):
        low, high = self.description["range"]
        share = (visible(output).astype(np.float64) - low) / (high - low)
        return np.rint(255 * share).astype(np.uint8)
