"""Image sources: image files, CIFAR-10, IDX, .npz and .npy; their vectors and second images."""

import functools
import glob
import gzip
import hashlib
import itertools
import os
import re
import zipfile
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from posixpath import basename, dirname, relpath, splitext
from types import SimpleNamespace

import numpy as np

from nanodiff.common import UserError, at, base_dir, print0
from nanodiff.conditions import to_stored
from nanodiff.data import shapes
from nanodiff.files import download, reading, writing
from nanodiff.prepare.buckets import choose_sizes
from nanodiff.prepare.containers import (
    CONTAINERS,
    SUFFIXES,
    TAR_SUFFIXES,
    cleaned,
    is_image,
    key_of,
    open_folder,
    read_tar,
)
from nanodiff.prepare.decode import Item, aspect_ratio, decode_second, import_pillow
from nanodiff.prepare.labels import Place, classify, find_table, print_places, samples, val_mask

CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
CIFAR10_SHA256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
CIFAR10_BYTES = 170_052_171
CIFAR10_CLASSES = "airplane automobile bird cat deer dog frog horse ship truck".split()
CIFAR10_BATCHES = [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]
IDX_IMAGES = "*images?idx3*"  # as MNIST and EMNIST call them: train-images-idx3-ubyte, perhaps .gz


class Options(SimpleNamespace):
    """Settings of scripts/prepare_data.py that the sources read; those not given have these defaults."""

    resolution = 0
    labels = "auto"
    file_column = ""  # column of tables; "" = the usual
    label_column = ""  # column of tables and of .json beside images; "" = the usual
    caption_column = ""
    captions = ""  # file to write them to
    val_fraction = 0.0
    seed = 0
    aspect_buckets = False
    side_unit = 0  # sides of buckets are multiples of this; 0 = resolution / 8
    range = None  # (LOW, HIGH): values beyond 8 bits that become -1 and 1; None = an array's own


@dataclass
class Source:
    """Images to prepare."""

    num_images: int
    class_names: list[str]  # [] = unlabelled
    items: Iterator[Item]
    unread: Callable[[], Iterator[Item]] | None = None  # items of image files, without their content
    files: list[str | Path] = field(default_factory=list)  # the images and their tables are read from these
    sizes: list[tuple[int, int]] = field(default_factory=list)  # (H, W) of the set, one or buckets; [] = the images'
    arrays: dict[str, np.ndarray] = field(default_factory=dict)  # name of a condition -> (rows, ...)
    meta: dict = field(default_factory=dict)  # for meta.json, about second images and arrays beyond 8 bits
    unreadable: list[str] = field(default_factory=list)  # files beside images, with reasons
    look: tuple = ()  # range, scaling and background of images


def detect(path: Path) -> str:
    if path.is_dir():
        return "idx" if any(path.glob(IDX_IMAGES)) else "folder"
    if path.name == basename(CIFAR10_URL):
        return "cifar10"
    kind = path.suffix[1:].lower()
    if kind in ("npz", "npy", "zip"):
        return kind
    if path.name.lower().endswith(TAR_SUFFIXES):
        return "tar"
    if "idx" in path.name:
        return "idx"
    raise UserError(f"cannot tell what {path} is; unpack it first, or give --source=..., one of: {', '.join(SOURCES)}")


def open_source(source: str, path: str, options: Options) -> Source:
    """The images of a source, one of SOURCES or "auto"."""
    file = at(path)
    if source == "cifar10" and not path:
        file = base_dir() / "downloads" / basename(CIFAR10_URL)
        if not file.is_file():
            download(CIFAR10_URL, file, CIFAR10_BYTES, CIFAR10_SHA256, "give --path=... of a copy of it")
    elif source != "shapes" and not (path and (file.exists() or glob.glob(str(file)))):
        raise UserError(
            f"there is no path={path!r} on this machine; accepted: a file, a folder, or a pattern of tars with * "
            "or ?, as 'web/*.tar' for web/{000..123}.tar; only --source=shapes and cifar10 need none"
        )
    if source == "auto":
        source = detect(file)
    if source in CONTAINERS:
        result = read_images(file, source, options)
    else:
        for setting in "aspect_buckets labels file_column label_column caption_column captions".split():
            value = getattr(options, setting)
            if value not in (0, "", "auto", "none"):
                raise UserError(
                    f"{setting}={value!r} is for image files, not source={source!r}; labels accepted: auto, none"
                )
        result = READERS[source](file, options)
        if path:
            result.files = [file, *sorted(file.glob("*"))]
    result.files.append(at(options.labels))
    if options.labels == "none":
        result.class_names = []
    if options.range and "range" not in result.meta:
        raise UserError(f"range={options.range!r} is for arrays and gray images beyond 8 bits")
    if options.resolution and not result.sizes:
        result.sizes = [(options.resolution, options.resolution)]
    return result


