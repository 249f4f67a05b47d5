"""Image files in a folder, a tar or a zip: their names and bytes, and which class and split they are in."""

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import posixpath
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from nanodiff.common import UserError, print0
from nanodiff.data.decode import MAX_FILE_BYTES, aspect_ratio, import_pillow, kept_area
from nanodiff.files import read_small, reading

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
TRAIN_FOLDERS = ("train", "training")  # in any case
VAL_FOLDERS = ("val", "valid", "validation", "test", "testing")  # beside train/; the first that is there
LABELS = ("auto", "folder", "file", "none")
TABLES = (".csv", ".json", ".jsonl")  # of labels
MAX_TABLE_BYTES = 2**26
MAX_RATIO = 1032  # deflate shrinks no further: a header that claims more is damaged
ASPECTS = (9 / 16, 2 / 3, 3 / 4, 1, 4 / 3, 3 / 2, 16 / 9)  # width / height of the buckets


@dataclass
class Options:
    """Settings of scripts/prepare_data.py."""

    resolution: int = 0
    labels: str = "auto"
    val_fraction: float = 0.05
    seed: int = 0
    workers: int = 1
    side_unit: int = 0  # of the buckets; 0 = no buckets
    bucket_images: int = 64


@dataclass
class Source:
    """Images to prepare."""

    num_images: int
    class_names: list[str]  # [] = unlabelled
    items: Iterator  # (name, file or array, see decode.decode; label; is_val) of each image
    blocks: Iterator = ()  # of the decoded items: images (n, C, H, W) uint8, labels (n,) int64, is_val (n,) bool
    skipped: list[str] = field(default_factory=list)  # "name: reason" of unreadable files; grows with the blocks
    left_out: int = 0  # images in none of the splits
    val_is_drawn: bool = True  # not the source's own split
    num_enlarged: int = 0  # images smaller than the resolution; grows with the blocks
    sizes: list[tuple[int, int]] = field(default_factory=list)  # (H, W) of the buckets


def val_mask(num: int, options: Options) -> np.ndarray:
    """(num,) bool: which images are held out; at least one unless val_fraction is 0."""
    mask = np.zeros(num, bool)
    count = min(round(num * options.val_fraction), num - 1)
    if options.val_fraction > 0 and num > 1:
        mask[np.random.default_rng([options.seed, num]).permutation(num)[: max(count, 1)]] = True
    return mask


# ---------------------------------------------------------------------------------------------------------------------
# Containers: the names of their files, and a function names -> (name, path or bytes) of each


def open_folder(path: Path):
    names, seen = [], set()

    def fail(error):
        raise error

    for folder, folders, files in os.walk(path, followlinks=True, onerror=fail):
        folders.sort()
        if os.path.realpath(folder) in seen:  # a link to a parent would recurse forever
            folders.clear()
            continue
        seen.add(os.path.realpath(folder))
        names += [os.path.relpath(os.path.join(folder, file), path) for file in files]
    return names, lambda wanted: ((name, os.path.join(path, name)) for name in wanted)


def read_tar(path: Path, wanted: Callable) -> Iterator:
    """(name, bytes) of the regular files in a tar (plain, .gz, .bz2 or .xz); nothing is extracted to disk.

    Bytes are None unless wanted(name) and at most MAX_FILE_BYTES.
    """
    with reading(path):
        with open(path, "rb") as raw:
            limit = MAX_RATIO * os.fstat(raw.fileno()).st_size
            opener = {b"\x1f\x8b": gzip.open, b"BZ": bz2.open, b"\xfd7": lzma.open}.get(raw.read(2), open)
        with opener(path, "rb") as file, tarfile.open(fileobj=file, mode="r|") as tar:
            while (member := tar.next()) is not None:
                if not member.offset_data <= tar.offset <= limit:  # tarfile would read on to there
                    raise tarfile.ReadError(f"a file of {member.size:,} bytes")
                if member.isreg():
                    name = posixpath.normpath(member.name)
                    small = member.size <= MAX_FILE_BYTES
                    yield name, tar.extractfile(member).read() if small and wanted(name) else None
                tar.members.clear()  # else the list of a large archive fills the memory
            # tarfile also stops at a damaged header or a truncation, but only zeros mark the end
            if tar.fileobj.tell() < tar.offset + 512:
                raise tarfile.ReadError("the end is missing")
            while rest := tar.fileobj.read(2**20):  # to the checksum of the compressed file
                if rest.strip(b"\0"):
                    raise tarfile.ReadError("a damaged header")


