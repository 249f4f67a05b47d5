"""Conditions: what a model is given beside x_t and t, one dict from the set to the model. Only here do names count.

    y        labels (N,) int64
    vectors  (N, D), or sequences (N, L, D), zeros behind their end
    low_res  (N, C, h, w): super-resolution's small image, made of x0

A model's config is a Conditioned, whose fields say which of these it takes.
"""

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F

# ---------------------------------------------------------------------------------------------------------------------
# What a model takes


@dataclass(frozen=True, kw_only=True)
class Conditioned:
    """The fields of a model's config that say what it is given."""

    num_classes: int = 0  # the null class is num_classes; 0 = no labels
    low_res: int = 0  # super-resolution: side in pixels of the image that is concatenated to x_t; 0 = off
    vector_dim: int = 0  # length D of the vectors; 0 = none
    vector_len: int = 0  # L vectors an image, such as a caption, become a DiT's tokens; 0 = one, added to t's embedding


FIELDS = tuple(field.name for field in fields(Conditioned))
FACTS = ("num_classes", "vector_dim", "vector_len")  # the fields that the data decide; a description has them


def row_shapes(config: Conditioned) -> dict[str, tuple]:
    """{name: shape of a row} of all that a model takes."""
    shapes = {}
    if config.num_classes:
        shapes["y"] = ()
    if config.low_res:
        shapes["low_res"] = (config.in_channels, config.low_res, config.low_res)
    if config.vector_dim:
        shapes["vectors"] = (config.vector_len, config.vector_dim) if config.vector_len else (config.vector_dim,)
    return shapes


def droppable(config: Conditioned) -> list[str]:
    """The conditions that training drops, so that samples can be guided away from their absence."""
    return [name for name in row_shapes(config) if name != "low_res"]


def input_channels(config: Conditioned) -> int:
    """Of x_t with_images."""
    return config.in_channels * (2 if config.low_res else 1)


def with_images(x_t, low_res=None):
    """x_t (N, C, H, W) with the images of the condition, enlarged, behind its channels."""
    if low_res is None:
        return x_t
    return torch.cat([x_t, F.interpolate(low_res, x_t.shape[-2:], mode="bilinear")], dim=1)  # (N, 2C, H, W)


# ---------------------------------------------------------------------------------------------------------------------
# What a set keeps


def describe_conditions(meta: dict) -> dict:
    """A codec's description of the conditions, from a set's meta.json: FACTS, class names, statistics."""
    described = {"num_classes": len(meta["class_names"]), "class_names": list(meta["class_names"])}
    vectors = meta.get("vectors", {"dim": 0, "len": 0})
    described |= {"vector_dim": vectors["dim"], "vector_len": vectors["len"]}
    if "vectors" in meta:
        described["vectors"] = {"mean": vectors["mean"], "std": vectors["std"]}
    return described


def facts_to_match(description: dict) -> dict[str, int]:
    """What the data for a model of this description must share; classes are matched by name."""
    return {name: description[name] for name in ("vector_dim", "vector_len") if description.get("vector_dim")}
