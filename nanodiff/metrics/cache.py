"""What takes minutes to compute from a data set is kept beside it, in an .npz file that holds its own key."""

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch.distributed as dist

from nanodiff.common import collective, get_dist, print0
from nanodiff.files import write_atomic


def cached(path: Path, key: str, compute: Callable[[], dict | None]) -> dict | None:
    """The arrays {name: array} in `path` if it was written with this `key`, else those of compute(), now kept there.

    Called by all ranks, as is `compute`; the arrays are those of the first rank, the others get None.
    """
    is_first = get_dist()[0] == 0
    arrays = read(path, key) if is_first else None
    if not from_first_rank(arrays is not None):
        arrays = compute()
        if is_first:
            write(path, key, arrays)
    return arrays if is_first else None


def read(path: Path, key: str) -> dict | None:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
    except FileNotFoundError:
        return None
    except Exception as error:  # zipfile and numpy raise nearly anything for a corrupt file
        print0(f"warning: {path} is corrupt and is computed again: {type(error).__name__}")
        return None
    return arrays if str(arrays.pop("key", "")) == key else None


def write(path: Path, key: str, arrays: dict) -> None:
    file = io.BytesIO()
    np.savez(file, **arrays, key=key)
    try:
        write_atomic(path, file.getbuffer())
    except OSError as error:  # a data set on a read-only disk: the next call computes it again
        print0(f"warning: {path} cannot be written: {error.strerror}")


def from_first_rank(value, what: str = "a result"):
    """The first rank's `value`, on every rank."""
    shared = [value]
    if dist.is_initialized():
        with collective(f"the broadcast of {what}"):
            dist.broadcast_object_list(shared, src=0)
    return shared[0]
