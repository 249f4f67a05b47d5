"""The form of an image set on disk, and its writer: a folder of shards, written whole or not at all.

$NANODIFF_BASE_DIR/data/<name>/
    train_images_000.npy ...   (n, C, H, W) uint8, each at most 1 GiB
    train_labels.npy           (N,) int64; absent where the set is unlabelled
    val_images_000.npy ...     the held-out split, where there is one
    meta.json                  written last: what the set is, and size and SHA-256 of each file
"""

import contextlib
import errno
import fcntl
import hashlib
import io
import json
import os
import re
import shutil
import tempfile
from pathlib import Path

import numpy as np

from nanodiff.common import UserError, base_dir
from nanodiff.files import fsync_dir, write_atomic

FORMAT = 1
DTYPES = {"images": np.dtype(np.uint8), "latents": np.dtype(np.float16)}  # by kind of set
SPLITS = ("train", "val")
MAX_SHARD_BYTES = 2**30
DISK_ERRORS = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)


def data_dir() -> Path:
    """Where the sets live."""
    return base_dir().absolute() / "data"


def is_name(name: str) -> bool:
    """Whether it can name a set: one ordinary path component."""
    return bool(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,99}", name))


def npy_header(dtype: np.dtype, shape: tuple) -> bytes:
    """What numpy.save writes before the data; always 128 bytes for our shapes, so that it can be rewritten in place."""
    header = io.BytesIO()
    fields = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, fields)
    assert header.tell() == 128, header.tell()
    return header.getvalue()


