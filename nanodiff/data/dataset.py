"""Reading image sets: shards through mmap, in any order. Their form on disk is told in dataset_writer.py."""

import hashlib
import json
import math
import os
import re
from pathlib import Path

import numpy as np

from nanodiff.common import UserError
from nanodiff.data.dataset_writer import DTYPES, FORMAT, SPLITS, DatasetWriter, data_dir, is_name, npy_header
from nanodiff.data.shapes import CLASS_NAMES, draw_split

SHAPES = {"shapes": 16, "shapes32": 32, "shapes64": 64}  # drawn on first use: name -> resolution


class Dataset:
    """One split of a set on disk; open_dataset makes it. `.name` is what open_dataset takes to find the set again."""

    def __init__(self, path: Path, split: str):
        self.path, self.split = path, split
        self.meta = meta = read_meta(path)
        if split not in meta["splits"]:
            hint = "; prepare it again with --val_fraction=0.05" if split == "val" else ""
            raise UserError(f"data set {path.name!r} has no split {split!r}, only {', '.join(meta['splits'])}{hint}")
        self.name = path.name if path.parent == data_dir() else str(path)
        self.channels, self.resolution = meta["channels"], meta["resolution"]
        self.class_names, self.num_classes = meta["class_names"], len(meta["class_names"])
        part = meta["splits"][split]
        self.num_images = part["num_images"]
        shape = (self.channels, self.resolution, self.resolution)
        kind = DTYPES[meta["kind"]]
        self._shards = [_open_npy(path, shard, kind, (shard["num_images"], *shape)) for shard in part["shards"]]
        self._ends = np.cumsum([len(shard) for shard in self._shards])  # (shards,) index after the last of each
        self._labels = None
        if self.num_classes:
            self._labels = np.array(_open_npy(path, part["labels"], np.dtype(np.int64), (self.num_images,)))
            if self._labels.min() < 0 or self._labels.max() >= self.num_classes:
                raise UserError(f"{path / part['labels']['file']}: labels beyond 0..{self.num_classes - 1}")

    def __len__(self) -> int:
        return self.num_images

    def images(self, indices) -> np.ndarray:
        """(n,) integers in [0, num_images), in any order -> (n, C, H, W) uint8, or fp16 of latents; a copy."""
        indices = self._check(indices)
        out = np.empty((len(indices), *self._shards[0].shape[1:]), self._shards[0].dtype)
        order = np.argsort(indices, kind="stable")  # the disk is read forwards
        cuts = np.searchsorted(indices[order], [0, *self._ends])
        for k, shard in enumerate(self._shards):
            rows = order[cuts[k] : cuts[k + 1]]
            if len(rows):
                out[rows] = shard[indices[rows] - (self._ends[k] - len(shard))]
        return out

    def labels(self, indices) -> np.ndarray:
        """(n,) integers in [0, num_images) -> (n,) int64; zeros where the set is unlabelled."""
        indices = self._check(indices)
        return np.zeros(len(indices), np.int64) if self._labels is None else self._labels[indices]

    def _check(self, indices) -> np.ndarray:
        indices = np.asarray(indices, np.int64)
        if indices.size and not 0 <= indices.min() <= indices.max() < self.num_images:
            raise IndexError(f"indices {indices.min()}..{indices.max()} of {self.num_images} images")
        return indices


class Relabelled:
    """A data set whose label k is called numbers[k]; all else is as it was."""

    def __init__(self, dataset, numbers: list[int]):
        self.dataset, self.numbers = dataset, np.asarray(numbers, np.int64)

    def __getattr__(self, name):
        return getattr(self.dataset, name)

    def __len__(self):
        return len(self.dataset)

    def labels(self, indices):
        return self.numbers[self.dataset.labels(indices)]


