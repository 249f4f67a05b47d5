"""Sets made in parts that outlive a kill: a worker decodes, writes and hashes a part, then leaves a note of it.

data/.<name>.parts/            renamed to data/<name> at the end
    train_images_00007_0.npy   shards of part 7
    notes/00007.json           their entries in meta.json, labels, ...: the part is done
    notes/plan.json            what the set is made from; parts of another plan are made again
"""

import functools
import itertools
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from nanodiff.common import UserError
from nanodiff.data.archives import Source
from nanodiff.data.dataset import MAX_SHARD_BYTES, write_npy
from nanodiff.data.decode import TASK_IMAGES, decode_all, make_tasks, ordered_map
from nanodiff.files import fsync_dir, write_atomic


def images_per_part(num_images: int, image_bytes: int) -> int:
    """A kill loses at most one part per worker: 1/64 of the set, but 64 to 8,192 images."""
    return min(8192, max(64, num_images // 64), max(1, MAX_SHARD_BYTES // image_bytes))


def write_note(file: Path, note: dict) -> None:
    """Call when the part's files are written."""
    fsync_dir(file.parents[1])  # shards must precede their notes
    write_atomic(file, json.dumps(note).encode())


def make_parts(source: Source, resolution: int, workers: int, folder: Path) -> Iterator[dict]:
    """Write the images of a source, and yield the notes of its parts in order.

    Adds to the source's `skipped` and `num_enlarged`. What is written does not depend on `workers`.
    """
    image_bytes = 3 * resolution**2 or MAX_SHARD_BYTES // TASK_IMAGES  # unknown before they are decoded
    most = images_per_part(source.num_images, image_bytes)
    tasks = enumerate(make_tasks(source.items, 3 * resolution**2, most, MAX_SHARD_BYTES))
    work = functools.partial(write_part, sizes=source.sizes, resolution=resolution, folder=folder)
    first = None
    for note in ordered_map(work, tasks, workers):
        source.skipped += note["skipped"]
        source.num_enlarged += note["num_enlarged"]
        for group in note["groups"]:
            here = note["name"], group["shape"]
            first = first or here
            if not resolution and here[1] != first[1]:
                sizes = ", ".join(f"{name!r} is {shape[2]}x{shape[1]}" for name, shape in (first, here))
                raise UserError(f"{sizes}; without prepare_data's --resolution all images must be squares of one size")
        yield note


def write_part(task: tuple, sizes: list, resolution: int, folder: Path) -> dict:
    """Decode, write and hash the items of a part, unless that is done -> its note."""
    number, items = task
    file = folder / "notes" / f"{number:05d}.json"
    if file.is_file():
        return json.loads(file.read_bytes())
    numbers = np.arange(1 + max(item.row for item in items))
    part = Source(len(items), [], items, sizes=sizes, arrays={"rows": numbers})
    blocks = {}  # (split, shape) -> [(images, y, rows)]
    num_dark = 0
    for images, is_val, cond in decode_all(part, resolution, 1):
        if images.dtype == np.uint8:
            num_dark += int(np.sum(images.max((1, 2, 3)) < 64))
        for split, chosen in (("train", ~is_val), ("val", is_val)):
            if chosen.any():
                blocks.setdefault((split, images.shape[1:]), []).append(
                    (images[chosen], cond["y"][chosen], cond["rows"][chosen])
                )
    groups, count = [], itertools.count()
    for (split, shape), found in blocks.items():
        images, y, rows = (np.concatenate(arrays) for arrays in zip(*found))
        shards = []
        for part_of in np.array_split(images, -(-images.nbytes // MAX_SHARD_BYTES)):
            path = folder / f"{split}_images_{number:05d}_{next(count)}.npy"
            shards.append(write_npy(path, [np.ascontiguousarray(part_of)]))
        groups.append(dict(split=split, shape=shape, shards=shards, y=y.tolist(), rows=rows.tolist()))
    note = dict(name=items[0].name, num_items=len(items), num_dark=num_dark, groups=groups)
    write_note(file, note | dict(skipped=part.skipped, num_enlarged=part.num_enlarged))
    return json.loads(file.read_bytes())
