"""Data sets on disk: written whole or not at all, read in any order through mmap.

$NANODIFF_BASE_DIR/data/<name>/
    train_images_000.npy ...   (n, C, H, W) uint8 images, fp16 arrays in [-1, 1] or latents; at most 128 MiB per file.
                               Second images, if any, add their channels after the image's
    train_labels.npy           (N,) int64; absent if the set is unlabelled
    train_vectors.npy          (N, D) or (N, L, D) fp16, a vector or a sequence per image; absent if there are none
    val_images_000.npy ...     the held-out split, if there is one
    meta.json                  what the set is, the size and SHA-256 of each file, the hash of all this; written last
    plan.json                  the settings and files it was made from, for a rerun of the same command

A set in aspect buckets has shards of several sizes (meta.json: the size of each non-square one), bucket by bucket;
`resolution` is then the side of a square of about the same area.
"""

import contextlib
import copy
import functools
import hashlib
import json
import os
import re
import shutil
import tempfile
import threading
from dataclasses import fields, replace
from pathlib import Path

import numpy as np

from configurator import nearest
from nanodiff.common import Batches, Settings, UserError, at, base_dir, get_dist, in_batches, print0
from nanodiff.conditions import FILES, NUMBERS, DataInfo, statistics, to_stored
from nanodiff.data.shapes import CLASS_NAMES, draw_split
from nanodiff.dist import from_first_rank
from nanodiff.files import lock_file, publish_folder, read_json, reading, sha256_of, write_json, writing

FORMAT = 1
SPLITS = ("train", "val")
SHAPES = {"shapes": 16, "shapes32": 32, "shapes64": 64}  # embedded sets: name -> resolution
MAX_SHARD_BYTES = 2**27
MAX_MAPPED = 100  # shards of a split at a time; each is an open file, of which macOS allows 256


def data_dir() -> Path:
    return base_dir().absolute() / "data"


def is_set(folder: Path) -> bool:
    return os.path.isfile(folder / "meta.json")  # False for overlong names


# ---------------------------------------------------------------------------------------------------------------------
# Reading


