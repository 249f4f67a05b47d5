"""Samples in a file or a folder, for base_eval to measure in place of a model's."""

import json
import zipfile
from pathlib import Path

import numpy as np
import torch

from nanodiff.common import UserError, in_batches
from nanodiff.data.archives import Options, read_images
from nanodiff.data.decode import decode
from nanodiff.data.sources import npz_labels
from nanodiff.files import reading


class SampleFile:
    """An .npz of images as scripts/sample.py, ADM and EDM write it, read piece by piece."""

    not_finite = 0
    batches = staticmethod(in_batches)

    def __init__(self, path: Path):
        self.path = path
        drawn = {}
        with reading(path, "is damaged or has no array arr_0"):
            file = np.load(path, allow_pickle=False)
            labels = npz_labels(path, file)
            if "protocol" in file:  # a file from elsewhere has none
                drawn = json.loads(str(file["protocol"]))
            self._file = zipfile.ZipFile(path).open("arr_0.npy")
            np.lib.format.read_magic(self._file)
            shape, _, dtype = np.lib.format.read_array_header_1_0(self._file)
        if dtype != np.uint8 or len(shape) != 4 or shape[3] not in (1, 3):
            raise UserError(f"{path} holds {dtype} of shape {shape}; accepted: uint8 of shape (N, H, W, 1 or 3)")
        self.num_images, height, width, channels = shape
        self._start = self._file.tell()
        self._labels = np.zeros(self.num_images, np.int64) if labels is None else labels
        self.shape = (channels, height, width)
        self.num_classes = 1 + int(self._labels.max()) if self._labels.any() else 0  # 0 without labels
        self.protocol = {"samples": str(path)}  # the file, and its record of how images were drawn
        if drawn:
            self.protocol["samples_protocol"] = drawn
        self.class_names = drawn.get("class_names")
        self.data = drawn.get("data", "")  # the set that the model was trained on

    def labels(self, ids) -> torch.Tensor:
        return torch.from_numpy(self._labels[ids])

    def images(self, ids) -> np.ndarray:
        """Consecutive ids (n,) -> (n, C, H, W) uint8."""
        channels, height, width = self.shape
        image_bytes = channels * height * width
        with reading(self.path):
            self._file.seek(self._start + int(ids[0]) * image_bytes)  # a compressed file is read up to there
            data = self._file.read(len(ids) * image_bytes)
            images = np.frombuffer(data, np.uint8).reshape(len(ids), height, width, channels)
        return images.transpose(0, 3, 1, 2).copy()


class SampleFolder:
    """JPEG, PNG, ... files of one size in a folder, in the order of their names; sub-folders, if any, are classes."""

    not_finite = 0
    batches = staticmethod(in_batches)
    data = ""

    def __init__(self, path: Path):
        self.path = path
        source = read_images(path, "folder", Options(val_fraction=0))
        items = list(source.items)
        self._names = [item.name for item in items]
        self._files = [item.payload for item in items]
        self._labels = torch.tensor([item.label for item in items])
        self.num_images = len(self._files)
        self.class_names = source.class_names
        self.num_classes = len(source.class_names)
        self.protocol = {"samples": str(path)}
        self.shape = self._decode(0).shape

    def labels(self, ids) -> torch.Tensor:
        return self._labels[ids]

    def images(self, ids) -> np.ndarray:
        """ids (n,) -> (n, 3, H, W) uint8."""
        return np.stack([self._decode(i) for i in ids])

    def _decode(self, i: int) -> np.ndarray:
        with reading(self._files[i]):
            image, _ = decode(self._files[i], [])  # (3, H, W)
        if i > 0 and image.shape != self.shape:
            height, width = image.shape[1:]
            raise UserError(f"{self._files[i]} is {width}x{height}, {self._names[0]} {self.shape[2]}x{self.shape[1]}")
        return image


def open_samples(name: str) -> SampleFile | SampleFolder:
    path = Path(name).expanduser()
    if path.is_dir():
        return SampleFolder(path)
    if not path.is_file():
        raise UserError(f"samples={name!r}: no such file or folder")
    return SampleFile(path)
