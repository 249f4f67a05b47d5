"""Sets that come as arrays: CIFAR-10's binary version, IDX files (MNIST and its kin), .npz. None is read on trust."""

import gzip
import io
import itertools
import math
import posixpath
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from nanodiff.common import UserError
from nanodiff.data.image_files import ARCHIVE_ERRORS, Source, read_tar, val_mask

CIFAR10_CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
CIFAR10_BATCHES = [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]
IDX_SUFFIXES = ("", ".idx", ".idx3", ".idx3-ubyte")  # before .gz
MAX_SIDE, MAX_IMAGES = 8192, 10**8  # beyond, a header is taken for damaged
BLOCK_BYTES = 2**24  # read at once
MAX_RATIO = 1032  # of what deflate makes of a file's bytes: more than this no header can claim


def read_cifar10(path: Path) -> Source:
    """The tar of the binary version: five training batches and a test batch of records, a label and 3x32x32 bytes."""

    def blocks():
        left = set(CIFAR10_BATCHES)
        for member, data in read_tar(path, lambda member: posixpath.basename(member.name) in left):
            name = posixpath.basename(member.name)
            left.remove(name)
            if not data or len(data) % 3073 or len(data) > 10_000 * 3073:
                raise UserError(f"{path}: {name} has {member.size:,} bytes, wanted 10,000 records of 3,073 bytes")
            records = np.frombuffer(data, np.uint8).reshape(-1, 3073)
            if records[:, 0].max() > 9:
                raise UserError(f"{path}: {name} has labels above 9; is it CIFAR-10's binary version?")
            images, is_val = records[:, 1:].reshape(-1, 3, 32, 32), np.full(len(records), name == "test_batch.bin")
            yield images, records[:, 0].astype(np.int64), is_val
        if left:
            raise UserError(f"{path} lacks {', '.join(sorted(left))}; wanted: CIFAR-10's binary version")

    return Source(60_000, list(CIFAR10_CLASSES), blocks())


def array_blocks(f, shape: tuple, labels: np.ndarray, is_val: np.ndarray, path: Path) -> Iterator:
    """(N, H, W) or (N, H, W, C) uint8 read from the open file, piece by piece -> blocks as in Source."""
    num, per_image = shape[0], math.prod(shape[1:])
    step = max(1, BLOCK_BYTES // per_image)
    try:
        for start in range(0, num, step):
            n = min(step, num - start)
            data = f.read(n * per_image)
            if len(data) != n * per_image:
                raise EOFError(f"it ends before image {num:,}")
            images = np.frombuffer(data, np.uint8).reshape(n, *shape[1:])
            images = images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)
            yield images, labels[start : start + n], is_val[start : start + n]
        if f.read(1):
            raise EOFError(f"it goes on after image {num:,}")
    except ARCHIVE_ERRORS as error:
        raise UserError(f"{path} is damaged or truncated: {error}") from None


def check_shape(path: Path, shape: tuple) -> None:
    """Raises UserError where no file of that size holds so many images, before memory is taken for their labels."""
    if not (len(shape) in (3, 4) and 1 <= shape[0] <= MAX_IMAGES and all(1 <= side <= MAX_SIDE for side in shape[1:3])):
        raise UserError(
            f"{path} has shape {shape}; accepted: up to {MAX_IMAGES:,} images of up to {MAX_SIDE} pixels a side"
        )
    if len(shape) == 4 and shape[3] not in (1, 3):
        raise UserError(f"{path} has shape {shape}; accepted: (N, H, W, 1) or (N, H, W, 3)")
    if math.prod(shape) > MAX_RATIO * (size := path.stat().st_size):
        raise UserError(f"{path} is damaged or truncated: its {size:,} bytes cannot hold images of shape {shape}")


def names_of(labels: np.ndarray | None) -> list[str]:
    return [] if labels is None else [str(i) for i in range(int(labels.max()) + 1)]


def idx_files(folder: Path) -> dict[str, Path]:
    """Split -> file of images among a folder's IDX files, by MNIST's names: train-images..., t10k-images..."""
    files = {}
    for split, marks in (("train", ("train-images",)), ("val", ("t10k-images", "test-images"))):
        found = {path.name.removesuffix(".gz"): path for path in sorted(folder.iterdir()) if path.is_file()}
        found = {n: p for n, p in found.items() if any(m in n for m in marks) and Path(n).suffix in IDX_SUFFIXES}
        if len(found) > 1:
            raise UserError(f"{folder} has several files of {split} images: {', '.join(found)}; give --path of one")
        if found:
            files[split] = next(iter(found.values()))
    return files


def open_idx(path: Path, dims: int):
    """An IDX file (gzipped or not) -> open file behind its header, shape. Raises UserError."""
    try:
        with open(path, "rb") as f:
            opener = gzip.open if f.read(2) == b"\x1f\x8b" else open
        f = opener(path, "rb")
        head = f.read(4 + 4 * dims)
    except ARCHIVE_ERRORS as error:
        raise UserError(f"{path} is damaged or truncated: {error}") from None
    if head[:4] != bytes([0, 0, 8, dims]) or len(head) != 4 + 4 * dims:
        raise UserError(f"{path} begins with {head[:4].hex()}, wanted 000008{dims:02d}: IDX, bytes, {dims} dimensions")
    return f, tuple(np.frombuffer(head, ">u4", dims, 4).tolist())


