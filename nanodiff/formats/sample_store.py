"""Many images on their way into one file: drawn in parts that outlive a kill, put together at the end.

.NAME.npz.parts/    beside NAME.npz while that is being made
    .lock           held by the process that makes it
    protocol.json   what the images are samples of
    000000.npy ...  (n, H, W, C) uint8, consecutive images, each part written whole or not at all
    whole.npz       until it takes its name
"""

import json
import os
import shutil
import zipfile
from pathlib import Path

import numpy as np

from nanodiff.common import UserError, print0
from nanodiff.data.dataset import npy_header
from nanodiff.files import fsync_dir, lock_file, write_atomic

GRID_IMAGES = 256  # what a grid shows at most; so many of another protocol are dropped without asking


class SampleStore:
    """The images 0 ... num_images - 1 of the file `output`, in parts of `size`.

    What is in a part depends on its number alone, not on the rank that draws it. So the file is the same, byte for
    byte, for any number of ranks, and goes on where another number of them was killed. `open`, `write_npz` and `close`
    are for rank 0; the ranks share a file system. `protocol` is whatever the images depend on, JSON's types only.
    """

    def __init__(self, output: Path, protocol: dict, num_images: int, size: int):
        self.output, self.protocol = output, json.dumps(protocol)
        self.num_images, self.size, self.num_parts = num_images, size, -(-num_images // size)
        self.folder = output.with_name(f".{output.name}.parts")

    def open(self) -> bool:
        """Lock the folder and look through the parts in it; True where `output` is there already, of this protocol.

        A broken part is removed, to be drawn again. What was begun by another protocol is dropped, unless it is more
        than a grid: UserError then says what differs. It is raised too where another process makes the same file.
        """
        self.lock = lock_file(
            self.folder / ".lock", f"another process is sampling in {self.folder}; stop it or choose another out", "out"
        )
        described = self.folder / "protocol.json"
        old = described.read_text() if described.exists() else ""
        parts = {path: load_part(path) for path in sorted(self.folder.glob("*.npy"))}
        if stored_protocol(self.output) == self.protocol:
            if old == self.protocol or not parts:  # of a run that was killed when all was done, or nothing
                self.close()
            return True
        if parts and old != self.protocol:
            num_images = sum(len(part) for part in parts.values() if part is not None)
            what = f"{num_images:,} images of another protocol ({difference(old, self.protocol)})"
            if num_images > GRID_IMAGES:
                raise UserError(f"{self.folder} holds {what}: set that back, choose another out, or remove the folder")
            print0(f"{self.folder} held {what}: started afresh")
        for path, part in parts.items():
            if old != self.protocol or part is None or len(part) != len(self.ids(int(path.stem))):
                path.unlink()
        self._write(described, self.protocol.encode())
        return False

    def _write(self, path: Path, *data) -> None:
        try:
            write_atomic(path, *data)
        except OSError as e:
            raise UserError(f"cannot write to {self.folder}: {e.strerror}; the same command goes on from there") from e

    def ids(self, k: int) -> range:
        """The numbers of the images in part k."""
        return range(k * self.size, min((k + 1) * self.size, self.num_images))

    def path(self, k: int) -> Path:
        return self.folder / f"{k:06d}.npy"

    def missing(self, rank: int = 0, world: int = 1) -> list[int]:
        """The parts that a rank has to draw: dealt out in turn, less those that are there."""
        return [k for k in range(rank, self.num_parts, world) if not self.path(k).exists()]

    def num_drawn(self) -> int:
        """Images there are, of all ranks."""
        numbers = (name.removesuffix(".npy") for name in os.listdir(self.folder))
        return sum(len(self.ids(int(number))) for number in numbers if number.isdigit())

    def write(self, k: int, images: np.ndarray) -> None:
        """Keep part k, uint8 (n, H, W, C), whatever happens to the process. Raises UserError where the disk is full."""
        images = np.ascontiguousarray(images)
        self._write(self.path(k), npy_header(images.dtype, images.shape), images.data)

    def read(self, k: int) -> np.ndarray:
        """Part k, mapped into memory."""
        part = load_part(self.path(k))
        if part is None:
            raise UserError(f"{self.path(k)} is missing or broken: do all ranks write to the same file system?")
        return part

    def first(self, n: int) -> np.ndarray:
        """The first n images (n, H, W, C), or as many as there are."""
        return np.concatenate([self.read(k) for k in range(self.num_parts) if k * self.size < n])[:n]

    def write_npz(self, labels: np.ndarray) -> None:
        """`output` with arr_0 (N, H, W, C) uint8 as ADM's evaluations read it, labels (N,) and protocol, JSON text.

        The bytes are numpy.savez's, but one part is in memory at a time. Raises OSError; an older file is then intact.
        """
        tmp, shape = self.folder / "whole.npz", (self.num_images, *self.read(0).shape[1:])
        try:
            with open(tmp, "wb") as file:
                with zipfile.ZipFile(file, "w") as archive:  # stored, and dated 1980 whenever it is written
                    with archive.open("arr_0.npy", "w", force_zip64=True) as member:
                        member.write(npy_header(np.dtype(np.uint8), shape))
                        for k in range(self.num_parts):
                            member.write(self.read(k).data)
                    for name, array in (("labels", labels), ("protocol", np.array(self.protocol))):
                        with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                            np.lib.format.write_array(member, array, allow_pickle=False)
                file.flush()
                os.fsync(file.fileno())
            os.replace(tmp, self.output)
        except BaseException:
            tmp.unlink(missing_ok=True)  # its room is wanted
            raise
        fsync_dir(self.output.parent)

    def close(self) -> None:
        """Remove the parts, once the file is there."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.lock.close()


def load_part(path: Path) -> np.ndarray | None:
    """(n, H, W, C) uint8, mapped into memory; None where the file is not whole."""
    try:
        part = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):  # absent or cut short; in the data or the header; empty
        return None
    return part if part.dtype == np.uint8 and part.ndim == 4 else None


def stored_protocol(npz: Path) -> str:
    """The protocol in a file that write_npz wrote; "" for any other file, or none."""
    try:
        with np.load(npz, allow_pickle=False) as file:
            return str(file["protocol"])
    except (OSError, ValueError, EOFError, KeyError, TypeError, zipfile.BadZipFile):
        return ""


def difference(old: str, new: str) -> str:
    """What differs between two protocols, JSON text, in words: "steps=50, now 25"."""
    try:
        old, new = json.loads(old), json.loads(new)
        return ", ".join(
            f"{key}={old.get(key)}, now {new.get(key)}" for key in old | new if old.get(key) != new.get(key)
        )
    except (ValueError, AttributeError, TypeError):
        return "which is not known"
