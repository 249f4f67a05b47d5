"""Results that take minutes to compute are cached beside their data set, in a keyed .npz."""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from nanodiff.common import from_first_rank, get_dist, print0
from nanodiff.files import writing


def cached(path: Path, key: str, compute: Callable[[], dict | None]) -> dict | None:
    """The arrays {name: array} cached at `path` under `key`, else those of compute(), then cached.

    Called by all ranks; only the first gets the arrays, from here and from `compute`.
    """
    arrays = None
    is_first = get_dist()[0] == 0
    if is_first and path.exists():
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = dict(file) if str(file["key"]) == key else None
        except Exception as error:  # zipfile and numpy raise nearly anything for a corrupt file
            print0(f"warning: {path} is corrupt and is computed again: {type(error).__name__}")
    if not from_first_rank(arrays is not None):
        arrays = compute()
        try:
            if is_first:
                with writing(path) as file:
                    np.savez(file, **arrays, key=key)
        except OSError as error:  # a data set on a read-only disk: the next call computes it again
            print0(f"warning: {path} cannot be written: {error.strerror}")
    return arrays and {name: array for name, array in arrays.items() if name != "key"}
