"""Conditions, a model's inputs beside x_t and t, one dict from the set to the model; DataInfo, facts about a set.

    y        labels (N,) int64
    vectors  (N, D), or sequences (N, L, D) padded with zeros
    given    (N, C, h, w): a second image, such as a mask
    low_res  (N, C, h, w): the second image of super-resolution, made from x0

A set stores rows (to_stored), the loader passes them on, from_stored (data/pixels.py) normalises them, and
conditioning selects the model's and drops some. How to add a condition: runs/EXTEND.md.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nanodiff.common import Tensors, UserError

# ---------------------------------------------------------------------------------------------------------------------
# What a model takes


@dataclass(frozen=True, kw_only=True)
class SetConditions:
    """The conditions that a set holds, and a model that learns it takes."""

    num_classes: int = 0  # the null class is num_classes; 0 = no labels
    # Channels of a second image, concatenated to x_t with one more channel that says where it is null. 0 in published
    # and earlier super-resolution models: their second image has x_t's channels, is never null and lacks that channel
    given_channels: int = 0
    vector_dim: int = 0  # length D of the vectors; 0 = none
    vector_len: int = 0  # L vectors per image, such as a caption, become tokens; 0 = one vector, added to t's embedding


@dataclass(frozen=True, kw_only=True)
class Conditioned(SetConditions):
    """The fields of a model's config that describe its conditions."""

    low_res: int = 0  # super-resolution: side in pixels of the second image, made from x0; 0 = off

    @property
    def second_channels(self) -> int:
        """Channels of the second image; 0 = there is none."""
        return self.given_channels or (self.low_res and self.in_channels)


SET_FIELDS = tuple(SetConditions.__annotations__)
FIELDS = SET_FIELDS + tuple(Conditioned.__annotations__)
# Conditions of floats in a file, per image one row (D,) or a sequence (L, D) -> the fields of D and L
NUMBERS = {"vectors": ("vector_dim", "vector_len")}
IMAGES = ("given", "low_res")  # a model takes at most one


def row_shapes(config: Conditioned) -> dict[str, tuple]:
    """{name: shape of a row} of the conditions that a model takes."""
    shapes = {}
    if config.num_classes:
        shapes["y"] = ()
    if channels := config.second_channels:
        side = config.low_res or config.image_size
        shapes["low_res" if config.low_res else "given"] = (channels, side, side)
    for name, fields in NUMBERS.items():
        dim, length = (getattr(config, field) for field in fields)
        if dim:
            shapes[name] = (length, dim) if length else (dim,)
    return shapes


def droppable(config: Conditioned) -> list[str]:
    """The conditions that training drops: guidance needs predictions without them."""
    return [name for name in row_shapes(config) if name != "low_res" or config.given_channels]


def some_conditions(config: Conditioned, n: int, device="cpu") -> Tensors:
    """Zeros (n, ...) for each condition that a model takes, to try it out."""
    return {
        name: torch.zeros(n, *shape, dtype=torch.int64 if name == "y" else torch.float32, device=device)
        for name, shape in row_shapes(config).items()
    }


def conditioning(config: Conditioned, conditions: Tensors, x0=None, is_dropped=None) -> Tensors:
    """The model's inputs beside x_t and t: those of `conditions` that it takes and those made from x0; null where
    `is_dropped` (N,) is True."""
    rows = conditions | made_from(x0, config)
    cond = {name: rows[name] for name in row_shapes(config)}
    if is_dropped is not None:
        for name, null in null_condition(config, cond).items():
            ones = [1] * (null.ndim - 1)
            is_null = is_dropped.view(-1, *ones)
            cond[name] = torch.where(is_null, null, cond[name])
    return cond


def made_from(x0, config: Conditioned) -> Tensors:
    """The conditions that are made from x0 (N, C, H, W)."""
    if not config.low_res:
        return {}
    size = [max(1, round(side * config.low_res / config.image_size)) for side in x0.shape[2:]]
    # MPS takes averages of whole pixels alone: the CPU takes all
    x = x0.cpu() if x0.is_mps else x0
    return {"low_res": F.interpolate(x, size=size, mode="area").to(x0.device)}