class Dataset:
    """One split of a set. open_dataset makes it, and opens the same set again by `.name`. `data`: what its model keeps.

    `buckets`: (H, W) -> range of indices; one for a set of one size. `sha256`: hash of the split's entry in meta.json.
    """

    def __init__(self, path: Path, split: str):
        self.path = path
        self.split = split
        self.name = path.name if path.parent == data_dir() else str(path)
        meta = self.meta = read_json(path / "meta.json")
        # Check what is cheap; map labels and vectors now, shards on first use
        with reading(path / "meta.json"):
            if meta["format"] != FORMAT:
                raise UserError(f"{path} is in format {meta['format']}; this version reads format {FORMAT}")
            digest = meta.pop("sha256", None)  # sets of earlier versions have none
            if digest not in (None, json_hash(meta)):
                raise UserError(f"{path}/meta.json is damaged or was edited: its SHA-256 is not that in it")
            self.class_names = meta["class_names"]
            self.num_classes = len(self.class_names)
            self.channels = meta["channels"]
            self.resolution = meta["resolution"]
            self._square = self.resolution, self.resolution
            if split not in meta["splits"]:
                raise UserError(
                    f"data set {path.name!r} has no split {split!r}, only {', '.join(meta['splits'])}; "
                    "a set made with --val_fraction=0.05 has val"
                )
            part = meta["splits"][split]
            self.sha256 = json_hash(part)
            self.identity = f"{self.name}, {split}, SHA-256 {self.sha256}"  # in protocols
            self._shards = part["shards"]
            counts = [entry["num_images"] for entry in self._shards]
            self._ends = np.cumsum(counts)  # (shards,) the index after the last image of each
            self.buckets = {}  # shards of one size follow each other
            for entry, end in zip(self._shards, self._ends.tolist()):
                size = tuple(entry.get("size", self._square))
                start = end - entry["num_images"]
                if size in self.buckets:
                    start = self.buckets[size].start
                self.buckets[size] = range(start, end)
            self.states = {}  # of the files now
            for entry in files_of(part):
                file = path / entry["file"]
                self.states[file] = file_state(file)
                size = self.states[file][1]
                if size != entry["bytes"]:
                    raise UserError(
                        f"{file} is damaged or truncated: it has {size:,} bytes, meta.json says {entry['bytes']:,}"
                    )
            self._shard = functools.lru_cache(MAX_MAPPED)(self._open_shard)
            self._rows = {"y": np.broadcast_to(np.int64(0), len(self))}  # if it is unlabelled
            for name, key in FILES.items():
                if name in meta or part.get(key):
                    self._rows[name] = open_npy(path / part[key]["file"], len(self))
            labels = self._rows["y"]
            if labels.min() < 0 or labels.max() >= max(1, self.num_classes):
                raise UserError(f"{path} is damaged: labels beyond 0..{self.num_classes - 1}")
            self.data = self._info()

    def _info(self) -> DataInfo:
        meta = self.meta
        values = {field.name: meta[field.name] for field in fields(DataInfo) if field.name in meta}
        for name, (dim, length) in NUMBERS.items():
            if name in meta:
                numbers = dict(meta[name])
                values[dim] = numbers.pop("dim")
                values[length] = numbers.pop("len")
                values[name] = numbers  # mean, std
        if list(self.buckets) != [self._square]:
            values["sizes"] = [[*size, len(bucket)] for size, bucket in self.buckets.items()]
        return DataInfo(
            **values,
            name=self.name,
            num_classes=self.num_classes,
            sha256=self.sha256,
            val_sha256=json_hash(meta["splits"].get("val")),
        )

    def _open_shard(self, k: int) -> np.ndarray:
        entry = self._shards[k]
        file = self.path / entry["file"]
        channels = self.channels + self.data.given_channels
        shard = open_npy(file, entry["num_images"], channels, *entry.get("size", self._square))
        self.check_unchanged(file)
        return shard

    def check_unchanged(self, file: Path) -> None:
        if file_state(file) != self.states[file]:
            raise UserError(f"{file} was changed while it was in use")

    def __len__(self) -> int:
        return int(self._ends[-1])

    def spread(self, num_images: int) -> np.ndarray:
        """Indices of images spread evenly over the set, which may be in the order of classes or of buckets."""
        return np.arange(num_images) * len(self) // num_images

    def batches(self, indices: np.ndarray, batch_size: int) -> Batches:
        """Ascending indices in batches, each of one bucket."""
        ends = [bucket.stop for bucket in self.buckets.values()]
        cuts = np.searchsorted(indices, ends)
        batches = []
        for part in filter(len, np.split(indices, cuts[:-1])):
            batches += in_batches(part, batch_size)
        return batches

    def rows(self, indices):
        """Indices (n,) of one bucket, n > 0, in any order -> images (n, C, H, W) uint8 or fp16, and their conditions;
        second images among them, "given" (n, C, H, W)."""
        indices = np.asarray(indices, np.int64)
        shard_of = np.searchsorted(self._ends, indices, side="right")  # (n,)
        # Shard by shard, counted from a shard's end and so negative; then in the order asked for
        parts = [self._shard(k)[indices[shard_of == k] - self._ends[k]] for k in np.unique(shard_of)]
        images = np.concatenate(parts)[np.argsort(np.argsort(shard_of, kind="stable"))]
        cond = self.cond(indices)
        if "given_channels" in self.meta:
            cond["given"] = images[:, self.channels :]
        return images[:, : self.channels], cond

    def images(self, indices) -> np.ndarray:
        return self.rows(indices)[0]

    def cond(self, indices) -> dict[str, np.ndarray]:
        """Rows (n, ...) of all conditions except second images, as stored (see conditions.py): "y" (n,) int64, ..."""
        return {name: rows[indices] for name, rows in self._rows.items()}

    def labels(self, indices) -> np.ndarray:
        """(n,) integers -> (n,) int64; zeros if the set is unlabelled."""
        return self._rows["y"][indices]

    def relabelled(self, numbers: list[int]) -> "Dataset":
        """The same images with numbers[k] for label k."""
        dataset = copy.copy(self)
        dataset._rows = self._rows | {"y": np.array(numbers)[self._rows["y"]]}
        return dataset

    def seen_by(self, model_names: list[str]) -> "Dataset":
        """The same images with the numbers of a model's classes, matched by name or by order (same_order). Classes new
        to the model follow its own; unlabelled images get its null class."""
        set_names = self.class_names
        if same_order(set_names, model_names):
            set_names = model_names
        names = list(dict.fromkeys(model_names + set_names))
        numbers = [names.index(name) for name in set_names]
        dataset = self.relabelled(numbers or [len(model_names)])
        dataset.class_names = names
        dataset.num_classes = len(names)
        dataset.data = replace(self.data, class_names=names, num_classes=len(names))
        return dataset