def open_tar(path: Path):
    """Two passes: the names, then the bytes, in the archive's order."""
    print0(f"listing the files in {path}")

    def fetch(wanted):
        left = set(wanted)
        for name, data in read_tar(path, left.__contains__):
            if name in left:  # of two files with one name, the first
                left.remove(name)
                yield name, data

    return [name for name, _ in read_tar(path, lambda name: False)], fetch


def open_zip(path: Path):
    with reading(path):
        archive = zipfile.ZipFile(path)

    def fetch(wanted):
        with reading(path):
            for name in wanted:
                small = archive.getinfo(name).file_size <= MAX_FILE_BYTES
                yield name, archive.read(name) if small else None

    return archive.namelist(), fetch


CONTAINERS = {"folder": open_folder, "tar": open_tar, "zip": open_zip}


# ---------------------------------------------------------------------------------------------------------------------
# Classes and splits


def is_image(name: str) -> bool:
    """By suffix, but not if hidden or added by macOS."""
    hidden = any(part.startswith((".", "__MACOSX")) for part in name.split("/"))
    return name.lower().endswith(SUFFIXES) and not hidden


def classify(names: list[str], labels: str | dict, strip: bool):
    """-> the names that are in a split, class_names, labels (n,), is_val (n,) or None.

    A train/ folder, with val/ or test/ beside it, is a split. Below it the class is the first folder (labels
    "folder"), the file name up to its first "_" ("file"), or a table's {name: class}; "auto" is "folder" if there are
    folders. `strip` drops single enclosing folders, which archives often have.
    """
    paths = [name.split("/") for name in names]
    paths = [[folder for folder in p[:-1] if folder.lower() != "images"] + p[-1:] for p in paths]  # no class
    while strip and all(len(p) > 2 and p[0] == paths[0][0] and p[0].lower() not in TRAIN_FOLDERS for p in paths):
        paths = [p[1:] for p in paths]
    is_val = None
    tops = [p[0].lower() if len(p) > 1 else "" for p in paths]
    if set(tops) & {*TRAIN_FOLDERS}:
        val = next((folder for folder in VAL_FOLDERS if folder in tops), None)
        kept = [i for i, top in enumerate(tops) if top in (*TRAIN_FOLDERS, val)]
        names = [names[i] for i in kept]
        is_val = np.array([tops[i] == val for i in kept]) if val else None
        paths = [paths[i][1:] for i in kept]
    elif labels in ("auto", "folder") and set(tops) & {*VAL_FOLDERS}:
        raise UserError(f"a folder named as one of {', '.join(VAL_FOLDERS)} is no class, and has no 'train' beside it")
    if labels == "auto":
        labels = "folder" if any(len(p) > 1 for p in paths) else "none"
    if labels == "none":
        return names, [], np.zeros(len(names), np.int64), is_val
    is_table = isinstance(labels, dict)
    if is_table:
        absent = [name for name in names if name not in labels]
        if absent:
            total = f"{len(absent):,} of {len(names):,}"
            raise UserError(f"the table of labels lacks {total} images, such as {absent[0]!r}")
        classes = [labels[name] for name in names]
    else:
        parts = [p if labels == "folder" else p[-1].split("_") for p in paths]
        classless = [name for name, part in zip(names, parts) if len(part) == 1]
        if classless:
            lacks = "lies in no class folder" if labels == "folder" else "has no class before a '_'"
            raise UserError(f"labels={labels!r}: image {classless[0]!r} {lacks}; --labels=none ignores classes")
        classes = [part[0] for part in parts]
    numeric = is_table and all(name.isdecimal() for name in classes)
    class_names = sorted(set(classes), key=int if numeric else None)
    numbers = {name: i for i, name in enumerate(class_names)}
    printable = ["".join(c if c.isprintable() else "?" for c in name) for name in class_names]
    return names, printable, np.array([numbers[name] for name in classes]), is_val


