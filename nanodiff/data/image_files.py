"""Image files in a folder, a tar or a zip: which there are, their bytes, their classes and splits."""

import bz2
import gzip
import json
import lzma
import os
import posixpath
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from nanodiff.common import UserError
from nanodiff.data.decode import MAX_FILE_BYTES, decode_all, import_pillow

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
VAL_FOLDERS = ("val", "valid", "validation", "test")  # beside train/; the first that is there
ARCHIVE_ERRORS = (
    OSError, EOFError, zlib.error, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile, RuntimeError,
    UnicodeDecodeError, OverflowError, struct.error,  # of names and numbers in a zip that are none
)  # fmt: skip
MAX_TAR_NAME = 2**16  # bytes of a long name, or of what else a tar says of a file


@dataclass
class Source:
    """What is to be prepared. `blocks` yields (images (n, C, H, W) uint8, labels (n,) int64, is_val (n,) bool)."""

    num_images: int
    class_names: list[str]  # [] = unlabelled
    blocks: Iterator
    skipped: list[str] = field(default_factory=list)  # "name: reason" of unreadable files, grows with the blocks
    left_out: int = 0  # images that are in none of the splits


def val_mask(num: int, fraction: float, seed: int) -> np.ndarray:
    """(num,) bool, round(num * fraction) of them True but at least one (unless the fraction is 0): which images are
    held out, a function of the arguments alone."""
    mask = np.zeros(num, bool)
    count = min(round(num * fraction), num - 1)
    if fraction > 0 and num > 1:
        mask[np.random.default_rng([seed, num]).permutation(num)[: max(count, 1)]] = True
    return mask


# ---------------------------------------------------------------------------------------------------------------------
# Containers: the names of their files, and a function that yields (name, path or bytes) of those wanted


def is_image(name: str) -> bool:
    """By its suffix; hidden files (and what macOS puts into archives) are none."""
    parts = name.split("/")
    return name.lower().endswith(SUFFIXES) and not any(p.startswith((".", "__MACOSX")) for p in parts)


def open_folder(path: Path):
    """Names of the files below a folder (symbolic links followed), and a function names -> (name, path) of each."""
    names, seen = [], set()

    def fail(error):
        raise UserError(f"cannot read {error.filename}: {error.strerror}")

    for folder, folders, files in os.walk(path, followlinks=True, onerror=fail):
        folders.sort()
        stat = os.stat(folder)
        if (stat.st_dev, stat.st_ino) in seen:  # a link to a folder above would never end
            folders.clear()
            continue
        seen.add((stat.st_dev, stat.st_ino))
        prefix = os.path.relpath(folder, path).replace(os.sep, "/")
        names += [file if prefix == "." else f"{prefix}/{file}" for file in files]
    return names, lambda wanted: ((name, os.path.join(path, name)) for name in wanted)


class _Member(tarfile.TarInfo):
    """A damaged header is an error, for tarfile is content that the archive ends there; so is a name without end."""

    @classmethod
    def frombuf(cls, buf, encoding, errors):
        try:
            member = super().frombuf(buf, encoding, errors)
        except (tarfile.InvalidHeaderError, tarfile.TruncatedHeaderError) as error:
            raise tarfile.ReadError(f"a damaged header: {error}") from None
        if member.size < 0:
            raise tarfile.ReadError(f"a file of {member.size:,} bytes")
        if member.type in b"LKxgX" and member.size > MAX_TAR_NAME:  # all of these tarfile reads into memory
            raise tarfile.ReadError(f"a name or attributes of {member.size:,} bytes")
        return member


class _TarStream:
    """A file that tarfile does not read on and on behind its end, where a member claims to be larger than there is."""

    def __init__(self, file):
        self.file, self.ended = file, False

    def read(self, size):
        if self.ended:
            raise EOFError("it ends within a file")
        data = self.file.read(size)
        self.ended = not data
        return data


def read_tar(path: Path, wanted: Callable) -> Iterator:
    """(TarInfo, bytes) of the regular files of a tar (.gz, .bz2, .xz or plain) that `wanted(TarInfo)` accepts.

    Streamed, nothing is ever extracted to disk; bytes is None for files above MAX_FILE_BYTES. Raises UserError for a
    damaged or truncated archive.
    """
    try:
        with open(path, "rb") as raw:
            opener = {b"\x1f\x8b": gzip.open, b"BZ": bz2.open, b"\xfd7": lzma.open}.get(raw.read(2), open)
            if opener is open:  # tarfile would take a truncated archive for the whole; the end are two empty records
                raw.seek(max(-1024, -raw.seek(0, 2)), 2)
                if raw.read().strip(b"\0"):
                    raise tarfile.ReadError("the end is missing")
        with (
            opener(path, "rb") as stream,
            tarfile.open(fileobj=_TarStream(stream), mode="r|", tarinfo=_Member) as tar,
        ):
            while (member := tar.next()) is not None:
                if member.isreg() and wanted(member):
                    yield member, tar.extractfile(member).read() if member.size <= MAX_FILE_BYTES else None
                tar.members.clear()  # else the list of a large archive fills the memory
            while stream.read(2**20):  # up to the checksum at the end of the stream
                pass
    except (*ARCHIVE_ERRORS, ValueError) as error:  # tarfile converts what should be numbers
        raise UserError(f"{path} is damaged or truncated: {error}") from None