def state_of(files: list[str | Path]) -> str:
    """A hash of the names, sizes and times of the files that exist."""
    digest = hashlib.sha256()
    for file in files:
        if os.path.exists(file):  # else a link to nowhere
            stat = os.stat(file)
            digest.update(os.fsencode(f"{file} {stat.st_size} {stat.st_mtime_ns}\n"))
    return digest.hexdigest()


def read_images(path: Path, kind: str, options: Options) -> Source:
    """The images of one of CONTAINERS: listed first, keeping a few bytes of each, then read once."""
    import_pillow()
    print0(f"listing the files in {path}")
    files, streams = CONTAINERS[kind](path)
    table = find_table(streams, options)
    facts_of = table or {}
    unknown = set(facts_of)
    extras = Counter()
    unreadable = set()
    read = functools.partial(samples, streams, facts_of, options, extras, unreadable)
    places = {}
    place_of = []  # of each image
    num_captions = num_beside = 0
    sample_before = ""
    ratios = array("d")
    content_suffixes = SUFFIXES if options.aspect_buckets else ()  # files whose content is read
    for name, payload, (label, caption, split) in read(content_suffixes):
        if options.labels == "file":
            start, *parts = re.split("[_.]", splitext(basename(name))[0])
            label = start if parts else ""
        key = (split, *dirname(name).split("/")), label
        place = places.setdefault(key, Place(*key, name))
        place.count += 1
        place_of.append(place)
        unknown -= {name, splitext(name)[0]}
        num_captions += bool(caption)
        sample = key_of(name).removesuffix("_mask")
        num_beside += sample == sample_before
        sample_before = sample
        if options.aspect_buckets:
            ratios.append(aspect_ratio(payload))
    if extras := +extras:  # without counts of 0
        print0("ignored: " + ", ".join(f"{number:,} {suffix}" for suffix, number in extras.most_common(20)))
    if not places:
        raise UserError(f"no images in {path}; looked for {', '.join(SUFFIXES)}")
    places = list(places.values())
    if unknown:
        print0(
            f"{path} has no file for {len(unknown):,} of the table's rows, such as {min(unknown)!r}; it has {name!r}"
        )
    if num_beside:  # 1.input.png, 1.mask.png; or 1.png, 1_mask.png
        print0(
            f"note: {num_beside:,} images share another's name up to a dot or _mask; --pairs takes second "
            "images, --labels=file the names' starts as classes"
        )
    if num_captions:
        print0(f"captions: {num_captions:,} of {len(place_of):,} images have one")
    needs = {
        "file_column": table,
        "label_column": any(place.label for place in places),
        "caption_column": num_captions,
        "captions": num_captions,
    }
    for setting, evidence in needs.items():
        value = getattr(options, setting)
        if value and not evidence:
            raise UserError(f"{setting}={value!r}: {path} has none in a table or beside an image")
    class_names = classify(places, options.labels, table and min(unknown or table))
    print_places(places)
    is_used = [place.split is not None for place in place_of]
    used = [*itertools.compress(place_of, is_used)]
    held_out = [place.split == "val" for place in used]
    if not any(held_out):
        held_out = val_mask([place.number for place in used], options.val_fraction, options.seed)
    sizes = []
    if options.aspect_buckets:
        ratios = [x for x in itertools.compress(ratios, is_used) if x > 0]  # NaN: unreadable
        unit = options.side_unit or options.resolution // 8
        sizes = choose_sizes(np.array(ratios), options.resolution, unit)

    def items(suffixes=()):
        images = itertools.compress(read(suffixes), is_used)
        for (name, payload, (_, caption, _)), place, is_val in zip(images, used, held_out):
            yield Item(name, payload, place.number, is_val, caption=caption)

    if options.captions:
        captions = at(options.captions)
        if captions.is_file():
            print0(f"captions: {captions} is there already and stays as it is")
        else:
            with writing(captions) as file:
                names = []
                for item in items():
                    names.append(item.name)
                    file.write(f"{item.name}\t{item.caption}\n".encode(errors="replace"))
                check_different(names, "captions")
    meta = {"kind": "arrays", "dtype": "float32", "range": options.range} if options.range else {}
    return Source(
        len(used), class_names, items(SUFFIXES), items, files, sizes, meta=meta, unreadable=sorted(unreadable)
    )


