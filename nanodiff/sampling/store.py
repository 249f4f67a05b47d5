"""Resumable sampling: one .npy per batch, merged into one .npz.

.NAME.npz.parts/    beside NAME.npz while it is being made, under .lock
    protocol.json   everything that the images depend on
    000000.npy ...  (n, H, W, C) uint8, consecutive images; each file is written whole or not at all
"""

import json
import os
import shutil
import zipfile
from pathlib import Path

import numpy as np

from nanodiff.common import UserError, print0
from nanodiff.data.dataset import write_npy
from nanodiff.files import fsync_dir, lock_file, write_atomic, writing

GRID_IMAGES = 256  # the most that a grid shows; more images than this are never dropped without asking


class SampleStore:
    """The images 0 ... num_images - 1 of the file `output`, drawn in parts of `size` images.

    The file is the same, byte for byte, for any number of ranks and kills. Only rank 0 calls `open`, `write_npz` and
    `close`; the ranks share a file system. `protocol` is in JSON's types.
    """

    def __init__(self, output: Path, protocol: dict, num_images: int, size: int):
        self.output, self.protocol = output, json.dumps(protocol)
        self.num_images, self.size = num_images, size
        self.num_parts = -(-num_images // size)
        self.folder = output.with_name(f".{output.name}.parts")

    def open(self, image_bytes: int = 0) -> bool:
        """Lock the folder; True if `output` is there already, with the same protocol.

        Removes corrupt parts, and up to a grid of images of another protocol. UserError for more of these, an .npz of
        another protocol, or no room on the disk for the images, of `image_bytes` each.
        """
        busy = f"another process is sampling in {self.folder}; stop it or choose another out"
        self.lock = lock_file(self.folder / ".lock", busy, hint="out")
        protocol_file = self.folder / "protocol.json"
        old = protocol_file.read_text() if protocol_file.exists() else "{}"
        parts = {path: load_part(path) for path in self.folder.glob("*.npy")}
        resumed = old == self.protocol
        written = stored_protocol(self.output)
        if written is not None:
            if not parts or (resumed and written == self.protocol):
                self.close()  # parts may be left by a process that was killed between write_npz and close
            if written != self.protocol:
                raise UserError(f"{self.output} holds images of another protocol: choose another out, or remove it")
            return True
        num_images = sum(len(part) for part in parts.values())
        if num_images and not resumed:
            was, now = json.loads(old), json.loads(self.protocol)
            changed = [f"{key}={was.get(key)}, now {now.get(key)}" for key in was | now if was.get(key) != now.get(key)]
            held = f"{num_images:,} images of another protocol ({', '.join(changed)})"
            if num_images > GRID_IMAGES:
                raise UserError(f"{self.folder} holds {held}: set that back, choose another out, or remove the folder")
            print0(f"{self.folder} held {held}: started afresh")
        needed = (2 * self.num_images - (num_images if resumed else 0)) * image_bytes
        free = shutil.disk_usage(self.folder).free
        room = f"{self.num_images:,} images need {needed / 1e6:,.1f} MB of disk until the end, {free / 1e6:,.1f} MB"
        if needed > free:
            if not parts:
                self.close()
            raise UserError(f"{room} are free in {self.output.parent}: see num_images and out")
        print0(f"{room} are free")
        for path, part in parts.items():
            if not resumed or len(part) != len(self.ids(int(path.stem))):
                path.unlink()
        write_atomic(protocol_file, self.protocol.encode())
        return False

    def ids(self, k: int) -> range:
        """The image numbers of part k."""
        return range(k * self.size, min((k + 1) * self.size, self.num_images))

    def path(self, k: int) -> Path:
        return self.folder / f"{k:06d}.npy"

    def missing(self, rank: int = 0, world: int = 1) -> list[int]:
        """The parts that a rank has yet to draw; parts are dealt to the ranks in turn."""
        return [k for k in range(rank, self.num_parts, world) if not self.path(k).exists()]

    def num_drawn(self) -> int:
        """Images drawn so far."""
        return self.num_images - sum(len(self.ids(k)) for k in self.missing())

    def write(self, k: int, images: np.ndarray) -> None:
        """Keep part k, uint8 (n, H, W, C)."""
        write_npy(self.path(k), [np.ascontiguousarray(images)])

    def first(self, n: int) -> list[np.ndarray]:
        """The first n images (H, W, C), or as many as there are."""
        parts = [load_part(self.path(k)) for k in range(-(-min(n, self.num_images) // self.size))]
        return [image for part in parts for image in part][:n]

    def write_npz(self, labels: np.ndarray) -> None:
        """Write `output`: arr_0 (N, H, W, C) uint8 as ADM's evaluations read it, labels (N,), and protocol (JSON text).

        The bytes are those of numpy.savez, with one part in memory at a time.
        """
        absent = self.missing()
        if absent:
            raise UserError(f"{self.path(absent[0])} is missing: do all ranks write to the same file system?")
        whole = self.folder / "whole.npz"
        with writing(whole) as file, zipfile.ZipFile(file, "w") as archive:  # stored, and always dated 1980
            with archive.open("arr_0.npy", "w", force_zip64=True) as member:
                header = np.lib.format.header_data_from_array_1_0(load_part(self.path(0)))
                header["shape"] = (self.num_images, *header["shape"][1:])
                np.lib.format.write_array_header_1_0(member, header)
                for k in range(self.num_parts):
                    member.write(load_part(self.path(k)).data)
            for name, array in (("labels", labels), ("protocol", np.array(self.protocol))):
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)
        os.replace(whole, self.output)
        fsync_dir(self.output.parent)

    def close(self) -> None:
        """Remove the parts; call it once the file is there."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.lock.close()


def load_part(path: Path) -> np.ndarray:
    """(n, H, W, C) uint8, memory-mapped; no images if the file is corrupt."""
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return np.zeros((0, 0, 0, 0), np.uint8)


def stored_protocol(npz: Path) -> str | None:
    """The protocol in an .npz from write_npz; "" for another .npz, None for any other file, or none."""
    try:
        with np.load(npz, allow_pickle=False) as file:
            return str(file["protocol"]) if "protocol" in file else ""
    except (OSError, ValueError, EOFError, TypeError, AttributeError, zipfile.BadZipFile):
        return None
