"""Inputs for super-resolution: small images from a file, a folder or the model's training set."""

import hashlib
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from nanodiff.common import UserError
from nanodiff.data.archives import Options
from nanodiff.data.codec import load_codec
from nanodiff.data.dataset import match_labels, open_dataset
from nanodiff.data.sources import open_source
from nanodiff.diffusion.guidance import conditioning


class LowRes:
    """Inputs of a super-resolution model (a Loaded): sample i takes image i, modulo their number, and its class.

    `where`: an .npz (arr_0 and, in labels or arr_1, classes), a folder (sub-folders are classes), or val; "" is val,
    or train if there is none. Images of the model's size are downsampled as in training.
    """

    def __init__(self, where: str, loaded, autoencoder: str):
        self.config = loaded.model.config
        self.device = loaded.device
        dataset = None
        if where in ("", "val"):
            dataset = own_images(loaded, "small images from: give --low_res=FILE.npz", where)
            labels = dataset.labels(range(len(dataset)))
            self.stored = dataset.images  # ids (n,) -> images (n, C, h, w)
            self.described = dataset.described
        else:
            images, labels = read_inputs(where, loaded.class_names)
            sides = (self.config.low_res, self.config.image_size)
            shapes = [(self.config.in_channels, side, side) for side in sides]
            if images.shape[1:] not in shapes or loaded.data["kind"] != "images":
                accepted = f"(channels, height, width) {shapes[0]} or {shapes[1]}; val for latents"
                raise UserError(f"low_res={where!r} holds images {images.shape[1:]}; accepted: {accepted}")
            self.stored = images.__getitem__
            self.described = with_hash(where, images, labels)
        self.codec = load_codec(loaded.data, self.device, autoencoder, dataset)
        self.labels = torch.from_numpy(labels)  # (number of images,) int64

    def images(self, ids) -> torch.Tensor:
        """The model's input low_res (n, C, h, w)."""
        numbers = np.asarray(ids) % len(self.labels)
        stored = torch.from_numpy(self.stored(numbers)).to(self.device)
        x0 = self.codec.to_x0(stored)
        return conditioning(self.config, x0, None)["low_res"]

    def pixels(self, ids) -> torch.Tensor:
        """The same for display: (n, C, H, W) uint8 on the CPU, as large as the samples."""
        large = F.interpolate(self.images(ids), size=self.config.image_size, mode="nearest")
        return self.codec.to_pixels(large)


def open_low_res(where: str, loaded, autoencoder: str) -> LowRes | None:
    """None for models without low_res, which take no `where`."""
    if loaded.model.config.low_res:
        return LowRes(where, loaded, autoencoder)
    if where:
        raise UserError(f"low_res={where!r} would do nothing: {loaded.source} is no super-resolution model")


def with_hash(where: str, *arrays: np.ndarray) -> str:
    """For protocols: a file's path may stay while its content changes."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(array.tobytes())
    return f"{where}, SHA-256 {digest.hexdigest()}"


def own_images(loaded, what: str, where: str = ""):
    """The validation images of the set that the model was trained on; for "", its training images if it has none."""
    name = loaded.data["name"]
    if not name:
        raise UserError(f"{loaded.source} names no data set to take {what}")
    train_set = open_dataset(name, "train")
    if where == "" and "val" not in train_set.meta["splits"]:
        return train_set
    return open_dataset(name, "val")


def read_inputs(where: str, class_names: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Images (n, C, H, W) uint8 and labels (n,) of an .npz or a folder."""
    images, labels, given_names = read_images("low_res", where)
    given, known = len(given_names), len(class_names)
    if known and not 1 <= given <= known:
        raise UserError(f"low_res={where!r} has {given} classes, the model {known}; see arr_1, or sub-folders")
    if known and Path(where).expanduser().is_dir():  # classes go by name
        labels = np.array(match_labels(given_names, class_names, f"low_res={where!r}"))[labels]
    return images, labels


def read_images(
    setting: str,
    where: str,
    resolution=0,
    value_range=None,
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Images (n, C, H, W), labels (n,) and class names of an .npz, or of a folder, cropped to `resolution`.

    uint8, or fp16 for arrays of which value_range becomes [-1, 1].
    """
    path = Path(where).expanduser()
    if not path.is_dir() and not (path.is_file() and path.suffix == ".npz"):
        fault = "is neither" if path.exists() else "is not there"
        raise UserError(f"{setting}={where!r} {fault}; accepted: an .npz file, a folder of images")
    kind, options = "npz", Options(val_fraction=0, range=value_range)
    if path.is_dir():
        kind, options = "folder", Options(val_fraction=0, resolution=resolution)
    source = open_source(kind, str(path), options)
    blocks = list(source.blocks)  # (images, labels, ...) each
    if source.skipped:  # once the blocks are read
        raise UserError(f"{setting}={where!r}: {source.skipped[0]}")
    images = np.concatenate([block[0] for block in blocks])
    labels = np.concatenate([block[1] for block in blocks])
    return images, labels, source.class_names