def array_source(blocks: Iterable, num_images: int, class_names: list[str], options: Options) -> Source:
    """A Source of blocks: (split, images (n, H, W) or (n, H, W, C), classes (n,) or None). A share of split "" is held
    out. Classes are places in `class_names` or, if these are numbers, such numbers."""
    numbers = {name: number for number, name in enumerate(class_names)}

    def items():
        places = itertools.count()
        for split, images, labels in blocks:
            if labels is None:
                labels = np.zeros(num_images, int)
            held_out = itertools.repeat(split == "val")
            if not split:
                held_out = val_mask(labels, options.val_fraction, options.seed)
            for image, label, is_val, i in zip(images, labels, held_out, places):
                yield Item(f"image {i}", np.atleast_3d(image), numbers.get(str(label), int(label)), is_val)

    return Source(num_images, class_names, items())


def read_shapes(path: Path, options: Options) -> Source:
    def blocks():
        for split in shapes.NUM_IMAGES:
            for images, labels in shapes.draw_split(split, options.seed, options.resolution or 16):
                yield split, images.transpose(0, 2, 3, 1), labels

    return array_source(blocks(), sum(shapes.NUM_IMAGES.values()), shapes.CLASS_NAMES, options)


def read_cifar10(path: Path, options: Options) -> Source:
    """The binary version's tar: records of 1 label byte and 3x32x32 image bytes."""

    def blocks():
        batches = set(CIFAR10_BATCHES)
        for member, data in read_tar(tuple(CIFAR10_BATCHES), path):
            name = basename(member)
            if name in batches:
                batches.remove(name)
                with reading(path):
                    records = np.frombuffer(data, np.uint8).reshape(-1, 3073)
                images = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
                split = "val" if name == "test_batch.bin" else "train"
                yield split, images, records[:, 0]
        if batches:
            raise UserError(f"{path} lacks {', '.join(sorted(batches))}; wanted: CIFAR-10's binary version")

    return array_source(blocks(), 60_000, CIFAR10_CLASSES, options)


def class_numbers(labels: np.ndarray | None) -> list[str]:
    """The class numbers that occur, as names."""
    if labels is None:
        return []
    numbers = np.unique(labels)
    if numbers[-1] >= len(numbers):
        print0(f"{len(numbers):,} class numbers from {numbers[0]} to {numbers[-1]} have images: others are no classes")
    return [*map(str, numbers)]


def open_idx(path: Path, dims: int) -> np.ndarray:
    """The array in an IDX file of bytes, gzipped or not."""
    with reading(path), open(path, "rb") as file:
        if file.peek(2)[:2] == b"\x1f\x8b":
            file = gzip.open(file)
        magic = file.read(4)
        if magic != bytes([0, 0, 8, dims]):
            raise UserError(f"{path} starts with {magic.hex()}, wanted 000008{dims:02d}: IDX, bytes, {dims} dimensions")
        shape = np.frombuffer(file.read(4 * dims), ">u4")
        return np.frombuffer(file.read(int(shape.prod()) + 1), np.uint8).reshape(shape)


def read_idx(path: Path, options: Options) -> Source:
    """A file of images, or a folder with train-images and t10k-images; optionally with label files beside them."""
    paths = [path]
    if path.is_dir():
        paths = sorted(filter(Path.is_file, path.glob(IDX_IMAGES)), reverse=True)  # train before t10k or test
    files = {file.name.removesuffix(".gz"): file for file in paths}  # torchvision leaves both
    splits = ["train" if "train" in name else "val" for name in files]
    if not files or len({*splits}) < len(files):
        raise UserError(
            f"{path} has the IDX files {[*files]}; "
            "accepted: train-images-idx3-ubyte and t10k-images-idx3-ubyte, or --path=FILE"
        )
    images = []
    labels = []
    for name, file in files.items():
        images.append(open_idx(file, 3))
        label_name = name.replace("images", "labels").replace("idx3", "idx1")
        label_file = next(file.parent.glob(f"{label_name}*"), file)
        if label_file != file:
            labels.append(open_idx(label_file, 1))
    counts = [*map(len, images)]
    num_labels = [*map(len, labels)]
    if labels and num_labels != counts:
        raise UserError(f"{path} has {num_labels} labels for {counts} images")
    class_names = class_numbers(np.concatenate(labels) if labels else None)
    if len(files) == 1:
        splits = [""]
    blocks = zip(splits, images, labels or [None] * len(files))
    return array_source(blocks, sum(counts), class_names, options)