def match_labels(names: list[str], vocabulary: list[str], subject: str) -> list[int]:
    """Map class names to the model's class numbers: by name if all are in `vocabulary`, or by order (see same_order).

    `subject`: how the error message begins.
    """
    if set(names) <= set(vocabulary):
        return [vocabulary.index(name) for name in names]
    if same_order(names, vocabulary):
        return list(range(len(names)))
    unknown = next(name for name in names if name not in vocabulary)
    raise UserError(
        f"{subject}: {unknown!r} of the {len(names)} classes here is not among the {len(vocabulary)} classes there; "
        f"accepted: classes called {', '.join(vocabulary[:5])}, ..."
    )


def same_order(names: list[str], vocabulary: list[str]) -> bool:
    """Are there as many classes, and does one side call them "0", "1", ...? If so, a line says what was matched."""
    numbers = [*map(str, range(len(names)))]
    fits = len(names) == len(vocabulary) and numbers in (names, vocabulary)
    if fits and names != vocabulary:
        print0(f"note: classes match by order: {names[0]} = {vocabulary[0]}, ...")
    return fits


def open_dataset(
    name_or_path: str | Path,
    split: str = "train",
    source_data: DataInfo | None = None,
) -> Dataset:
    """Open a split of a set: a name in $NANODIFF_BASE_DIR/data, a folder, or an embedded set, drawn on first use.

    `source_data`: of a model, whose class numbers the set then has (Dataset.seen_by).
    """
    name = str(name_or_path)
    path = at(name).absolute()
    if not name or not is_set(path):
        path = data_dir() / name
    if name in SHAPES and not is_set(path):
        make_shapes(name)
    if not is_set(path):
        names = [file.parent.name for file in data_dir().glob("[!.]*/meta.json")]
        raise UserError(
            f"no data set {name!r}; nearest in {data_dir()}: {nearest(name, names)}; "
            f"drawn on first use: {', '.join(SHAPES)}; "
            "prepare another with `python3 -m scripts.prepare_data --path=... --name=...`, "
            "cifar10 with --source=cifar10 --name=cifar10"
        )
    dataset = Dataset(path, split)
    return dataset.seen_by(source_data.class_names) if source_data else dataset


def make_shapes(name: str) -> None:
    """Draw an embedded set, or wait for the process that is drawing it."""
    with lock_file(data_dir() / f".{name}.drawn.lock", "", wait=True):
        if is_set(data_dir() / name):
            return
        with DatasetWriter(name, CLASS_NAMES) as writer:
            for split in SPLITS:
                blocks = zip(*draw_split(split, seed=0, resolution=SHAPES[name]))
                images, labels = map(np.concatenate, blocks)
                writer.append(split, images, y=labels)


def files_of(part: dict) -> list[dict]:
    """The entries in meta.json of a split's files."""
    return part["shards"] + [part[key] for key in FILES.values() if part.get(key)]


def json_hash(value) -> str:
    text = json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def file_state(path: Path) -> tuple[int, int, int]:
    """What changes when a file is replaced or written: its inode, size and time."""
    with reading(path):
        stat = path.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


