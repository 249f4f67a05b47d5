"""Results that take minutes to compute are cached beside their data set, in a keyed .npz."""

import hashlib
from pathlib import Path

import numpy as np
import torch

from nanodiff.common import Tensors, is_first_rank, print0
from nanodiff.data.dataset import Dataset, verify
from nanodiff.dist import from_first_rank, over_ranks
from nanodiff.files import reading, writing


def cached(path: Path, datasets: list[Dataset], extras: list, compute) -> Tensors | None:
    """What compute() returns, {name: tensor}, cached at `path` under the hash of the splits that it reads, which are
    verified before, and of other arrays and bytes.

    Called by all ranks. Only the first rank gets the tensors; on the others compute() may return None.
    """
    hasher = hashlib.sha256("".join(dataset.sha256 for dataset in datasets).encode())
    for x in extras:
        hasher.update(np.ascontiguousarray(x))
    key = hasher.hexdigest()
    tensors = None
    if is_first_rank() and path.exists():
        with reading(path, "is damaged: delete it, and it is computed again"):
            arrays = {**np.load(path)}
            if str(arrays.pop("key")) == key:
                tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    if from_first_rank(tensors is not None):
        return tensors
    for dataset in datasets:  # else damaged images would shape what is kept after their repair
        verify(dataset, [dataset.split])
    over_ranks(0, name="the verifying of the images")
    tensors = compute()
    if is_first_rank():
        try:
            with writing(path) as file:
                np.savez(file, **tensors, key=key)
        except OSError as error:  # a data set on a read-only disk: the next call computes it again
            print0(f"warning: {path} cannot be written: {error.strerror}")
    return tensors
