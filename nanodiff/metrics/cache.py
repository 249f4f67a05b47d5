"""Results that take minutes to compute are cached beside their data set, in a keyed .npz."""

import hashlib
from pathlib import Path

import numpy as np
import torch

from nanodiff.common import Tensors, is_first_rank, print0
from nanodiff.data.dataset import Dataset
from nanodiff.dist import from_first_rank
from nanodiff.files import reading, writing


def cached(path: Path, of: list, compute) -> Tensors | None:
    """What compute() returns, {name: tensor}, cached at `path` under a hash of `of` (data sets, arrays, bytes).

    Called by all ranks. Only the first rank gets the tensors; on the others compute() may return None.
    """
    hashed = hashlib.sha256()
    for x in of:
        if isinstance(x, Dataset):
            hashed.update((x.path / "meta.json").read_bytes())  # holds the hashes of the images
        else:
            hashed.update(np.ascontiguousarray(x))
    key = hashed.hexdigest()
    found = None
    if is_first_rank() and path.exists():
        with reading(path, "is damaged: delete it, and it is computed again"):
            arrays = {**np.load(path)}
            if str(arrays.pop("key")) == key:
                found = {name: torch.from_numpy(array) for name, array in arrays.items()}
    if from_first_rank(found is not None):
        return found
    found = compute()
    if is_first_rank():
        try:
            with writing(path) as file:
                np.savez(file, **found, key=key)
        except OSError as error:  # a data set on a read-only disk: the next call computes it again
            print0(f"warning: {path} cannot be written: {error.strerror}")
    return found