@functools.cache
def file_hash(path: Path, state: tuple) -> str:
    """The SHA-256 of a file, computed once per `state`: a command may verify a large set in several places."""
    with reading(path):
        return sha256_of(path)


def check_file(folder: Path, entry: dict) -> None:
    """Compare a file with its entry, of meta.json or of a note."""
    path = folder / entry["file"]
    digest = file_hash(path, file_state(path))
    if digest != entry["sha256"]:
        raise UserError(f"{path} is damaged: its SHA-256 is {digest}, wanted {entry['sha256']}")


def verify(dataset: Dataset, splits=SPLITS) -> tuple[int, int]:
    """Compare the files of these splits with their SHA-256 -> number of files, bytes."""
    entries = []
    for split, part in dataset.meta["splits"].items():
        if split in splits:
            entries += files_of(part)
    for entry in entries:
        check_file(dataset.path, entry)
    return len(entries), sum(entry["bytes"] for entry in entries)


def start_verifying(dataset: Dataset) -> list[Exception]:
    """A collective: check that all ranks have the same set, then verify it in a thread while training begins. Errors
    are appended to the returned list."""
    faults = []
    splits = dataset.meta["splits"]
    if from_first_rank(splits, "the hashes of the data") != splits:
        rank, _, world = get_dist()
        raise UserError(f"rank {rank} of {world}: its set {dataset.name!r}, in {dataset.path}, differs from rank 0's")

    def work():
        try:
            verify(dataset)
        except (UserError, OSError) as error:
            faults.append(error)

    threading.Thread(target=work, daemon=True, name="verifier").start()
    return faults


def check_unchanged(*splits: Dataset | None) -> None:
    """Raise UserError if a file was written or replaced since its split was opened."""
    for split in filter(None, splits):
        for file in split.states:
            split.check_unchanged(file)


def open_npy(path: Path, *shape: int) -> np.ndarray:
    """The array in a file, mapped into memory; UserError unless its shape begins with `shape`."""
    with reading(path):
        array = np.asarray(np.load(path, mmap_mode="r"))
        if array.shape[: len(shape)] != shape:
            raise UserError(f"{path} is damaged: its shape is {array.shape}, meta.json says {shape}")
        return array


# ---------------------------------------------------------------------------------------------------------------------
# Writing


def write_npy(path: Path, array: np.ndarray) -> dict:
    """Write an array as an .npy file, whole or not at all -> its entry in meta.json."""
    array = np.ascontiguousarray(array)
    manifest = {}
    with writing(path, manifest) as file:  # hashed on the way: numpy's writing to a plain file names no cause when full
        np.save(file, array)
    facts = manifest[path.name]
    entry = {
        "file": path.name,
        "num_images": len(array),
        "bytes": facts["size"],
        "sha256": facts["sha256"],
    }
    if len(set(array.shape[2:])) == 2:  # an image that is not square
        entry["size"] = array.shape[2:]
    return entry