def load_arrays(path: Path, name: str) -> Mapping[str, np.ndarray]:
    """The arrays of an .npz, each read whole; or the one in an .npy, as `name`, read as it is used."""
    file = np.load(path, mmap_mode="r")
    if isinstance(file, np.ndarray):
        return {name: file}
    if any(info.compress_type > zipfile.ZIP_DEFLATED for info in file.zip.infolist()):  # unpacked without a limit
        raise UserError(f"{path} is packed by bzip2 or LZMA; accepted: np.savez or np.savez_compressed")
    return file


def open_arrays(path: Path) -> tuple[np.ndarray, np.ndarray | None, str]:
    """Images (N, H, W) or (N, H, W, C) of any numbers in an .npy, or in `arr_0` of an .npz; class numbers (N,) int64 or
    None; protocol.

    An .npz may have class numbers in `labels` or, as ADM's, in `arr_1`; and scripts/sample.py's `protocol`."""
    with reading(path, "is damaged or truncated, or holds no numbers"):
        file = load_arrays(path, "arr_0")
        if "arr_0" not in file:
            raise UserError(f"{path} has the arrays {', '.join(file)}; accepted: arr_0 and labels")
        images = file["arr_0"]
        labels = file.get("labels", file.get("arr_1"))
        if not np.array_equal(file.get("arr_1", labels), labels):
            print0(f"note: {path}: arr_1 ignored; classes are in labels")
        protocol = str(file.get("protocol", ""))
        if unused := {*file} - {"arr_0", "labels", "arr_1", "protocol"}:
            print0(f"note: {path}: {', '.join(sorted(unused))} ignored; classes are in labels or arr_1")
    shape = images.shape
    height, width, channels = (*shape, 0, 0, 0, 0)[1:4]
    is_picture = images.ndim == 3 and width < 5 <= height  # one, (H, W, C)
    is_channels_first = images.ndim == 4 and (min(height, width) < 5 <= channels or height < width == channels)
    is_odd = is_picture or is_channels_first or images.ndim not in (3, 4)
    if is_odd or images.dtype.kind not in "uif" or not images.size:
        raise UserError(
            f"{path} holds {images.dtype} of shape {shape}; accepted: numbers of shape (N, H, W) or (N, H, W, C), N > 0"
        )
    if labels is not None:
        if labels.shape != shape[:1] or labels.dtype.kind not in "iu" or labels.min() < 0:
            raise UserError(
                f"{path} has labels {labels.dtype} of shape {labels.shape}; "
                f"accepted: class numbers 0, 1, ... of shape {shape[:1]}"
            )
        labels = labels.astype(np.int64)
    return images, labels, protocol


def read_arrays(path: Path, options: Options) -> Source:
    """uint8 arrays; or other numbers, and in meta their range."""
    images, labels, _ = open_arrays(path)
    source = array_source([("", images, labels)], len(images), class_numbers(labels), options)
    if images.dtype == np.uint8:
        return source
    least = float(images.min())  # NaN if there is one
    most = float(images.max())
    low, high = options.range or (least, most)
    if not (0 < high - low < np.inf and low <= most and least <= high):
        raise UserError(
            f"{path} holds values from {least:g} to {most:g}; accepted: finite ones, some within a range LOW < HIGH"
        )
    source.meta = {"kind": "arrays", "dtype": str(images.dtype), "range": (low, high)}
    return source


# ---------------------------------------------------------------------------------------------------------------------
# Vectors and other NUMBERS of conditions.py


