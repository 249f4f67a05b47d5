"""Resumable sampling: one .npy per batch, merged into one .npz."""

import hashlib
import itertools
import json
import os
import shutil
import zipfile
from pathlib import Path

import numpy as np

from nanodiff.common import UserError, in_batches
from nanodiff.data.dataset import write_npy
from nanodiff.files import fsync_dir, lock_file, reading, writing


class SampleStore:
    """The images 0 ... num_images - 1 of the file `output`, drawn in parts of `size` consecutive images.

    Parts lie beside `output` in a hidden folder named by a hash of `protocol`, which holds all that the images depend
    on. Rerunning the command continues from the parts on disk, on any number of ranks, and writes the same bytes. Only
    rank 0 calls `open`, `write_npz` and `close`; the ranks share a file system.
    """

    def __init__(self, output: Path, protocol: dict, num_images: int, size: int):
        self.output = output
        self.protocol = json.dumps(protocol)
        name = hashlib.sha256(self.protocol.encode()).hexdigest()[:16]
        self.folder = output.with_name(f".{name}.parts")
        self.num_images = num_images
        self.parts = in_batches(np.arange(num_images), size)  # the image numbers of each

    def open(self) -> bool:
        """Lock the folder; True if `output` is complete already. UserError if it is an .npz of another protocol."""
        if self.output.suffix == ".npz" and self.output.exists():
            fault = "is no file of scripts/sample.py: remove it, or choose another out"
            with reading(self.output, fault), np.load(self.output, allow_pickle=False) as file:
                protocol = str(file["protocol"])
            if protocol != self.protocol:
                raise UserError(f"{self.output} holds images of another protocol: choose another out, or remove it")
            return True
        busy = f"another process is drawing the same images in {self.folder}"
        self.lock = lock_file(self.folder / ".lock", busy, hint="out")
        return False

    def path(self, k: int) -> Path:
        return self.folder / f"{k:06d}.npy"

    def missing(self, rank: int = 0, world: int = 1) -> list[int]:
        """The parts that a rank has yet to draw; parts are dealt to the ranks in turn."""
        return [k for k in range(rank, len(self.parts), world) if not self.path(k).exists()]

    def num_drawn(self) -> int:
        """Images drawn so far."""
        return self.num_images - sum(len(self.parts[k]) for k in self.missing())

    def write(self, k: int, images: np.ndarray) -> None:
        """Write part k, (n, H, W, C), atomically."""
        write_npy(self.path(k), images)

    def read(self, k: int) -> np.ndarray:
        """Part k, memory-mapped."""
        with reading(self.path(k), "is damaged; remove it"):
            return np.load(self.path(k), mmap_mode="r", allow_pickle=False)

    def first(self, n: int) -> list[np.ndarray]:
        """The first n images (H, W, C), or as many as there are."""
        images = (image for k in range(len(self.parts)) for image in self.read(k))
        return list(itertools.islice(images, n))

    def write_npz(self, labels: np.ndarray) -> None:
        """Write `output`: arr_0 (N, H, W, C) and arr_1 = labels (N,), as ADM's scripts read them, and protocol (JSON).

        The bytes are those of numpy.savez, with one part in memory at a time.
        """
        whole = self.folder / "whole.npz"
        with writing(whole) as file, zipfile.ZipFile(file, "w") as archive:  # stored, and always dated 1980
            with archive.open("arr_0.npy", "w", force_zip64=True) as member:
                header = np.lib.format.header_data_from_array_1_0(self.read(0))
                header["shape"] = (self.num_images, *header["shape"][1:])
                np.lib.format.write_array_header_1_0(member, header)
                for k in range(len(self.parts)):
                    member.write(self.read(k).data)
            for name, array in (("arr_1", labels), ("labels", labels), ("protocol", np.array(self.protocol))):
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)
        os.replace(whole, self.output)
        fsync_dir(self.output.parent)

    def close(self) -> None:
        """Remove the parts; call it once the file is there."""
        shutil.rmtree(self.folder)
        self.lock.close()
