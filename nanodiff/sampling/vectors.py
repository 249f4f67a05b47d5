"""Vectors to sample with: rows of a file, or those of the validation images."""

from pathlib import Path

import numpy as np
import torch

from nanodiff.common import UserError
from nanodiff.data.dataset import normal_vectors
from nanodiff.data.sources import read_vectors
from nanodiff.sampling.low_res import own_images, with_hash


class Vectors:
    """Sample i takes row i, modulo their number, and the label of the image that the row belongs to, if any.

    `read`: ids (n,) -> (n, D) or (n, L, D) fp32. `description` is the codec's: its mean and deviation normalise vectors
    as in training.
    """

    def __init__(self, read, count: int, labels: np.ndarray | None, described: str):
        self.read = read
        self.count = count
        self.labels = None if labels is None else torch.from_numpy(labels)
        self.described = described

    @classmethod
    def of_file(cls, where: str, description: dict) -> "Vectors":
        """A file of vectors as it was given to prepare_data, .npy or .npz; the names in it do not matter."""
        _, array = read_vectors(Path(where).expanduser())
        length, dim = description["vector_len"], description["vector_dim"]
        shape = (length, dim) if length else (dim,)
        if array.shape[1:] != shape or not len(array):
            raise UserError(f"vectors={where!r} holds vectors of {array.shape}; accepted: {('n', *shape)}")
        if not np.isfinite(array).all():
            raise UserError(f"vectors={where!r} holds NaN or infinity")
        stats = description["vectors"]
        rows = normal_vectors(array, stats["mean"], stats["std"])
        return cls(rows.__getitem__, len(rows), None, with_hash(where, rows))

    @classmethod
    def of_dataset(cls, dataset, description: dict) -> "Vectors":
        """The vectors and labels of a set's images."""
        dataset.normalise_vectors_by(description["vectors"])
        labels = dataset.labels(np.arange(len(dataset)))
        return cls(dataset.vectors, len(dataset), labels, dataset.described)

    def __call__(self, ids) -> torch.Tensor:
        """(n, D) or (n, L, D) fp32."""
        return torch.from_numpy(self.read(np.asarray(ids) % self.count))


def open_vectors(where: str, loaded) -> Vectors | None:
    """The vectors for a Loaded model; None for a model without, which takes no `where`. "": its validation images'."""
    description = loaded.data
    if not loaded.model.config.vector_dim:
        if where:
            raise UserError(f"vectors={where!r} would do nothing: {loaded.source} was trained without vectors")
        return None
    if where:
        return Vectors.of_file(where, description)
    dataset = own_images(loaded, "vectors from: give --vectors=FILE.npy")
    return Vectors.of_dataset(dataset, description)