def read_table(name: str, payload) -> dict[str, str]:
    """A table of labels (its path or bytes) -> {file: class}, {} if it holds none.

    .csv: rows of file, class; .jsonl: {"file": ..., "label": ...}; .json: {file: class}, or as EDM's dataset.json
    {"labels": [[file, class], ...]} or null.
    """
    if isinstance(payload, str):
        if not name.endswith(TABLES) or not os.path.isfile(payload):
            raise UserError(f"labels={name!r}; accepted: {', '.join(LABELS)}, or a file in {', '.join(TABLES)}")
        payload = read_small(Path(payload), MAX_TABLE_BYTES)
    if payload is None or len(payload) > MAX_TABLE_BYTES or payload.count(b",") > 3e6:  # each can cost 200 bytes
        raise UserError(f"{name} is too large for a table: above {MAX_TABLE_BYTES >> 20} MiB or 3 million commas")
    lines = io.TextIOWrapper(io.BytesIO(payload), "utf-8-sig")
    try:
        if name.endswith(".csv"):
            rows = (row[:2] for row in csv.reader(lines) if row)
        elif name.endswith(".jsonl"):
            rows = ((record["file"], record["label"]) for record in map(json.loads, lines))
        else:
            rows = json.load(lines)
            rows = rows.get("labels", rows)
            rows = rows.items() if isinstance(rows, dict) else rows or ()
        table = {}
        for file, label in rows:
            if type(label) not in (int, str):
                raise TypeError(f"class {label!r}")
            table[posixpath.normpath(file)] = str(label)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, csv.Error) as error:
        wanted = "file, class; .jsonl {'file': ..., 'label': ...}; .json {'labels': [[file, class], ...]}"
        raise UserError(f"{name} is not of the form {wanted}: {type(error).__name__}: {error}") from None
    return table


def choose_sizes(ratios: np.ndarray, options: Options) -> list[tuple[int, int]]:
    """(H, W) of about resolution^2 pixels, tall to wide, each nearest in shape to bucket_images or more images, given
    their ratios (n,): a bucket with fewer goes to its neighbours."""
    widths = [options.side_unit * round(options.resolution * ratio**0.5 / options.side_unit) for ratio in ASPECTS]
    sizes = list(dict.fromkeys(zip(reversed(widths), widths)))
    while True:
        kept = kept_area(ratios, sizes)
        counts = np.bincount(kept.argmax(1), minlength=len(sizes))
        if len(sizes) == 1 or counts.min() >= options.bucket_images:
            break
        del sizes[counts.argmin()]
    found = ", ".join(f"{height}x{width} ({n:,})" for (height, width), n in zip(sizes, counts))
    lost = f"{1 - kept.max(1).mean():.1%} of an image, {1 - kept_area(ratios, [(1, 1)]).mean():.1%} by a square"
    print0(f"buckets, height x width: {found}; cropped away on average: {lost}")
    return sizes


def read_images(path: Path, kind: str, options: Options) -> Source:
    """The images of one of CONTAINERS."""
    import_pillow()
    found, fetch = CONTAINERS[kind](path)
    images = sorted({name for name in found if is_image(name)})
    if not images:
        raise UserError(f"no images in {path}; looked for {', '.join(SUFFIXES)}")
    labels = options.labels
    if labels == "auto" and "dataset.json" in found:
        ((_, payload),) = fetch(["dataset.json"])
        labels = read_table(f"{path}/dataset.json", payload) or "none"
    elif labels not in LABELS:
        labels = read_table(labels, labels)
    if isinstance(labels, dict) and (absent := [name for name in labels.keys() - set(found) if is_image(name)]):
        print0(f"{len(absent):,} labels have no file in {path}, such as {min(absent)!r}")
    names, class_names, numbers, is_val = classify(images, labels, strip=kind != "folder")
    sizes = []
    if options.side_unit:
        ratios = np.array([aspect_ratio(payload) for _, payload in fetch(names)])
        sizes = choose_sizes(ratios[ratios > 0], options)  # without NaN
    drawn = is_val is None
    facts = dict(zip(names, zip(numbers, val_mask(len(names), options) if drawn else is_val)))
    items = ((name, payload, *facts[name]) for name, payload in fetch(names))
    return Source(len(names), class_names, items, left_out=len(images) - len(names), val_is_drawn=drawn, sizes=sizes)
