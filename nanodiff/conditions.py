"""Conditions: a model's inputs beside x_t and t, one dict from the set to the model.

    y        labels (N,) int64
    vectors  (N, D), or sequences (N, L, D) padded with zeros
    given    (N, C, h, w): a second image, such as a mask
    low_res  (N, C, h, w): the second image of super-resolution, made from x0

A set stores rows (to_stored), the loader passes them on, from_stored (data/pixels.py) normalises them, and
conditioning selects the model's and drops some. How to add a condition: runs/GUIDE.md, Change.
"""

import math
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nanodiff.common import Tensors, UserError

# ---------------------------------------------------------------------------------------------------------------------
# What a model takes


@dataclass(frozen=True, kw_only=True)
class Conditioned:
    """The fields of a model's config that describe its conditions."""

    num_classes: int = 0  # the null class is num_classes; 0 = no labels
    # Channels of a second image, concatenated to x_t with one more channel that says where it is null. 0 in published
    # and earlier super-resolution models: their second image has x_t's channels, is never null and lacks that channel
    given_channels: int = 0
    low_res: int = 0  # super-resolution: side in pixels of the second image, made from x0; 0 = off
    vector_dim: int = 0  # length D of the vectors; 0 = none
    vector_len: int = 0  # L vectors per image, such as a caption, become tokens; 0 = one vector, added to t's embedding

    @property
    def second_channels(self) -> int:
        """Channels of the second image; 0 = there is none."""
        if self.low_res and not self.given_channels:
            return self.in_channels
        return self.given_channels


FIELDS = tuple(Conditioned.__annotations__)
# Conditions of floats in a file, per image one row (D,) or a sequence (L, D) -> the fields of D and L
NUMBERS = {"vectors": ("vector_dim", "vector_len")}
# The fields that the data decide, kept in a codec's description. The first is matched by class names
FACTS = ("num_classes", "given_channels", *chain(*NUMBERS.values()))
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
        name: torch.zeros(n, *shape, dtype=torch.int64 if name == "y" else None, device=device)
        for name, shape in row_shapes(config).items()
    }


def conditioning(config: Conditioned, conditions: Tensors, x0=None, is_dropped=None) -> Tensors:
    """The model's inputs beside x_t and t: those of `conditions` that it takes and those made from x0; null where
    `is_dropped` (N,) is True."""
    rows = conditions | made_from(x0, config)
    cond = {name: rows[name] for name in row_shapes(config)}
    if is_dropped is not None:
        for name, null in null_condition(config, cond).items():
            is_null = is_dropped.view(-1, *[1] * (null.ndim - 1))
            cond[name] = torch.where(is_null, null, cond[name])
    return cond


def made_from(x0, config: Conditioned) -> Tensors:
    """The conditions that are made from x0 (N, C, H, W)."""
    if not config.low_res:
        return {}
    size = [max(1, round(side * config.low_res / config.image_size)) for side in x0.shape[2:]]
    # MPS takes averages of whole pixels alone: the CPU takes all
    small = F.interpolate(x0.cpu() if x0.is_mps else x0, size=size, mode="area")
    return {"low_res": small.to(x0.device)}


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
GIVEN = ("given_channels", "given_scaling")  # keys of second images, whose channels follow the images'


def describe_conditions(meta: dict) -> dict:
    """A codec's description of the conditions, from a set's meta.json: FACTS, class names, statistics."""
    class_names = meta["class_names"]
    description = {"num_classes": len(class_names), "class_names": class_names}
    description |= {key: meta[key] for key in GIVEN if key in meta}
    for name, (dim, length) in NUMBERS.items():
        shape = meta.get(name, {"dim": 0, "len": 0})
        description[dim] = shape["dim"]
        description[length] = shape["len"]
        if name in meta:
            description[name] = {"mean": shape["mean"], "std": shape["std"]}
    return description


def to_stored(name: str, rows, meta: dict) -> np.ndarray:
    """Rows (n, ...) of a condition as a set stores them; the shape of float rows is noted in its `meta`."""
    if name == "y":
        rows = np.array(rows, np.int64)
        assert rows.ndim == 1 and 0 <= rows.min() <= rows.max() < len(meta["class_names"])
        return rows
    with np.errstate(over="ignore"):
        values = np.asarray(rows).astype(np.float16)
    if not np.isfinite(values).all():
        raise UserError(f"{name} hold NaN, infinity, or a number beyond 65,504, the largest in fp16")
    meta.setdefault(name, {"dim": values.shape[-1], "len": values.shape[1] if values.ndim == 3 else 0})
    return values


def note_statistics(rows: dict[str, list], meta: dict) -> None:
    """Add the mean and deviation (D,) of each of NUMBERS, over a set's training rows {name: arrays}, to its `meta`.
    A sequence's padding does not count. A constant has deviation 1.
    """
    for name in NUMBERS.keys() & rows:
        if "mean" in meta[name]:  # a set of latents copies its image set's
            continue
        count = 0
        total = 0.0
        squares = 0.0
        for part in rows[name]:
            tokens = part.reshape(-1, part.shape[-1]).astype(np.float64)
            if part.ndim == 3:
                tokens = tokens[tokens.any(1)]
            count += len(tokens)
            total += tokens.sum(0)
            squares += (tokens**2).sum(0)
        mean = total / max(count, 1)  # count is 0 if all sequences are empty
        square = squares / max(count, 1)
        variance = square - mean**2
        is_constant = variance <= 1e-14 * square  # float64's rounding error
        meta[name] |= {"mean": mean.tolist(), "std": np.sqrt(np.where(is_constant, 1.0, variance)).tolist()}
