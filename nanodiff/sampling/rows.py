"""Rows that samples take as conditions, besides classes: of the model's data set."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from nanodiff.conditions import FILES, conditioning, row_shapes
from nanodiff.data.pixels import from_stored


@dataclass
class Inputs:
    """Rows of one condition: sample i takes row i, modulo their number, and that row's label (int64), if there are any.

    With aspect buckets it takes a row of the bucket nearest in shape. `buckets`: (H, W) -> range of rows.
    `read`: numbers (n,) of rows, (C, H, W) of the samples -> (n, ...) as models take them. `described`: for protocols.
    """

    read: Callable
    buckets: dict[tuple[int, int], range]
    labels: np.ndarray | None
    described: str

    def rows(self, ids, shape) -> np.ndarray:
        def difference(size):
            height, width = size
            return abs(height / width - shape[1] / shape[2])

        nearest = min(self.buckets, key=difference)
        bucket = self.buckets[nearest]
        return bucket.start + np.asarray(ids) % len(bucket)

    def __call__(self, ids, shape) -> torch.Tensor:
        return self.read(self.rows(ids, shape), shape)


def inputs_of(dataset, codec, config, device) -> dict[str, Inputs]:
    """Inputs of a model's conditions besides classes, from a set, with labels. Those in FILES need no images."""

    def read(name, rows, shape):
        if name in FILES:
            return from_stored(dataset.cond(rows), codec.description)[name]
        x0, given = codec.read(dataset, rows, device)
        return conditioning(config, given, x0)[name]

    labels = dataset.labels(np.arange(len(dataset)))
    inputs = {}
    for name in row_shapes(config):
        if name != "y":
            reader = functools.partial(read, name)
            inputs[name] = Inputs(reader, dataset.buckets, labels, dataset.described)
    return inputs
