"""Samples in a file or a folder, which base_eval measures instead of a model's."""

import json
from pathlib import Path

import numpy as np

from nanodiff.common import UserError, at, in_batches, print0
from nanodiff.files import reading
from nanodiff.prepare.decode import decode
from nanodiff.prepare.sources import Options, open_arrays, read_images


class Samples:
    """An .npz of images as scripts/sample.py and ADM write it; or a folder of JPEG, PNG, ... files of one size, in the
    order of their names, with sub-folders as classes.

    `protocol`: the file, and its record of how the images were drawn. `data`: the set that their model was trained on.
    """

    batches = staticmethod(in_batches)

    def __init__(self, name: str):
        path = at(name)
        self.protocol = {"samples": str(path)}
        record = {}
        if path.is_dir():
            source = read_images(path, "folder", Options())
            items = list(source.items)
            self._payloads = [item.payload for item in items]
            labels = [item.label for item in items]
            if {".jpg", ".jpeg"} & {Path(item.name).suffix.lower() for item in items}:
                print0(f"note: {path}: the loss of JPEG counts as the model's; PNG and .npz have none")
            self.class_names = source.class_names
        else:
            images, labels, protocol = open_arrays(path)
            if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] not in (1, 3):
                raise UserError(
                    f"{path} holds {images.dtype} of shape {images.shape}; accepted: uint8 of shape (N, H, W, 1 or 3)"
                )
            self._payloads = images
            with reading(f"{path}'s protocol"):
                record = dict(json.loads(protocol or "{}"))
            if record:
                self.protocol["samples_protocol"] = record
            self.class_names = record.get("class_names")
        self.data = record.get("data", "")
        self.num_images = len(self._payloads)
        self._labels = np.array([0] * self.num_images if labels is None else labels)
        self.num_classes = 0  # without labels
        if self._labels.any() or self.class_names:
            self.num_classes = 1 + int(self._labels.max())
        self._notes = set()
        self.shape = self._decode(0).shape
        if self.images(range(min(16, self.num_images))).max() <= 1:
            print0(f"note: {path} begins with values of 0 and 1 alone; they are taken as nearly black, out of 255")

    def labels(self, ids) -> np.ndarray:
        return self._labels[ids]

    def images(self, ids) -> np.ndarray:
        """ids (n,) -> (n, C, H, W) uint8."""
        return np.stack([self._decode(i) for i in ids])

    def _decode(self, i: int) -> np.ndarray:
        file = self._payloads[i]
        with reading(file):
            image, notes = decode(file, [])  # (C, H, W)
        for note in {*notes} - self._notes:
            print0(f"note: {note}; first in {file}")
        self._notes |= {*notes}
        if i > 0 and image.shape != self.shape:
            height, width = image.shape[1:]
            raise UserError(f"{file} is {width}x{height}, {self._payloads[0]} {self.shape[2]}x{self.shape[1]}")
        return image
