"""Make sets in parts that survive a kill: a worker decodes, writes and hashes a part, then writes its note.

data/.<name>.parts/            renamed to data/<name> at the end
    train_images_00007_0.npy   a shard of part 7
    notes/00007.json           the part is done: its shards' entries in meta.json, labels, ...
    plan.json                  what the set is made from; parts of another plan are made again
"""

import contextlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from nanodiff.common import UserError
from nanodiff.data.dataset import MAX_SHARD_BYTES, check_file, write_npy
from nanodiff.files import fsync, read_json, write_json
from nanodiff.prepare.decode import Item, decode_items
from nanodiff.prepare.sources import Source


def images_per_part(num_images: int, image_bytes: int) -> int:
    """1/64 of the set, but 64 to 8,192 images and at most a shard; a kill loses at most two parts per worker."""
    return min(8192, max(64, num_images // 64), max(1, MAX_SHARD_BYTES // image_bytes))


def write_note(file: Path, note: dict) -> None:
    """Call when the part's files are written."""
    fsync(file.parents[1])  # shards must precede their notes
    write_json(file, note)


def make_parts(source: Source, resolution: int, folder: Path, workers: int) -> Iterator[dict]:
    """Write the images of a source, and yield the notes of its parts in order. The number of workers does not change
    the result. Workers are threads, as most of the work releases the GIL; two parts each are under way."""
    pending = deque()
    pool = ThreadPoolExecutor(workers)
    try:
        for number, items in enumerate(make_tasks(source, resolution)):
            pending.append(pool.submit(write_part, number, items, source, folder))
            if len(pending) > 2 * workers:
                yield pending.popleft().result()
        for future in pending:
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def make_tasks(source: Source, resolution: int) -> Iterator[list[Item]]:
    """Split the items into parts, whose files and images together have about the bytes of a shard at most."""
    image_bytes = (3 + source.meta.get("given_channels", 0)) * resolution**2
    task = []
    size = 0
    for item in source.items:
        task.append(item)
        size += image_bytes + getattr(item.payload, "nbytes", len(item.payload))
        # 2**19: a guess before a file is decoded
        most = images_per_part(source.num_images, image_bytes or getattr(item.payload, "nbytes", 2**19))
        if size >= MAX_SHARD_BYTES or len(task) == most:
            yield task
            task = []
            size = 0
    if task:
        yield task


def write_part(number: int, items: list[Item], source: Source, folder: Path) -> dict:
    """Decode, write and hash the items of a part, unless that is done -> its note."""
    file = folder / "notes" / f"{number:05d}.json"
    with contextlib.suppress(UserError):  # there is no note, or it or one of its shards is damaged
        note = read_json(file)
        for group in note["groups"]:
            check_file(folder, group["shard"])
        return note
    done, faults, losses = decode_items(items, source.sizes, *source.look)
    alike = {}  # (split, shape) -> items
    for item in done:
        split = "val" if item.is_val else "train"
        alike.setdefault((split, item.payload.shape), []).append(item)
    groups = []
    for (split, _), members in sorted(alike.items()):
        images = np.stack([item.payload for item in members])
        groups.append(
            {
                "name": members[0].name,
                "split": split,
                "shape": images.shape,
                "shard": write_npy(folder / f"{split}_images_{number:05d}_{len(groups)}.npy", images),
                "y": [item.label for item in members],
                "rows": {name: [item.rows[name] for item in members] for name in members[0].rows},
            }
        )
    note = {"items": len(items), "losses": losses, "skipped": faults, "groups": groups}
    write_note(file, note)
    return note
