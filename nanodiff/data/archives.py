"""Image files in a folder, a tar or a zip: their names and contents, and which class and split they are in."""

import csv
import gzip
import itertools
import json
import os
import posixpath
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from nanodiff.common import UserError, print0
from nanodiff.data.decode import Item, aspect_ratio, import_pillow, kept_area
from nanodiff.files import reading

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
VAL_FOLDERS = ("val", "valid", "validation", "test")  # beside train/, in any case; the first that is there
LABELS = ("auto", "folder", "file", "none")
ASPECTS = (9 / 16, 2 / 3, 3 / 4, 1, 4 / 3, 3 / 2, 16 / 9)  # width / height of the buckets
BUCKET_IMAGES = 64  # minimum of a bucket, and at most a tenth of the set


@dataclass
class Options:
    """Settings of scripts/prepare_data.py."""

    resolution: int = 0
    labels: str = "auto"
    val_fraction: float = 0.05
    seed: int = 0
    workers: int = 1
    side_unit: int = 0  # of the buckets; 0 = no buckets
    bucket_images: int = 0  # minimum of a bucket; 0 = a tenth of the set, at most BUCKET_IMAGES
    vectors: str = ""  # file of a vector per image
    range: tuple[float, float] | None = None  # values of arrays beyond 8 bits that become -1 and 1; None = the data's


@dataclass
class Source:
    """Images to prepare."""

    num_images: int
    class_names: list[str]  # [] = unlabelled
    items: Iterator[Item]
    names: list[str] = field(default_factory=list)  # of image files
    workers: int = 1  # processes that may decode them
    state: str = ""  # hash of the files' names, sizes and times
    sizes: list[tuple[int, int]] = field(default_factory=list)  # (H, W) of the set, one or buckets; [] = the images'
    arrays: dict[str, np.ndarray] = field(default_factory=dict)  # name of a condition -> (rows, ...)
    dtype: str = "uint8"  # of the source's arrays; others than uint8 become fp16
    range: tuple[float, float] = (0, 255)
    num_clipped: int = 0  # values beyond the range; grows with the items


def val_mask(num: int, options: Options) -> np.ndarray:
    """(num,) bool: which images are held out; at least one unless val_fraction is 0."""
    mask = np.zeros(num, bool)
    if options.val_fraction > 0 and num > 1:
        count = round(num * options.val_fraction)
        count = min(max(count, 1), num - 1)
        order = np.random.default_rng([options.seed, num]).permutation(num)
        mask[order[:count]] = True
    return mask


# ---------------------------------------------------------------------------------------------------------------------
# Containers: the names of their files, and a function names -> (name, path or content) of each


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

    def fetch(wanted):
        for name in wanted:
            yield name, os.path.join(path, name)

    return names, fetch


def open_unzipped(path: Path):
    """A binary file, decompressed as it is read if it is gzipped."""
    with open(path, "rb") as file:
        is_gzip = file.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rb") if is_gzip else open(path, "rb")


def read_tar(path: Path) -> Iterator:
    """(name, content) of the regular files in a .tar or .tar.gz; nothing is extracted to disk."""
    with reading(path), open_unzipped(path) as file, tarfile.open(fileobj=file, mode="r|") as tar:
        while (member := tar.next()) is not None:
            if member.isreg():
                yield posixpath.normpath(member.name), tar.extractfile(member).read()
            tar.members.clear()  # else the list of a large archive fills the memory
        # tarfile takes a damaged header or a truncation for the end, but only zeros mark it
        tail = tar.fileobj.read(2**20)
        if tail.strip(b"\0") or tar.fileobj.tell() < tar.offset + tarfile.BLOCKSIZE:
            raise tarfile.ReadError("no end of the archive where the last file ends")


def open_tar(path: Path):
    """Two passes: the names, then the contents, in the archive's order."""
    print0(f"listing the files in {path}")

    def fetch(wanted):
        left = set(wanted)
        for name, data in read_tar(path):
            if name in left:  # of two files with one name, the first
                left.remove(name)
                yield name, data

    return [name for name, _ in read_tar(path)], fetch