def read_idx(path: Path, val_fraction: float, seed: int) -> Source:
    """A file of images, or a folder with train-images and t10k-images; labels from the files named likewise, if any."""
    files = idx_files(path) if path.is_dir() else {"train": path}
    if not files:
        raise UserError(f"no IDX files in {path}; looked for train-images* and t10k-images*")
    blocks, labels, shapes = [], [], []
    for split, file in files.items():
        f, shape = open_idx(file, 3)
        check_shape(file, shape)
        ids = read_idx_labels(file, shape[0])
        is_val = np.full(shape[0], split == "val") if len(files) == 2 else val_mask(shape[0], val_fraction, seed)
        blocks.append(array_blocks(f, shape, np.zeros(shape[0], np.int64) if ids is None else ids, is_val, file))
        labels.append(ids), shapes.append(shape)
    if shapes[0][1:] != shapes[-1][1:]:
        raise UserError(f"{path}: train and test images differ in shape: {shapes[0]} and {shapes[-1]}")
    if (labels[0] is None) != (labels[-1] is None):
        raise UserError(f"{path}: only one of {' and '.join(p.name for p in files.values())} has a file of labels")
    class_names = max(map(names_of, labels), key=len)
    return Source(sum(shape[0] for shape in shapes), class_names, itertools.chain(*blocks))


def read_idx_labels(images: Path, num: int) -> np.ndarray | None:
    """(num,) int64 from the file of labels that belongs to a file of images; None if there is none."""
    name = images.name.removesuffix(".gz").replace("images", "labels").replace("idx3", "idx1")
    path = next((p for s in ("", ".gz") if (p := images.with_name(name + s)).is_file()), None)
    if path is None or path == images:
        return None
    f, (count,) = open_idx(path, 1)
    if count != num:
        raise UserError(f"{path} has {count:,} labels for {num:,} images in {images.name}")
    try:
        data = f.read(num + 1)
    except ARCHIVE_ERRORS as error:
        raise UserError(f"{path} is damaged or truncated: {error}") from None
    if len(data) != num:
        raise UserError(f"{path} does not hold the {num:,} labels that its header tells")
    return np.frombuffer(data, np.uint8).astype(np.int64)


def open_npy(archive: zipfile.ZipFile, name: str, path: Path):
    """A member of an .npz -> open file behind its header, shape, dtype; nothing is decompressed yet but the header."""
    f = archive.open(name)
    head = f.read(10)
    size = int.from_bytes(head[8:10], "little")
    if head[:8] != b"\x93NUMPY\x01\x00":
        raise UserError(f"{path}: {name} is no array of .npy format 1.0")
    try:
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(io.BytesIO(head[8:] + f.read(size)))
    except Exception as error:  # it parses Python literals, and lets all that can happen there pass
        raise UserError(f"{path}: {name} has a damaged header: {type(error).__name__}") from None
    held = archive.getinfo(name).file_size
    if fortran or dtype.hasobject or held != 10 + size + math.prod(shape) * dtype.itemsize:
        raise UserError(f"{path}: {name} is {dtype} of shape {shape}, which does not fit its {held:,} bytes")
    return f, shape, dtype


def open_npz(path: Path):
    """`arr_0` (N, H, W, C) uint8, labels (N,) integers in `labels` or `arr_1` if any: ADM's and EDM's sample files.

    Returns arr_0 as an open file behind its header, its shape, and the labels, int64 or None. Headers are checked
    before anything is decompressed, arrays of objects are refused. Raises UserError.
    """
    try:
        archive = zipfile.ZipFile(path)
        members = set(archive.namelist())
        if "arr_0.npy" not in members:
            raise UserError(f"{path} has no array arr_0, but: {', '.join(sorted(members)[:5])!r}")
        f, shape, dtype = open_npy(archive, "arr_0.npy", path)
        if dtype != np.uint8 or len(shape) != 4:
            raise UserError(f"{path}: arr_0 is {dtype} of shape {shape}; accepted: uint8 of shape (N, H, W, C)")
        check_shape(path, shape)
        labels = None
        if name := next((name for name in ("labels.npy", "arr_1.npy") if name in members), None):
            g, label_shape, label_dtype = open_npy(archive, name, path)
            if label_dtype.kind not in "iu" or label_shape != shape[:1]:
                raise UserError(f"{path}: {name} is {label_dtype} of shape {label_shape} for {shape[0]:,} images")
            data = g.read()
            if len(data) != shape[0] * label_dtype.itemsize:
                raise EOFError(f"{name} ends before label {shape[0]:,}")
            labels = np.frombuffer(data, label_dtype).astype(np.int64)
            if labels.min() < 0 or labels.max() >= 2**20:
                raise UserError(f"{path}: {name} has labels {labels.min()}..{labels.max()}; accepted: 0..N-1")
    except ARCHIVE_ERRORS as error:
        raise UserError(f"{path} is damaged or truncated: {error}") from None
    return f, shape, labels


def read_npz(path: Path, val_fraction: float, seed: int) -> Source:
    """The images of an .npz, read in pieces."""
    f, shape, labels = open_npz(path)
    ids = np.zeros(shape[0], np.int64) if labels is None else labels
    blocks = array_blocks(f, shape, ids, val_mask(shape[0], val_fraction, seed), path)
    return Source(shape[0], names_of(labels), blocks)
