"""Image sources: detection by path, CIFAR-10's download, readers of arrays (CIFAR-10, IDX, .npz)."""

import itertools
import math
import posixpath
import zipfile
from pathlib import Path

import numpy as np

from nanodiff.common import UserError, base_dir
from nanodiff.data import shapes
from nanodiff.data.archives import CONTAINERS, Options, Source, open_unzipped, read_images, read_tar, val_mask
from nanodiff.data.decode import Item, decode_all
from nanodiff.files import download, reading, sha256_of

CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
CIFAR10_SHA256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
CIFAR10_BYTES = 170_052_171
CIFAR10_CLASSES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
CIFAR10_BATCHES = [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]


def detect(path: Path) -> str:
    if path.is_dir():
        return "idx" if idx_files(path) else "folder"
    if path.name == posixpath.basename(CIFAR10_URL):
        return "cifar10"
    if path.suffix in (".npz", ".zip"):
        return path.suffix[1:]
    if path.name.endswith((".tar", ".tar.gz", ".tgz")):
        return "tar"
    if "idx" in path.name:
        return "idx"
    raise UserError(f"cannot tell what {path} is; give --source=..., one of: {', '.join(SOURCES)}")


def open_source(source: str, path: str, options: Options, sha256: str = "auto") -> Source:
    """The images of a source, one of SOURCES or "auto".

    `sha256` of the file: "" skips the check, "auto" takes the published one, if any.
    """
    file = Path(path).expanduser()
    if source == "cifar10" and not path:
        file = base_dir() / "downloads" / posixpath.basename(CIFAR10_URL)
        if not file.is_file():
            download(CIFAR10_URL, file, CIFAR10_BYTES, CIFAR10_SHA256, "give --path=... of a copy of it")
    elif not path and source != "shapes":
        raise UserError(f"source={source!r} needs --path=..., the file or folder to read")
    if source != "shapes" and not file.exists():
        raise UserError(f"path={path!r} is no file or folder")
    if source == "auto":
        source = detect(file)
    if sha256 == "auto":
        sha256 = CIFAR10_SHA256 if source == "cifar10" else ""
    if sha256 and sha256_of(file) != sha256.lower():
        raise UserError(f"path={path!r} does not have SHA-256 {sha256}: damaged or another file; --sha256= skips this")
    workers = 1
    if source in CONTAINERS:
        found = read_images(file, source, options)
        workers = options.workers
    elif options.side_unit:
        raise UserError(f"aspect_buckets is for image files; those of source={source!r} have one size")
    elif options.labels not in ("auto", "none"):
        raise UserError(f"labels={options.labels!r} is for image files; for source={source!r} accepted: auto, none")
    else:
        found = READERS[source](file, options)
    if options.labels == "none":
        found.class_names = []
    found.blocks = decode_all(found, options, workers)
    return found


def read_shapes(path: Path, options: Options) -> Source:
    def items():
        for split in shapes.NUM_IMAGES:
            for images, labels in shapes.draw_split(split, options.seed, options.resolution or 16):
                for image, label in zip(images, labels):
                    yield Item("a shape", image.transpose(1, 2, 0), label, split == "val")

    return Source(sum(shapes.NUM_IMAGES.values()), list(shapes.CLASS_NAMES), items())


def read_cifar10(path: Path, options: Options) -> Source:
    """The binary version's tar: records of 1 label byte and 3x32x32 image bytes."""

    def items():
        left = set(CIFAR10_BATCHES)
        for member, data in read_tar(path, lambda name: posixpath.basename(name) in left):
            name = posixpath.basename(member)
            if name not in left:
                continue
            left.remove(name)
            with reading(path):
                records = np.frombuffer(data, np.uint8).reshape(-1, 3073)
            for i, record in enumerate(records):
                image = record[1:].reshape(3, 32, 32).transpose(1, 2, 0)
                yield Item(f"{name}, image {i}", image, record[0], name == "test_batch.bin")
        if left:
            raise UserError(f"{path} lacks {', '.join(sorted(left))}; wanted: CIFAR-10's binary version")

    return Source(60_000, list(CIFAR10_CLASSES), items())


def array_source(file, shape: tuple, labels: np.ndarray | None, is_val: np.ndarray, path: Path) -> Source:
    """Images (N, H, W) or (N, H, W, C) uint8 in an open file, read one by one."""

    def items():
        image_shape = (*shape[1:], 1)[:3]
        with reading(path):
            for i in range(shape[0]):
                data = file.read(math.prod(image_shape))
                image = np.frombuffer(data, np.uint8).reshape(image_shape)
                yield Item(f"image {i}", image, 0 if labels is None else labels[i], is_val[i])
            if file.read(1):  # also checks the checksum of a compressed file
                raise EOFError("data follow the last image")

    class_names = [] if labels is None else [str(i) for i in range(int(labels.max()) + 1)]
    return Source(shape[0], class_names, items())


