"""Results that take minutes to compute are cached beside their data set, in a keyed .npz."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from nanodiff.common import get_dist, print0
from nanodiff.dist import from_first_rank
from nanodiff.files import reading, writing


def cached(path: Path, key: str, compute: Callable[[], dict | None]) -> dict | None:
    """The arrays {name: array} cached at `path` under `key`; without them compute() is called and its result cached.

    Called by all ranks. Only the first rank gets the arrays; on the others `compute` may return None.
    """
    is_first = get_dist()[0] == 0
    arrays = read_cache(path, key) if is_first and path.exists() else None
    if from_first_rank(arrays is not None):
        return arrays
    arrays = compute()
    if is_first:
        try:
            with writing(path) as file:
                np.savez(file, **arrays, key=key)
        except OSError as error:  # a data set on a read-only disk: the next call computes it again
            print0(f"warning: {path} cannot be written: {error.strerror}")
    return arrays


def read_cache(path: Path, key: str) -> dict | None:
    """The arrays in the file, or None if it was written under another key."""
    with reading(path, "is damaged: delete it, and it is computed again"), np.load(path, allow_pickle=False) as file:
        arrays = dict(file)
    return arrays if str(arrays.pop("key")) == key else None