def match_labels(names: list[str], known: list[str], what: str) -> list[int]:
    """The number in `known` of each class in `names`: a fine-tuned model has its new classes last, a part of a set only
    some. Names of which some are strange are taken by their order, as those of published models are mere numbers.

    Raises UserError, beginning with `what`, if there are not as many.
    """
    if set(names) <= set(known):
        return [known.index(name) for name in names]
    if len(names) != len(known):
        strange = next(name for name in names if name not in known)
        raise UserError(
            f"{what}: {strange!r} of the {len(names)} classes here is none of the {len(known)} classes there"
        )
    return list(range(len(names)))


def list_datasets() -> list[str]:
    """The names of the whole sets in data_dir()."""
    return sorted(p.parent.name for p in data_dir().glob("[!.]*/meta.json"))


def open_dataset(name_or_path: str | Path, split: str = "train") -> Dataset:
    """Open a split, "train" or "val", of the set in that folder, or of that name in $NANODIFF_BASE_DIR/data.

    The embedded sets (`shapes`, `shapes32`, `shapes64`) are drawn on first use; when several ranks ask at once, one
    draws and the others wait. Raises UserError for an unknown set, an absent split, or files that are not as meta.json
    says (the checksums are left to `verify`).
    """
    name = str(name_or_path)
    folder = os.path.expanduser(name)
    if name and os.path.isfile(os.path.join(folder, "meta.json")):
        return Dataset(Path(folder).absolute(), split)
    path = data_dir() / name
    if name in SHAPES and not (path / "meta.json").is_file():
        make_shapes(name)
    if not is_name(name) or not (path / "meta.json").is_file():
        known = ", ".join(list_datasets()) or "none yet"
        raise UserError(
            f"no data set {name!r}; prepared in {data_dir()}: {known}; drawn on first use: {', '.join(SHAPES)}; "
            "prepare another by `python -m scripts.prepare_data --path=... --name=...`"
        )
    return Dataset(path, split)


def make_shapes(name: str) -> None:
    """Draw an embedded set into data_dir(); waits for, and is content with, another process that is drawing it."""
    with DatasetWriter(name, CLASS_NAMES, source="shapes", wait=True) as writer:
        if not writer.exists:
            for split in SPLITS:
                for images, labels in draw_split(split, seed=0, resolution=SHAPES[name]):
                    writer.append(split, images, labels)


def verify(dataset: Dataset) -> tuple[int, int]:
    """Compare every file of the set (all splits) with its SHA-256 -> number of files, bytes.

    Raises UserError naming the first file that differs.
    """
    entries = _files(dataset.meta)
    for entry in entries:
        path = dataset.path / entry["file"]
        try:
            with open(path, "rb") as f:
                digest = hashlib.file_digest(f, "sha256").hexdigest()
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error.strerror}") from None
        if digest != entry["sha256"]:
            raise UserError(f"{path} is damaged: SHA-256 {digest}, meta.json says {entry['sha256']}")
    return len(entries), sum(entry["bytes"] for entry in entries)


def _files(meta: dict) -> list[dict]:
    parts = meta["splits"].values()
    return [entry for part in parts for entry in (*part["shards"], *filter(None, [part["labels"]]))]