def idx_files(folder: Path) -> dict[str, Path]:
    """Split -> file of images, by MNIST's names: train-images-idx3-ubyte, t10k-images-idx3-ubyte, perhaps .gz."""
    files = {}
    for split, mark in (("train", "train-images"), ("val", "t10k-images"), ("val", "test-images")):
        for path in sorted(folder.glob(f"*{mark}*idx*")):
            first = files.setdefault(split, path)
            if first.name.removesuffix(".gz") != path.name.removesuffix(".gz"):
                raise UserError(f"{folder} has {first.name} and {path.name}; give --path of one")
    return files


def open_idx(path: Path, dims: int):
    """An IDX file, gzipped or not -> file open after its header, shape."""
    with reading(path):
        file = open_unzipped(path)
        magic = file.read(4)
        shape = np.frombuffer(file.read(4 * dims), ">u4", dims).tolist()
    if magic != bytes([0, 0, 8, dims]):
        raise UserError(f"{path} starts with {magic.hex()}, wanted 000008{dims:02d}: IDX, bytes, {dims} dimensions")
    return file, tuple(shape)


def read_idx(path: Path, options: Options) -> Source:
    """A file of images, or a folder with train-images and t10k-images; optionally with label files beside them."""
    files = idx_files(path) if path.is_dir() else {"train": path}
    if not files:
        raise UserError(f"no IDX files in {path}; looked for train-images*idx* and t10k-images*idx*")
    sources, kinds = [], set()
    for split, file in files.items():
        opened, shape = open_idx(file, 3)
        labels = read_idx_labels(file, shape[0])
        is_val = np.full(shape[0], split == "val") if len(files) == 2 else val_mask(shape[0], options)
        sources.append(array_source(opened, shape, labels, is_val, file))
        kinds.add((shape[1:], labels is None))
    if len(kinds) > 1:
        raise UserError(f"{path}: train and test images differ in size, or only one has a file of labels")
    class_names = max((source.class_names for source in sources), key=len)
    items = itertools.chain(*(source.items for source in sources))
    return Source(sum(source.num_images for source in sources), class_names, items)


def read_idx_labels(images: Path, num: int) -> np.ndarray | None:
    """(num,) int64 from the label file beside `images`; None without one."""
    name = images.name.removesuffix(".gz").replace("images", "labels").replace("idx3", "idx1")
    for path in (images.with_name(name), images.with_name(name + ".gz")):
        if not path.is_file() or path == images:
            continue
        file, (count,) = open_idx(path, 1)
        if count != num:
            raise UserError(f"{path} has {count:,} labels for {num:,} images in {images.name}")
        with reading(path):
            return np.frombuffer(file.read(num), np.uint8, num).astype(np.int64)
    return None


def open_npz(path: Path):
    """ADM's and EDM's sample files: `arr_0` (N, H, W, C) uint8, perhaps labels (N,) in `labels` or `arr_1`.

    -> arr_0 as a file open after its header, its shape, the labels as int64 or None.
    """
    with reading(path):
        archive = zipfile.ZipFile(path)
        names = archive.namelist()
        if "arr_0.npy" not in names:
            raise UserError(f"{path} has no array arr_0, but: {', '.join(names[:5])!r}")
        file = archive.open("arr_0.npy")
        np.lib.format.read_magic(file)
        shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
        if dtype != np.uint8 or len(shape) != 4 or fortran or shape[3] not in (1, 3):
            raise UserError(f"{path}: arr_0 is {dtype} of shape {shape}; accepted: uint8 of shape (N, H, W, 1 or 3)")
        key = next((name for name in ("labels.npy", "arr_1.npy") if name in names), None)
        if key is None:
            return file, shape, None
        labels = np.lib.format.read_array(archive.open(key), allow_pickle=False)
        if labels.dtype.kind not in "iu" or labels.shape != shape[:1] or labels.min() < 0:
            raise UserError(f"{path}: {key} does not hold {shape[0]:,} class numbers 0, 1, ...")
        return file, shape, labels.astype(np.int64)


def read_npz(path: Path, options: Options) -> Source:
    file, shape, labels = open_npz(path)
    return array_source(file, shape, labels, val_mask(shape[0], options), path)


# A new source is one such function and its entry here
READERS = {"shapes": read_shapes, "cifar10": read_cifar10, "mnist": read_idx, "idx": read_idx, "npz": read_npz}
SOURCES = (*READERS, *CONTAINERS)
