"""Resumable sampling: one .npz per batch, merged into one .npz."""

import hashlib
import itertools
import json
import shutil
from pathlib import Path

import numpy as np

from nanodiff.common import Batches, UserError
from nanodiff.files import fsync, lock_file, reading, writing
from nanodiff.prepare.sources import open_arrays


class SampleStore:
    """The images of the file `output`, drawn in parts. `parts`: the consecutive image numbers (n,) of each.

    Parts lie beside `output` in a hidden folder named by a hash of `protocol`, which holds everything that the images
    depend on. A rerun continues from the parts on disk, on any number of ranks, and writes the same bytes. Only rank 0
    calls `open`, `write_npz` and `close`; the ranks share a file system.
    """

    def __init__(self, output: Path, protocol: dict, parts: Batches):
        self.output = output
        self.protocol = json.dumps(protocol)
        name = hashlib.sha256(self.protocol.encode()).hexdigest()[:16]
        self.folder = output.with_name(f".{name}.parts")
        self.parts = parts

    def open(self) -> bool:
        """Lock the folder; True if `output` is already complete. UserError if it is an .npz of another protocol."""
        if self.output.suffix == ".npz" and self.output.exists():
            _, _, protocol = open_arrays(self.output)
            if protocol != self.protocol:
                raise UserError(f"{self.output} holds images of another protocol: choose another out, or remove it")
            shutil.rmtree(self.folder, ignore_errors=True)  # left by a process that was killed before close()
            return True
        busy = f"another process is drawing the same images in {self.folder}"
        self.lock = lock_file(self.folder / ".lock", busy, hint="out")
        return False

    def path(self, k: int) -> Path:
        return self.folder / f"{k:06d}.npz"

    def missing(self, rank: int = 0, world: int = 1) -> list[int]:
        """The parts that a rank has yet to draw; parts are dealt to the ranks in turn."""
        return [k for k in range(rank, len(self.parts), world) if not self.path(k).exists()]

    def write(self, k: int, images: np.ndarray) -> None:
        """Write part k, (n, H, W, C), atomically."""
        with writing(self.path(k)) as file:
            np.savez(file, images=images)

    def read(self, k: int) -> np.ndarray:
        """Part k; a damaged one fails by the checksum that an .npz holds."""
        path = self.path(k)
        with reading(path, "is damaged; remove it"):
            return np.load(path)["images"]

    def first(self, n: int) -> list[np.ndarray]:
        """The first n images (H, W, C), or as many as there are."""
        images = itertools.chain.from_iterable(map(self.read, range(len(self.parts))))
        return list(itertools.islice(images, n))

    def write_npz(self, labels: np.ndarray) -> None:
        """Write `output`: arr_0 (N, H, W, C) and arr_1 = labels (N,), as ADM's scripts read them, and protocol (JSON).

        numpy.savez copies the images from the disk, a few at a time.
        """
        raw = self.folder / "raw"
        first = self.read(0)
        with open(raw, "wb") as file:
            for k in range(len(self.parts)):
                file.write(self.read(k).tobytes())
        images = np.memmap(raw, first.dtype, "r", shape=(len(labels), *first.shape[1:]))
        with writing(self.output) as file:
            np.savez(file, arr_0=images, arr_1=labels, labels=labels, protocol=self.protocol)

    def close(self) -> None:
        """Remove the parts; call it once `output` is there."""
        fsync(self.output.parent)
        shutil.rmtree(self.folder)
        self.lock.close()