def read_meta(path: Path) -> dict:
    """The content of meta.json, every field checked. Raises UserError."""

    def require(condition, what):
        if not condition:
            raise UserError(f"{path / 'meta.json'}: {what}")

    def is_int(value, low, high):
        return type(value) is int and low <= value <= high

    def is_file(entry):
        names = isinstance(entry, dict) and {"file", "bytes", "sha256"} <= entry.keys()
        return (
            names
            and isinstance(entry["file"], str) and re.fullmatch(r"\w[\w-]*\.npy", entry["file"], re.ASCII)
            and is_int(entry["bytes"], 1, 2**40)
            and isinstance(entry["sha256"], str) and re.fullmatch(r"[0-9a-f]{64}", entry["sha256"])
        )  # fmt: skip

    try:
        meta = json.loads((path / "meta.json").read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path / 'meta.json'} cannot be read: {type(error).__name__}: {error}") from None
    require(isinstance(meta, dict), "not a JSON object")
    require(meta.get("format") == FORMAT, f"format {meta.get('format')!r}, this version reads {FORMAT}")
    kind = meta.get("kind")
    require(isinstance(kind, str) and kind in DTYPES, f"kind {kind!r}, accepted: {', '.join(DTYPES)}")
    for key, high in (("channels", 4096), ("resolution", 65536)):
        require(is_int(meta.get(key), 1, high), f"{key} {meta.get(key)!r}, accepted: an integer in 1..{high}")
    if kind == "latents":
        fault = latents_fault(info := meta.get("latents"), ("offset", "scale", "mean", "std"))
        require(not fault, fault)
        channels = len(info["offset"]) * info["parts"] * info["copies"]
        require(channels == meta["channels"], "the numbers of latents do not fit channels")
    names = meta.get("class_names")
    printable = isinstance(names, list) and all(isinstance(name, str) and name.isprintable() for name in names)
    require(printable, "class_names is not a list of printable strings")
    splits = meta.get("splits")
    require(isinstance(splits, dict) and splits and set(splits) <= set(SPLITS), "splits are not among train and val")
    for split, part in splits.items():
        require(isinstance(part, dict) and is_int(part.get("num_images"), 1, 2**40), f"{split}: num_images is wrong")
        shards, labels = part.get("shards"), part.get("labels")
        require(isinstance(shards, list) and shards and all(map(is_file, shards)), f"{split}: shards are wrong")
        require(all(is_int(s.get("num_images"), 1, 2**40) for s in shards), f"{split}: num_images of a shard is wrong")
        require(sum(s["num_images"] for s in shards) == part["num_images"], f"{split}: shards do not add up")
        require(is_file(labels) if names else labels is None, f"{split}: labels do not fit class_names")
    return meta


def latents_fault(info, numbers: tuple) -> str:
    """What is wrong with a description of latents whose lists `numbers` have an entry per channel, or ""."""
    fields = dict(autoencoder=str, sha256=str, path=str, source=str, downsample=int, parts=int, copies=int)
    fields |= dict.fromkeys(numbers, list)
    if not isinstance(info, dict) or info.keys() != fields.keys():
        return f"latents are not described by {list(fields)}"
    if not all(type(info[key]) is kind for key, kind in fields.items()):
        return "a field of latents is of a wrong type"
    if not (info["parts"] in (1, 2) and info["copies"] in (1, 2) and 1 <= info["downsample"] <= 1024):
        return "parts or copies of latents are neither 1 nor 2, or downsample is not in 1..1024"
    for key in numbers:
        if not all(type(x) in (int, float) and abs(x) < 1e30 for x in info[key]):  # False for nan
            return f"{key} of latents is not a list of finite numbers"
        if (key in ("scale", "std") and min(info[key], default=0) <= 0) or len(info[key]) != len(info["offset"]):
            return f"{key} of latents has too few numbers, or one that is not positive"
    return ""


def _open_npy(folder: Path, entry: dict, dtype: np.dtype, shape: tuple) -> np.ndarray:
    """mmap a file of a set after comparing size and header with what meta.json says. Raises UserError."""
    path, header = folder / entry["file"], npy_header(dtype, shape)
    try:
        with open(path, "rb") as f:
            found, size = f.read(len(header)), os.fstat(f.fileno()).st_size
    except OSError as error:
        raise UserError(f"data set {folder.name!r}: cannot read {path}: {error.strerror}") from None
    wanted = len(header) + dtype.itemsize * math.prod(shape)
    if not size == wanted == entry["bytes"]:
        raise UserError(f"{path} has {size:,} bytes, meta.json says {entry['bytes']:,} and its shapes {wanted:,}")
    if found != header:
        raise UserError(f"{path} does not hold {dtype} of shape {shape}, as meta.json says")
    return np.asarray(np.memmap(path, dtype, "r", offset=len(header), shape=shape))