def null_condition(config: Conditioned, cond: Tensors) -> Tensors:
    """Null values for the conditions in `cond` that can be dropped: the null class for labels, NaN for floats. No row
    holds NaN, so null differs from every value.
    """
    return {
        name: torch.full_like(cond[name], config.num_classes if name == "y" else math.nan) for name in droppable(config)
    }


def null_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Floats (N, ...) -> the same with 0 instead of NaN, and (N, 1, ..., 1): 1 where a row is null, else 0."""
    is_nan = x.isnan()
    is_null = is_nan.any(tuple(range(1, x.ndim)), keepdim=True)
    return x.masked_fill(is_nan, 0), is_null.to(x.dtype)


def input_channels(config: Conditioned) -> int:
    """The number of channels that with_images returns."""
    return config.in_channels + config.second_channels + (config.given_channels > 0)


def with_images(config: Conditioned, x_t, **images):
    """x_t (N, C, H, W) with more channels: the second image, resized, and one that is 1 where the image is null."""
    size = x_t.shape[2:]
    parts = [x_t]
    for image in images.values():
        image, is_null = null_rows(image)
        mode = "area" if image.shape[-1] > size[-1] else "bilinear"  # latents are smaller
        parts.append(F.interpolate(image, size, mode=mode))
        if config.given_channels:
            parts.append(is_null.expand(-1, 1, *size))
    return torch.cat(parts, dim=1)


# ---------------------------------------------------------------------------------------------------------------------
# What a set keeps

FILES = {"y": "labels"} | {name: name for name in NUMBERS}  # name -> file of rows, and its key in meta.json
GIVEN = ("given_channels", "given_scaling")  # of second images, whose channels follow the images'


@dataclass(frozen=True, kw_only=True)
class DataInfo(SetConditions):
    """What is known of the data: a set's meta.json says it, a model's checkpoints and files keep it. None: there is no
    such thing, or a file does not hold it."""

    kind: str  # images, arrays or latents
    channels: int
    resolution: int  # side of x0; in a set of buckets, of a square of about the same area
    class_names: list[str]
    name: str = ""  # of the set; "" in published files
    sha256: str | None = None  # of the splits' entries in meta.json
    val_sha256: str | None = None
    given_scaling: str | None = None  # of second images: nearest or area
    vectors: dict | None = None  # {"mean": (D,), "std": (D,)}
    range: list[float] | None = None  # of arrays: values that became -1 and 1
    dtype: str | None = None  # of arrays
    sizes: list[list[int]] | None = None  # of buckets: [height, width, number of images]
    latents: dict | None = None  # see describe_latents

    def __post_init__(self):
        if self.kind not in ("images", "arrays", "latents"):
            raise ValueError(f"data of kind {self.kind!r}")
        if self.num_classes != len(self.class_names):
            raise ValueError(f"{self.num_classes} classes with {len(self.class_names)} names")


def to_stored(name: str, rows) -> np.ndarray:
    """Rows (n, ...) of a condition as a set stores them."""
    if name == "y":
        return np.array(rows, np.int64)
    with np.errstate(over="ignore"):
        values = np.asarray(rows).astype(np.float16)
    if not np.isfinite(values).all():
        raise UserError(f"{name} hold NaN, infinity, or a number beyond 65,504, the largest in fp16")
    return values


def statistics(parts: list[np.ndarray]) -> dict:
    """The shape of NUMBERS, and mean and deviation (D,) over a set's training rows, in parts (n, D) or (n, L, D).
    A sequence's padding does not count. A constant has deviation 1.
    """
    count = 0
    total = 0.0
    squares = 0.0
    for part in parts:
        tokens = part.reshape(-1, part.shape[-1]).astype(np.float64)
        if part.ndim == 3:
            tokens = tokens[tokens.any(1)]
        count += len(tokens)
        total += tokens.sum(0)
        squares += (tokens**2).sum(0)
    count = max(count, 1)  # it is 0 if all sequences are empty
    mean = total / count
    square = squares / count
    variance = square - mean**2
    is_constant = variance <= 1e-14 * square  # float64's rounding error
    std = np.sqrt(np.where(is_constant, 1.0, variance))
    return {
        "dim": part.shape[-1],
        "len": part.shape[1] if part.ndim == 3 else 0,
        "mean": mean.tolist(),
        "std": std.tolist(),
    }