class DatasetWriter:
    """`with DatasetWriter(name, class_names, ...) as writer: writer.append("train", images, y=labels)`.

    Writes to a hidden folder, renamed when the block ends, removed when it raises. `.meta` may be changed, before the
    first images in what they depend on: class_names ([] = unlabelled), resolution (0 = the images'), given_channels and
    given_scaling of second images (whose channels follow the images').

    Refuses to replace a set without `overwrite`, or a folder that is not a set.
    """

    def __init__(self, name, class_names=(), overwrite=False):
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,99}", name):
            raise UserError(f"name={name!r} cannot name a data set; accepted: letters, digits and _ . + - (no /)")
        self.path = data_dir() / name
        self.parts = data_dir() / f".{name}.parts"  # see resume
        self.overwrite = overwrite
        self.meta = {
            "format": FORMAT,
            "kind": "images",
            "resolution": 0,
            "class_names": list(class_names),
            "splits": {},
        }
        # Per shard written: (its entry in meta.json, {name of a condition: (n, ...) as stored})
        self._parts = {split: [] for split in SPLITS}

    def __enter__(self):
        path = self.path
        busy = f"data set {path.name!r} is being prepared by another process"
        tmp = f".{path.name}.tmp-"
        self._lock = lock_file(path.parent / f".{path.name}.lock", busy, leftovers=(tmp + 8 * "[a-z0-9_]",))
        state = "no data set" if path.exists() else ""
        if is_set(path):
            state = "" if self.overwrite else "complete (--overwrite replaces it)"
        if state:
            self._lock.close()
            raise UserError(f"{path} exists already and is {state}; choose another --name")
        self.folder = Path(tempfile.mkdtemp(dir=path.parent, prefix=tmp))
        return self

    def resume(self, plan: Settings) -> None:
        """Write to the folder `parts`, where a note marks each finished part. Finished parts survive a kill or an
        error. Those of another plan, which stays in the set as plan.json, are removed."""
        shutil.rmtree(self.folder)
        self.folder = folder = self.parts
        plan_file = folder / "plan.json"
        has_this_plan = False
        with contextlib.suppress(UserError):  # there is none, or it is damaged
            has_this_plan = read_json(plan_file) == plan
        if folder.exists() and not has_this_plan:
            print0(f"{folder} was begun with other images or settings; starting again")
            shutil.rmtree(folder)
        os.makedirs(folder / "notes", exist_ok=True)
        write_json(plan_file, plan)

    def append(self, split: str, images: np.ndarray, **cond) -> None:
        """Write (n, C, H, W) images, n > 0, of one bucket, and n rows of each condition: labels y (n,)
        below len(class_names), vectors (n, D) or (n, L, D). A condition is given for all images or for none."""
        per_shard = max(1, (MAX_SHARD_BYTES - 128) // images[0].nbytes)  # without the header
        for ids in in_batches(np.arange(len(images)), per_shard):
            number = len(self._parts[split])
            shard = write_npy(self.folder / f"{split}_images_{number:03d}.npy", images[ids])
            self.add(split, shard, **{name: np.asarray(x)[ids] for name, x in cond.items()})

    def add(self, split: str, shard: dict, **cond) -> None:
        """Add a shard that is in the folder, by its entry in meta.json, and the conditions of its images."""
        if not self.meta["class_names"]:
            cond.pop("y", None)
        rows = {name: to_stored(name, x) for name, x in cond.items()}
        self._parts[split].append((shard, rows))

    def _finish(self) -> None:
        def tallness(part):
            height, width = part[0].get("size", (1, 1))
            return height / width

        if not self._parts["train"]:
            raise UserError(f"data set {self.path.name!r} would hold no image to train on")
        meta = self.meta
        first, _ = self._parts["train"][0]
        _, channels, height, _ = open_npy(self.folder / first["file"]).shape
        meta["channels"] = channels - meta.get("given_channels", 0)
        meta["resolution"] = meta["resolution"] or height
        for split, parts in self._parts.items():
            if not parts:
                continue
            shards, conditions = zip(*sorted(parts, key=tallness, reverse=True))
            entry = {
                "num_images": sum(shard["num_images"] for shard in shards),
                "labels": None,
                "shards": shards,
            }
            for name in conditions[0]:
                rows = [cond[name] for cond in conditions]
                file = self.folder / f"{split}_{FILES[name]}.npy"
                entry[FILES[name]] = write_npy(file, np.concatenate(rows))
                if split == "train" and name in NUMBERS and name not in meta:  # latents copy their image set's
                    meta[name] = statistics(rows)
            meta["splits"][split] = entry
        write_json(self.folder / "meta.json", meta | {"sha256": json_hash(meta)})
        publish_folder(self.folder, self.path)
        shutil.rmtree(self.path / "notes", ignore_errors=True)  # only now, so that a kill before loses nothing

    def __exit__(self, kind, error, traceback):
        try:
            if kind is None:
                self._finish()
        finally:
            if not any(self.folder.glob("notes/*[0-9].json")):
                shutil.rmtree(self.folder, ignore_errors=True)
            else:
                print0(f"finished parts are kept in {self.folder}, for the same command again")
            self._lock.close()