def open_zip(path: Path):
    with reading(path):
        archive = zipfile.ZipFile(path)

    def fetch(wanted):
        with reading(path):
            for name in wanted:
                yield name, archive.read(name)

    return archive.namelist(), fetch


CONTAINERS = {"folder": open_folder, "tar": open_tar, "zip": open_zip}


# ---------------------------------------------------------------------------------------------------------------------
# Classes and splits


def is_image(name: str) -> bool:
    """By suffix, but not if hidden or added by macOS."""
    hidden = any(part.startswith((".", "__MACOSX")) for part in name.split("/"))
    return name.lower().endswith(SUFFIXES) and not hidden


def split_folders(names: list[str]):
    """-> the names that are in a split, their paths below it as lists of parts, is_val (n,) or None.

    A train/ folder with val/ or test/ beside it is a split. One folder around all others, as archives often have, is
    left out of the paths.
    """
    paths = [name.split("/") for name in names]
    tops = {path[0] if len(path) > 2 else "" for path in paths}
    if len(tops) == 1 and "" not in tops:
        paths = [path[1:] for path in paths]
    tops = [path[0].lower() for path in paths]
    val = next((folder for folder in VAL_FOLDERS if folder in tops), None)
    if val is None or "train" not in tops:
        return names, paths, None
    in_split = [i for i, top in enumerate(tops) if top in ("train", val)]
    if len(in_split) < len(names):
        print0(f"left out {len(names) - len(in_split):,} images beside train/ and {val}/")
    is_val = np.array([tops[i] == val for i in in_split])
    names = [names[i] for i in in_split]
    paths = [paths[i][1:] for i in in_split]
    return names, paths, is_val


def look_up(table: dict, names: list[str], missing: str) -> list:
    """[table[name] for each name]; `missing` begins the UserError if there is one without."""
    absent = [name for name in names if name not in table]
    if absent:
        raise UserError(f"{missing} for {len(absent):,} of {len(names):,} images, such as {absent[0]!r}")
    return [table[name] for name in names]


def classify(names: list[str], labels: str | dict):
    """-> the names that are in a split, class_names, labels (n,), is_val (n,) or None.

    labels     an image's class
    "folder"   its first folder, below a split's
    "file"     its file name up to the first "_"
    a dict     labels[name]
    "none"     there are no classes
    "auto"     "folder" if there are folders, else "none"
    """
    names, paths, is_val = split_folders(names)
    if labels == "auto":
        labels = "folder" if any(len(path) > 1 for path in paths) else "none"
    if labels == "none":
        return names, [], np.zeros(len(names), np.int64), is_val
    table = labels
    if labels == "folder":
        table = {name: path[0] for name, path in zip(names, paths) if len(path) > 1}
    elif labels == "file":
        table = {name: path[-1].split("_")[0] for name, path in zip(names, paths) if "_" in path[-1]}
    source = "the table" if isinstance(labels, dict) else f"labels={labels!r}"
    classes = look_up(table, names, f"{source} gives no class (--labels=none ignores classes)")
    class_names = sorted(set(classes))
    if all(name.isdecimal() for name in class_names):
        class_names.sort(key=int)
    numbers = {name: i for i, name in enumerate(class_names)}
    return names, class_names, np.array([numbers[name] for name in classes]), is_val