def open_tar(path: Path):
    """Like open_folder, in two passes: the names, then the bytes in the order of the archive."""
    names = []
    for _ in read_tar(path, lambda member: names.append(posixpath.normpath(member.name))):
        pass

    def fetch(wanted):
        wanted = set(wanted)
        for member, data in read_tar(path, lambda member: posixpath.normpath(member.name) in wanted):
            wanted.remove(name := posixpath.normpath(member.name))  # of two files of one name the first is taken
            yield name, data

    return names, fetch


def open_zip(path: Path):
    """Like open_folder, with bytes."""

    def fetch(wanted):
        with zipfile.ZipFile(path) as archive:
            for name in wanted:
                try:
                    yield name, archive.read(name) if archive.getinfo(name).file_size <= MAX_FILE_BYTES else None
                except ARCHIVE_ERRORS as error:
                    raise UserError(f"{path} is damaged or truncated: {name!r}: {error}") from None

    try:
        with zipfile.ZipFile(path) as archive:
            return archive.namelist(), fetch
    except ARCHIVE_ERRORS as error:
        raise UserError(f"{path} is damaged or truncated: {error}") from None


# ---------------------------------------------------------------------------------------------------------------------
# Which image is in which class and split


def classify(names: list[str], labels: str, strip: bool):
    """Classes and splits by the names -> class_names, labels (n,), is_val (n,) or None, keep (n,) bool.

    A train/ folder beside val/ or test/ is a split; below it the first folder is the class (labels "folder"), or the
    file name up to its first "_" ("file"). "auto": by folder if there are folders. `strip`: a lone folder around
    everything, as archives have it, does not count.
    """
    parts = [name.split("/") for name in names]
    while strip and all(len(p) > 2 and p[0] == parts[0][0] != "train" for p in parts):
        parts = [p[1:] for p in parts]
    keep, is_val = np.ones(len(names), bool), None
    tops = {p[0] for p in parts if len(p) > 1}
    if "train" in tops:
        val = next((folder for folder in VAL_FOLDERS if folder in tops), None)
        keep = np.array([len(p) > 1 and p[0] in ("train", val) for p in parts])
        is_val = np.array([p[0] == val for p in parts]) if val else None
        parts = [p[1:] or p for p in parts]
    used = [(p, name) for p, name, k in zip(parts, names, keep) if k]
    if labels == "auto":
        labels = "folder" if any(len(p) > 1 for p, _ in used) else "none"
    if labels == "none":
        return [], np.zeros(len(names), np.int64), is_val, keep
    for p, name in used:
        if len(p) < 2 if labels == "folder" else "_" not in p[-1]:
            kind = "lies in no class folder" if labels == "folder" else "has no class before a '_' in its name"
            raise UserError(f"labels={labels!r}: image {name!r} {kind}; --labels=none ignores classes")
    classes = [p[0] if labels == "folder" else p[-1].split("_")[0] for p in parts]
    class_names = sorted({c for c, k in zip(classes, keep) if k})
    ids = {c: i for i, c in enumerate(class_names)}
    shown = ["".join(c if c.isprintable() else "?" for c in name) for name in class_names]  # file names hold anything
    return shown, np.array([ids.get(c, 0) for c in classes]), is_val, keep


def edm_labels(data: bytes | None, names: list[str], path: Path):
    """EDM's dataset.json, {"labels": [["00000/img00000000.png", 6], ...]} or null -> class_names, labels (n,)."""
    try:
        table = json.loads(data)["labels"]
        ids = None if table is None else dict(table)
        if ids is not None and not all(type(label) is int and 0 <= label < 2**20 for label in ids.values()):
            raise ValueError
    except (ValueError, TypeError, KeyError, RecursionError):
        raise UserError(f"{path}: dataset.json is not of the form {{'labels': [[file, class number], ...]}}") from None
    if ids is None:
        return [], np.zeros(len(names), np.int64)
    if missing := next((name for name in names if name not in ids), None):
        raise UserError(f"{path}: dataset.json has {len(ids):,} labels for {len(names):,} images; none for {missing!r}")
    labels = np.array([ids[name] for name in names])
    return [str(i) for i in range(labels.max() + 1)], labels


def read_images(path: Path, kind: str, resolution: int, labels: str, val_fraction: float, seed: int, workers: int):
    """The images of a "folder", "tar" or "zip" -> Source. Raises UserError where there are none."""
    import_pillow()
    found, fetch = {"folder": open_folder, "tar": open_tar, "zip": open_zip}[kind](path)
    names = sorted({name for name in found if is_image(name)})
    if not names:
        raise UserError(f"no images in {path}; looked for {', '.join(SUFFIXES)}")
    if labels == "auto" and "dataset.json" in found:
        ((_, table),) = fetch(["dataset.json"])
        table = Path(table).read_bytes() if isinstance(table, str) else table
        class_names, ids = edm_labels(table, names, path)
        is_val, keep = None, np.ones(len(names), bool)
    else:
        class_names, ids, is_val, keep = classify(names, labels, strip=kind != "folder")
    names, ids = [name for name, k in zip(names, keep) if k], ids[keep]
    is_val = val_mask(len(names), val_fraction, seed) if is_val is None else is_val[keep]
    index = {name: i for i, name in enumerate(names)}
    items = ((index[name], name, payload) for name, payload in fetch(names))
    source = Source(len(names), class_names, iter(()))
    source.left_out = int((~keep).sum())
    source.blocks = decode_all(items, ids, is_val, resolution, workers, source.skipped)
    return source
