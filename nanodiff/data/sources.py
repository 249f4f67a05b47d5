"""Image sources: detection by path, CIFAR-10's download, readers of arrays (CIFAR-10, IDX, .npz, .npy), vectors."""

import itertools
import math
import posixpath
import zipfile
from collections.abc import Iterator
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
    if path.suffix in (".npz", ".npy", ".zip"):
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
    if options.range and found.dtype == "uint8":
        raise UserError(f"range={options.range} is for arrays beyond 8 bits, in .npz or .npy")
    if options.vectors:
        add_vectors(found, Path(options.vectors).expanduser())
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


def read_arrays(path: Path, file, shape: tuple, dtype=np.uint8) -> Iterator[np.ndarray]:
    """The images (H, W, C) of an array (N, H, W) or (N, H, W, C) in an open file, one by one."""
    image_shape = (*shape[1:], 1)[:3]
    dtype = np.dtype(dtype)
    num_bytes = math.prod(image_shape) * dtype.itemsize
    with reading(path), file:
        for _ in range(shape[0]):
            yield np.frombuffer(file.read(num_bytes), dtype).reshape(image_shape)
        if file.read(1):  # also checks the checksum of a compressed file
            raise EOFError("data follow the last image")


def array_source(images: Iterator[np.ndarray], labels: np.ndarray | None, is_val: np.ndarray) -> Source:
    def items():
        for i, image in enumerate(images):
            label = 0 if labels is None else labels[i]
            yield Item(f"image {i}", image, label, is_val[i])

    class_names = []
    if labels is not None:
        class_names = [str(number) for number in range(labels.max() + 1)]
    return Source(len(is_val), class_names, items())


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
        is_val = val_mask(shape[0], options)
        if len(files) == 2:
            is_val = np.full(shape[0], split == "val")
        sources.append(array_source(read_arrays(file, opened, shape), labels, is_val))
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


def open_array(file):
    """A file open at the start of an .npy -> its shape and dtype; the file is then at its data."""
    np.lib.format.read_magic(file)
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(file)
    if fortran:
        raise UserError(f"{file.name}: in Fortran's order; accepted: C's, as of numpy.ascontiguousarray")
    return shape, dtype


def open_npz(path: Path):
    """An .npy of images, or ADM's and EDM's sample files: `arr_0`, perhaps labels (N,) in `labels` or `arr_1`.

    -> the images as a file open after its header, their shape (N, H, W) or (N, H, W, C) and dtype, the labels as int64
    or None.
    """
    with reading(path):
        if path.suffix == ".npy":
            file = open(path, "rb")
            return file, *open_array(file), None
        archive = zipfile.ZipFile(path)
        names = archive.namelist()
        if "arr_0.npy" not in names:
            raise UserError(f"{path} has no array arr_0, but: {', '.join(names[:5])!r}")
        file = archive.open("arr_0.npy")
        shape, dtype = open_array(file)
        key = next((name for name in ("labels.npy", "arr_1.npy") if name in names), None)
        if key is None:
            return file, shape, dtype, None
        labels = np.lib.format.read_array(archive.open(key), allow_pickle=False)
        if labels.dtype.kind not in "iu" or labels.shape != shape[:1] or labels.min() < 0:
            raise UserError(f"{path}: {key} does not hold {shape[0]:,} class numbers 0, 1, ...")
        return file, shape, dtype, labels.astype(np.int64)


def read_npz(path: Path, options: Options) -> Source:
    """uint8 as it is; other numbers as fp16, options.range becoming [-1, 1]."""
    file, shape, dtype, labels = open_npz(path)
    if dtype.kind not in "uif" or len(shape) not in (3, 4):
        raise UserError(f"{path} holds {dtype} of shape {shape}; accepted: numbers of shape (N, H, W) or (N, H, W, C)")
    images = read_arrays(path, file, shape, dtype)
    is_val = val_mask(shape[0], options)
    if dtype == np.uint8:
        return array_source(images, labels, is_val)
    low, high = options.range or value_range(path, images)
    if options.range is None:  # the images have been read
        images = read_arrays(path, open_npz(path)[0], shape, dtype)

    def scaled():
        for i, image in enumerate(images):
            check_finite(path, i, image)
            share = (image.astype(np.float64) - low) / (high - low)
            x = 2 * share - 1
            source.num_clipped += int(np.sum(abs(x) > 1 + 1e-9))
            yield x.clip(-1, 1).astype(np.float16)

    source = array_source(scaled(), labels, is_val)
    source.dtype, source.range = str(dtype), (low, high)
    return source


def value_range(path: Path, images: Iterator[np.ndarray]) -> tuple[float, float]:
    low, high = math.inf, -math.inf
    for i, image in enumerate(images):
        check_finite(path, i, image)
        low = min(low, float(image.min()))
        high = max(high, float(image.max()))
    if low == high:
        raise UserError(f"{path} holds the value {low:g} alone; give --range=LOW,HIGH")
    return low, high


def check_finite(path: Path, number: int, image: np.ndarray) -> None:
    if not np.isfinite(image).all():
        raise UserError(f"{path}: image {number} holds NaN or infinity")


# ---------------------------------------------------------------------------------------------------------------------
# Vectors


def open_vectors(path: Path) -> tuple[list[str] | None, np.ndarray]:
    """Names, if the file has them, and vectors: (N, D) one per image, or (N, L, D) a sequence, zeros behind its end."""
    if path.suffix not in (".npy", ".npz") or not path.is_file():
        raise UserError(f"vectors={str(path)!r}; accepted: an .npz with arrays names and vectors, or an .npy")
    names = None
    with reading(path):
        if path.suffix == ".npy":
            vectors = np.load(path, mmap_mode="r", allow_pickle=False)
        else:
            with np.load(path, allow_pickle=False) as file:
                vectors = file["vectors"]
                if "names" in file:
                    names = [posixpath.normpath(str(name)) for name in file["names"]]
    if vectors.dtype.kind != "f" or vectors.ndim not in (2, 3):
        found = f"{vectors.dtype} of shape {vectors.shape}"
        raise UserError(f"vectors={str(path)!r} holds {found}; accepted: floats of shape (N, D) or (N, L, D)")
    if names is not None and len(set(names)) != len(vectors):
        raise UserError(f"vectors={str(path)!r} has {len(set(names)):,} different names for {len(vectors):,} vectors")
    return names, vectors


def add_vectors(source: Source, path: Path) -> None:
    """Give each item its row of the vectors in a file: by its name or, for arrays, in order."""
    names, source.vectors = open_vectors(path)
    items = source.items
    if not source.names:
        num_vectors, num_images = len(source.vectors), source.num_images
        if num_vectors != num_images:
            raise UserError(f"vectors={str(path)!r} has {num_vectors:,} vectors for {num_images:,} images")
        source.items = (item._replace(row=row) for row, item in enumerate(items))
        return
    if names is None:
        raise UserError(f"vectors={str(path)!r} has no array `names` to match with the names of image files")
    rows = {name: row for row, name in enumerate(names)}
    missing = [name for name in source.names if name not in rows]
    if missing:
        total = f"{len(missing):,} of {len(source.names):,}"
        raise UserError(f"vectors={str(path)!r} lacks {total} images, such as {missing[0]!r}")
    source.items = (item._replace(row=rows[item.name]) for item in items)


# A new source is one such function and its entry here
READERS = {
    "shapes": read_shapes,
    "cifar10": read_cifar10,
    "mnist": read_idx,
    "idx": read_idx,
    "npz": read_npz,
    "npy": read_npz,
}
SOURCES = (*READERS, *CONTAINERS)
