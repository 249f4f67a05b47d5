"""Where images come from: which source a path is, CIFAR-10's download, and one way to open them all."""

import gzip
import hashlib
import http.client
import os
import posixpath
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from nanodiff.common import Progress, UserError, base_dir
from nanodiff.data import shapes
from nanodiff.data.decode import decode_all, import_pillow
from nanodiff.data.image_arrays import idx_files, read_cifar10, read_idx, read_npz
from nanodiff.data.image_files import ARCHIVE_ERRORS, Source, read_images

SOURCES = ("shapes", "cifar10", "mnist", "idx", "npz", "folder", "tar", "zip")
CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
CIFAR10_SHA256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
CIFAR10_BYTES = 170_052_171


def detect(path: Path) -> str:
    """Which of SOURCES a file or folder is, by its content. Raises UserError."""
    if path.is_dir():
        return "idx" if idx_files(path) else "folder"
    try:
        with open(path, "rb") as f:
            magic = f.read(4)
        if magic[:2] == b"\x1f\x8b":
            with gzip.open(path) as f:
                if f.read(3) == b"\0\0\x08":
                    return "idx"
    except ARCHIVE_ERRORS as error:
        raise UserError(f"cannot read {path}: {error}") from None
    if magic[:3] == b"\0\0\x08":
        return "idx"
    if magic[:2] == b"PK":
        return "npz" if path.suffix == ".npz" else "zip"
    if path.name == posixpath.basename(CIFAR10_URL):
        return "cifar10"
    if ".tar" in path.suffixes or path.suffix in (".tgz", ".txz", ".tbz2"):
        return "tar"
    raise UserError(f"cannot tell what {path} is; give --source=..., one of: {', '.join(SOURCES)}")


def open_source(source: str, path: str, resolution: int, labels: str, val_fraction: float, seed: int, workers: int,
                sha256: str = "auto") -> Source:  # fmt: skip
    """The images of a source (one of SOURCES, or "auto") at `resolution` (0: as they are). Raises UserError.

    `labels`: auto|none, and for image files folder|file. `sha256` of the file at `path`: "" = not checked, "auto" = the
    published one where there is one. `val_fraction` counts where the source has no held-out split of its own.
    """
    if source == "shapes":
        return read_shapes(resolution or 16, seed, labels)
    if source == "cifar10" and not path:
        file = download_cifar10()
    elif not path:
        raise UserError(f"source={source!r} needs --path=..., the file or folder to read")
    elif not os.path.exists(file := Path(os.path.expanduser(path))):
        raise UserError(f"path={path!r} does not exist")
    source = detect(file) if source == "auto" else source
    if (source == "folder") != file.is_dir() and source not in ("mnist", "idx"):
        raise UserError(
            f"path={path!r} is {'a folder' if file.is_dir() else 'a file'}; source={source!r} reads the other"
        )
    if sha256 == "auto":
        sha256 = CIFAR10_SHA256 if source == "cifar10" else ""
    if sha256:
        check_sha256(file, sha256)
    if source in ("folder", "tar", "zip"):
        return read_images(file, source, resolution, labels, val_fraction, seed, workers)
    if labels not in ("auto", "none"):
        raise UserError(f"labels={labels!r} is for image files; for source={source!r} accepted: auto, none")
    reader = {"cifar10": read_cifar10, "npz": read_npz}.get(source, read_idx)
    result = reader(file) if source == "cifar10" else reader(file, val_fraction, seed)
    if labels == "none":
        result.class_names = []
    result.blocks = resize_blocks(result, result.blocks, resolution, workers)
    return result


def check_sha256(path: Path, wanted: str) -> None:
    """Raises UserError unless the file has that SHA-256 (hexadecimal)."""
    if path.is_dir():
        raise UserError(f"sha256 is of a file, path={str(path)!r} is a folder")
    with open(path, "rb") as f:
        digest = hashlib.file_digest(f, "sha256").hexdigest()
    if digest != wanted.lower():
        raise UserError(f"{path} has SHA-256 {digest}, wanted {wanted}: damaged or another file; --sha256= skips this")


def resize_blocks(source: Source, blocks: Iterator, resolution: int, workers: int) -> Iterator:
    """The blocks with each image cropped and scaled to `resolution` (0: as it is), as image files are."""
    for images, labels, is_val in blocks:
        height, width = images.shape[2:]
        if not resolution and height != width:
            raise UserError(f"the images are {width}x{height}, not square; give --resolution=...")
        if resolution in (0, height) and height == width:
            yield images, labels, is_val
        else:
            import_pillow()
            items = ((i, f"image {i}", image.transpose(1, 2, 0)) for i, image in enumerate(images))
            yield from decode_all(items, labels, is_val, resolution, workers, source.skipped)


def read_shapes(resolution: int, seed: int, labels: str) -> Source:
    def blocks():
        for split in shapes.NUM_IMAGES:
            for images, ids in shapes.draw_split(split, seed, resolution):
                yield images, ids, np.full(len(ids), split == "val")

    class_names = [] if labels == "none" else list(shapes.CLASS_NAMES)
    return Source(sum(shapes.NUM_IMAGES.values()), class_names, blocks())


def download_cifar10() -> Path:
    """The binary version from its home page, checked, kept in $NANODIFF_BASE_DIR/downloads."""
    path = base_dir() / "downloads" / posixpath.basename(CIFAR10_URL)
    if path.is_file() and path.stat().st_size == CIFAR10_BYTES:
        return path  # checked by the caller
    part = path.with_suffix(".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            urllib.request.urlopen(CIFAR10_URL, timeout=60) as response,
            open(part, "wb") as file,
            Progress(CIFAR10_BYTES, "bytes", "downloading CIFAR-10") as bar,
        ):
            while data := response.read(min(2**20, CIFAR10_BYTES + 1 - bar.done)):
                file.write(data)
                bar.update(len(data))
        check_sha256(part, CIFAR10_SHA256)
        part.rename(path)
    except (OSError, http.client.HTTPException) as error:
        raise UserError(f"could not download {CIFAR10_URL}: {error}; give --path=... of a copy of it") from None
    finally:
        part.unlink(missing_ok=True)
    return path
