"""What the tests of data preparation share: the script run within the process, and small sets of each kind on disk."""

import contextlib
import gzip
import io
import runpy
import tarfile
import zipfile
from unittest import mock

import numpy as np
from PIL import Image

from nanodiff.data.dataset import open_dataset
from nanodiff.png import encode_png
from nanodiff.prepare.sources import CIFAR10_BATCHES

RNG = np.random.default_rng(0)


def prepare(path="", **settings):
    """Run scripts.prepare_data with these settings -> the last line that it prints."""
    return report(path, **settings).splitlines()[-1]


def report(path="", **settings):
    """The same -> all that it prints."""
    settings = {"path": path, "name": "toy", "workers": 1, "overwrite": True, **settings}
    argv = ["prepare_data", *(f"--{key}={value}" for key, value in settings.items())]
    with mock.patch("sys.argv", argv), contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_module("scripts.prepare_data", run_name="__main__")
    return out.getvalue().strip()


def everything(name="toy", split="train"):
    data = open_dataset(name, split)
    ids = np.arange(len(data))
    return data.images(ids), data.labels(ids)


def noise(height, width, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (height, width, 3), np.uint8)


def write(file, content):
    """A file of bytes or text, and the folders above it; returns its path."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


def make_folder(root, sizes=((8, 8),), classes=("cat", "dog"), per_class=4):
    """PNG files class/number.png; returns {relative name: array}."""
    arrays = {}
    for c in classes:
        for i in range(per_class):
            arrays[f"{c}/{i}.png"] = array = noise(*sizes[i % len(sizes)], seed=len(arrays))
            write(root / c / f"{i}.png", encode_png(array))
    return arrays


def chw(arrays):
    return np.stack([a.transpose(2, 0, 1) for a in arrays])


def archive(folder, kind, path, prefix=""):
    files = sorted((p for p in folder.rglob("*") if p.is_file()), reverse=True)  # in another order than sorted
    if kind == "zip":
        with zipfile.ZipFile(path, "w") as z:
            for p in files:
                z.write(p, prefix + str(p.relative_to(folder)))
    else:
        with tarfile.open(path, {"tar.gz": "w:gz", "tar": "w"}[kind]) as t:
            for p in files:
                t.add(p, prefix + str(p.relative_to(folder)))
    return path


def reference_crop(image, size):
    """The centre crop of ADM and DiT as published, by Pillow."""
    while min(image.size) >= 2 * size:
        image = image.resize(tuple(x // 2 for x in image.size), resample=Image.BOX)
    scale = size / min(image.size)
    scaled = tuple(round(x * scale) for x in image.size)
    array = np.array(image.resize(scaled, resample=Image.BICUBIC))
    y = (array.shape[0] - size) // 2
    x = (array.shape[1] - size) // 2
    return array[y : y + size, x : x + size]


def idx(array):
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


def write_mnist(folder, pack=gzip.compress, suffix=".gz"):
    folder.mkdir(exist_ok=True)
    out = {}
    for split, stem, n in (
        ("train", "train", 20),
        ("val", "t10k", 6),
    ):
        images = RNG.integers(0, 256, (n, 8, 8), np.uint8)
        labels = RNG.integers(0, 10, n).astype(np.uint8)
        write(folder / f"{stem}-images-idx3-ubyte{suffix}", pack(idx(images)))
        write(folder / f"{stem}-labels-idx1-ubyte{suffix}", pack(idx(labels)))
        out[split] = images, labels
    return out


def write_cifar(path, leave_out=()):
    batches = {name: RNG.integers(0, 256, (7, 3073), np.uint8) for name in CIFAR10_BATCHES}
    with tarfile.open(path, "w:gz") as tar:
        for name, records in batches.items():
            records[:, 0] %= 10
            if name not in leave_out:
                info = tarfile.TarInfo("cifar-10-batches-bin/" + name)
                info.size = records.size
                tar.addfile(info, io.BytesIO(records.tobytes()))
    return batches