def read_numbers(name: str, path: Path) -> tuple[list[str], np.ndarray]:
    """Names of images (or []), and per image a row, (N, D), or a sequence padded with zeros, (N, L, D)."""
    with reading(path, f"holds no {name}; accepted: an .npz with arrays names and {name}, or an .npy"):
        file = load_arrays(path, name)
        rows = file[name]
        names = [cleaned(str(image)) for image in file.get("names", [])]
    if rows.dtype.kind != "f" or rows.ndim not in (2, 3):
        raise UserError(
            f"{name}={str(path)!r} holds {rows.dtype} of shape {rows.shape}; "
            "accepted: floats of shape (N, D) or (N, L, D)"
        )
    return names, rows


def add_numbers(source: Source, name: str, location: str) -> None:
    """Give each item its row of the numbers in a file."""
    path = at(location)
    names, array = read_numbers(name, path)
    if not array.any():
        raise UserError(f"{name}={str(path)!r} holds nothing but zeros")
    stored = to_stored(name, array)
    if array.ndim == 2:
        spread = np.ptp(array, axis=0)
        lost = abs(stored - array).max(0)
        if ((spread > 0) & (spread < 10 * lost)).any():
            raise UserError(f"{name}={str(path)!r}: fp16 loses differences; subtract means, divide by deviations")
    source.files.append(path)
    source.arrays[name] = array
    rows = matched(source, names, len(array), name, path)
    source.items = (item._replace(rows=item.rows | {name: row}) for item, row in rows)


def check_different(names: list[str], title: str) -> None:
    if len(set(names)) < len(names):
        raise UserError(f"{title}: several of the images have one name, such as two tars' 000.png")


def matched(source: Source, names: list, num_rows: int, setting: str, path: Path) -> Iterator:
    """Each item and its row: by its name, with or without suffix, or for arrays by its position."""
    title = f"{setting}={str(path)!r}"
    rows = range(num_rows)
    if source.unread:
        row_of = {name: row for row, name in enumerate(names)}
        if len(row_of) != num_rows:
            raise UserError(
                f"{title} has {len(row_of):,} different names for {num_rows:,} {setting}; image files need one each"
            )
        images = [item.name for item in source.unread()]
        check_different(images, title)
        rows = [row_of.get(name, row_of.get(splitext(name)[0])) for name in images]
        absent = [name for name, row in zip(images, rows) if row is None]
        if absent:
            raise UserError(f"{title} has none for {len(absent):,} of {len(images):,} images, such as {absent[0]!r}")
        unused = {*range(num_rows)}.difference(rows)
        if unused:
            print0(f"{title}: {len(unused):,} {setting} belong to no image, such as {names[min(unused)]!r}")
    elif names or num_rows != source.num_images:
        raise UserError(
            f"{title} has {num_rows:,} {setting}, {len(names):,} names; accepted: {source.num_images:,}, in the order "
            "of the images, and no names"
        )
    return zip(source.items, rows)


# ---------------------------------------------------------------------------------------------------------------------
# Second images


def add_pairs(source: Source, location: str, scaling: str) -> None:
    """Give each item its second image: from a folder, the file with its path except the suffix; for arrays, a row.

    `scaling`: nearest or area."""
    path = at(location)
    if source.unread and path.is_dir():
        files, _ = open_folder(path)
        seconds = [file for file in files if is_image(relpath(file, path))]
        names = [cleaned(splitext(relpath(file, path))[0]) for file in seconds]
    elif not source.unread and path.suffix in (".npy", ".npz"):
        files = [path]
        names = []
        seconds, _, _ = open_arrays(path)
        if seconds.dtype != np.uint8:
            raise UserError(f"pairs={str(path)!r} holds {seconds.dtype}; accepted: uint8")
    else:
        raise UserError(f"pairs={str(path)!r}; accepted: for image files a folder, for arrays an .npy or .npz")
    rows = matched(source, names, len(seconds), "pairs", path)
    with reading(path, "begins with a second image that cannot be read"):
        channels = len(decode_second(seconds[0], scaling, 0, 1, 1))
    source.files += files
    source.meta |= {"given_channels": channels, "given_scaling": scaling}
    source.items = (item._replace(second=(seconds[row], scaling, channels)) for item, row in rows)


# A new source is one such function and its entry here
READERS = {
    "shapes": read_shapes,
    "cifar10": read_cifar10,
    "idx": read_idx,
    "npz": read_arrays,
    "npy": read_arrays,
}
SOURCES = (*READERS, *CONTAINERS)