def lock_set(path: Path, wait: bool = False):
    """Lock the set that is to be at `path` until the returned file is closed or the process dies. Raises UserError.

    What a killed process left of it is removed.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = open(path.parent / f".{path.name}.lock", "a")
    except OSError as error:
        raise UserError(f"cannot write to {path.parent}: {error.strerror}; see NANODIFF_BASE_DIR") from None
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        for leftover in path.parent.glob(f".{path.name}.tmp-*"):  # its writer is dead: we hold the lock
            shutil.rmtree(leftover, ignore_errors=True)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            raise UserError(f"data set {path.name!r} is being prepared by another process") from None
        # A file system without locks: the temporary names differ and the rename is atomic, so work is done twice.
    return lock


def check_free(path: Path, overwrite: bool) -> None:
    """UserError where something is at `path` already, unless it is a data set and to be replaced."""
    is_set = (path / "meta.json").is_file()
    if path.exists() and not (overwrite and is_set):
        hint = "--overwrite replaces it" if is_set else "it is no data set"
        raise UserError(f"{path} exists already ({hint}); choose another --name")


def publish(folder: Path, path: Path, meta: dict, overwrite: bool) -> None:
    """Write meta.json into the folder of a finished set and give it its name, also in place of an older set there."""
    write_atomic(folder / "meta.json", json.dumps(meta, indent=1).encode())
    folder.chmod(0o755)
    fsync_dir(folder)
    old = None
    if overwrite and path.exists():
        old = tempfile.mkdtemp(dir=path.parent, prefix=f".{path.name}.tmp-")
        os.rename(path, old)
    try:
        os.rename(folder, path)
    except BaseException:
        if old:
            os.rename(old, path)
        raise
    fsync_dir(path.parent)
    if old:
        shutil.rmtree(old, ignore_errors=True)


class DatasetWriter:
    """`with DatasetWriter(name, class_names, ...) as writer: writer.append("train", images, labels)`.

    Everything goes into a hidden folder beside the set, which is renamed when the block ends well and removed when it
    does not; what a killed process left is removed by the next one. The first block of images settles channels and
    resolution; `class_names` ([] = unlabelled) may be assigned until then. Raises UserError for a bad name, an existing
    set (unless `overwrite`; with `wait`, `.exists` is set instead), another process that prepares it (unless `wait`),
    and a full disk.
    """

    def __init__(self, name, class_names=(), kind="images", source="", seed=0, overwrite=False, wait=False):
        if not is_name(name):
            raise UserError(f"name={name!r} cannot name a data set; accepted: letters, digits and _ . + - (no /)")
        self.path, self.overwrite, self.wait = data_dir() / name, overwrite, wait
        self.meta = {"format": FORMAT, "kind": kind, "channels": 0, "resolution": 0}
        self.meta |= {"source": source, "seed": seed, "class_names": [], "splits": {}}
        self.class_names = class_names
        self.exists, self.folder = False, None
        self._open, self._labels = {}, {}  # split -> (file, its entry in meta), list of label arrays

    def __enter__(self):
        self._lock = lock_set(self.path, self.wait)
        self.exists = self.wait and (self.path / "meta.json").is_file()
        if self.exists:
            return self
        check_free(self.path, self.overwrite)
        try:
            self.folder = Path(tempfile.mkdtemp(dir=self.path.parent, prefix=f".{self.path.name}.tmp-"))
        except OSError as error:
            raise UserError(f"cannot write to {self.path.parent}: {error.strerror}; see NANODIFF_BASE_DIR") from None
        return self

    def append(self, split: str, images: np.ndarray, labels: np.ndarray | None = None) -> None:
        """Add (n, C, H, W) images, and (n,) labels below len(class_names), to the end of a split; n = 0 is fine."""
        assert split in SPLITS and images.ndim == 4 and images.dtype == DTYPES[self.meta["kind"]], images.dtype
        if len(images) == 0:
            return
        shape = images.shape[1:]
        if not self.meta["resolution"]:
            self.meta |= {"channels": shape[0], "resolution": shape[1]}
        assert shape == (self.meta["channels"], self.meta["resolution"], self.meta["resolution"]), shape
        if self.class_names:
            labels = np.asarray(labels, np.int64)
            assert labels.shape == (len(images),) and 0 <= labels.min() <= labels.max() < len(self.class_names)
            self._labels.setdefault(split, []).append(labels)
        images = np.ascontiguousarray(images)
        per_shard = max(1, (MAX_SHARD_BYTES - 128) // images[0].nbytes)
        while len(images):
            file, entry = self._open.get(split) or self._new_shard(split)
            now, images = np.split(images, [per_shard - entry["num_images"]])
            file.write(now.data)
            entry["num_images"] += len(now)
            if entry["num_images"] == per_shard:
                self._close_shard(split)

    def _new_shard(self, split: str):
        part = self.meta["splits"].setdefault(split, {"num_images": 0, "labels": None, "shards": []})
        entry = {"file": f"{split}_images_{len(part['shards']):03d}.npy", "num_images": 0}
        part["shards"].append(entry)
        file = open(self.folder / entry["file"], "w+b")
        file.write(bytes(128))  # the header's place: its content needs the number of images
        self._open[split] = file, entry
        return file, entry

    def _close_shard(self, split: str) -> None:
        file, entry = self._open.pop(split)
        resolution = self.meta["resolution"]
        shape = (entry["num_images"], self.meta["channels"], resolution, resolution)
        self.meta["splits"][split]["num_images"] += entry["num_images"]
        file.seek(0)
        file.write(npy_header(DTYPES[self.meta["kind"]], shape))
        self._finish_file(file, entry)

    def _finish_file(self, file, entry: dict) -> None:
        with file:
            file.flush()
            os.fsync(file.fileno())
            entry["bytes"] = file.seek(0, 2)
            file.seek(0)
            entry["sha256"] = hashlib.file_digest(file, "sha256").hexdigest()

    def _finish(self) -> None:
        for split in list(self._open):
            self._close_shard(split)
        assert "train" in self.meta["splits"], "no images were appended"
        self.meta["class_names"] = list(self.class_names)
        for split, labels in self._labels.items():
            entry = self.meta["splits"][split]["labels"] = {"file": f"{split}_labels.npy"}
            file = open(self.folder / entry["file"], "w+b")
            np.save(file, np.concatenate(labels))
            self._finish_file(file, entry)
        try:
            publish(self.folder, self.path, self.meta, self.overwrite)
        except OSError as error:
            faster = self.wait and error.errno in (errno.EEXIST, errno.ENOTEMPTY)
            if not faster:  # another process has made the same
                raise

    def __exit__(self, kind, error, traceback):
        try:
            if self.folder and kind is None:
                self._finish()
        except OSError as finish_error:
            error = finish_error
        finally:
            for file, _ in self._open.values():
                with contextlib.suppress(OSError):  # the disk is still full
                    file.close()
            if self.folder:
                shutil.rmtree(self.folder, ignore_errors=True)
            self._lock.close()
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            raise UserError(f"{self.path.parent}: {error.strerror}; nothing of {self.path.name!r} is left") from error
        if error is not None and kind is None:
            raise error