def read_csv(labels: str) -> dict[str, str]:
    """A table of labels -> {file: class}: rows of file,class, or a header that names the columns file and label."""
    path = Path(labels).expanduser()
    if path.suffix != ".csv" or not path.is_file():
        raise UserError(f"labels={labels!r}; accepted: {', '.join(LABELS)}, or a .csv file")
    accepted = "rows of file,class or a header with the columns file and label"
    table = {}
    file_column, label_column = 0, 1
    with reading(path, "is not a table in UTF-8"), open(path, encoding="utf-8-sig", newline="") as lines:
        rows = csv.reader(lines)
        for row in rows:
            if row.count("file") == row.count("label") == 1 and not table:
                file_column, label_column = row.index("file"), row.index("label")
                continue
            if not row:
                continue
            where = f"{path}, line {rows.line_num}"
            has_both = len(row) > max(file_column, label_column)
            if not has_both or not row[file_column].lower().endswith(SUFFIXES):
                raise UserError(f"{where}: found {','.join(row)!r}; accepted: {accepted}")
            file = posixpath.normpath(row[file_column])
            label = row[label_column].strip()
            if not label:
                raise UserError(f"{where}: {file!r} has an empty class; --labels=none ignores classes")
            if table.setdefault(file, label) != label:
                raise UserError(f"{where}: {file!r} has the class {label!r} here and {table[file]!r} before")
    return table


# ---------------------------------------------------------------------------------------------------------------------
# Sizes


def choose_sizes(ratios: np.ndarray, options: Options) -> list[tuple[int, int]]:
    """Buckets (H, W) of about resolution^2 pixels, tall to wide, for images of these ratios (n,), width / height.

    Each image goes to the bucket nearest in shape. Of all sets of buckets in which each gets enough images, takes the
    one that crops away least. The square alone is always among them.
    """
    unit = options.side_unit
    widths = [unit * round(options.resolution * ratio**0.5 / unit) for ratio in ASPECTS]
    sizes = list(dict.fromkeys(zip(reversed(widths), widths)))
    minimum = options.bucket_images or min(BUCKET_IMAGES, len(ratios) // 10)
    kept = kept_area(ratios, sizes)  # (n, len(sizes))
    square = sizes.index((options.resolution, options.resolution))
    best, best_kept = [square], kept[:, square].mean()
    for number in range(1, len(sizes) + 1):
        for chosen in itertools.combinations(range(len(sizes)), number):
            part = kept[:, chosen]
            counts = np.bincount(part.argmax(1), minlength=number)
            part_kept = part.max(1).mean()
            if counts.min() >= max(minimum, 1) and part_kept > best_kept:
                best, best_kept = chosen, part_kept
    lost = f"{1 - best_kept:.1%} of an image, {1 - kept[:, square].mean():.1%} by a square"
    print0(f"{len(best)} buckets of {minimum:,} images or more; cropped away on average: {lost}")
    return [sizes[i] for i in best]


def read_images(path: Path, kind: str, options: Options) -> Source:
    """The images of one of CONTAINERS."""
    import_pillow()
    found, fetch = CONTAINERS[kind](path)
    images = sorted({name for name in found if is_image(name)})
    if not images:
        raise UserError(f"no images in {path}; looked for {', '.join(SUFFIXES)}")
    labels = options.labels
    if labels == "auto" and "dataset.json" in found:
        ((_, content),) = fetch(["dataset.json"])
        if isinstance(content, str):
            content = Path(content).read_bytes()
        with reading(f"{path}/dataset.json"):
            rows = json.loads(content)["labels"]  # EDM's: [[file, class], ...] or null
            labels = {posixpath.normpath(file): str(label) for file, label in rows} if rows else "none"
    elif labels not in LABELS:
        labels = read_csv(labels)
    if isinstance(labels, dict):
        absent = labels.keys() - set(found)
        if absent:
            print0(f"{len(absent):,} labels have no file in {path}, such as {min(absent)!r}")
    names, class_names, numbers, is_val = classify(images, labels)
    sizes = []
    if options.side_unit:
        ratios = np.array([aspect_ratio(payload) for _, payload in fetch(names)])
        sizes = choose_sizes(ratios[ratios > 0], options)  # without the NaN of unreadable files
    if is_val is None:
        is_val = val_mask(len(names), options)
    index = {name: i for i, name in enumerate(names)}

    def items():
        for name, payload in fetch(names):
            i = index[name]
            yield Item(name, payload, numbers[i], is_val[i])

    return Source(len(names), class_names, items(), names, sizes=sizes)
