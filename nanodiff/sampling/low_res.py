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

    def __init__(self, where: str, loaded, device, autoencoder: str):
        self.config, self.device = loaded.model.config, device
        name, dataset = loaded.data["name"], None
        if where not in ("", "val"):
            images, labels = read_inputs(where, loaded.data["class_names"][: loaded.num_classes])
            shapes = [(self.config.in_channels, side, side) for side in (self.config.low_res, self.config.image_size)]
            if images.shape[1:] not in shapes or loaded.data["kind"] != "images":
                accepted = f"(channels, height, width) {shapes[0]} or {shapes[1]}; val for latents"
                raise UserError(f"low_res={where!r} holds images {images.shape[1:]}; accepted: {accepted}")
            self.stored = images.__getitem__  # ids (n,) -> images (n, C, h, w)
            self.described = f"{where}, SHA-256 {hashlib.sha256(images.tobytes()).hexdigest()}"
        elif not name:
            raise UserError(f"{loaded.source} names no data set to take small images from: give --low_res=FILE.npz")
        else:
            has_val = "val" in open_dataset(name).meta["splits"]
            dataset = open_dataset(name, "val" if where or has_val else "train")
            self.stored, labels = dataset.images, dataset.labels(range(len(dataset)))
            self.described = f"{name}, {dataset.split}"
        self.codec = load_codec(loaded.data, device, autoencoder, dataset)
        self.labels = torch.from_numpy(labels)  # (number of images,) int64

    def images(self, ids) -> torch.Tensor:
        """The model's input low_res (n, C, h, w)."""
        stored = torch.from_numpy(self.stored(np.asarray(ids) % len(self.labels))).to(self.device)
        return conditioning(self.config, self.codec.to_x0(stored), None)["low_res"]

    def pixels(self, ids) -> torch.Tensor:
        """The same for display: (n, C, H, W) uint8 on the CPU, as large as the samples."""
        return self.codec.to_pixels(F.interpolate(self.images(ids), size=self.config.image_size, mode="nearest"))


def open_low_res(where: str, loaded, device, autoencoder: str = "") -> LowRes | None:
    """None for models without low_res, which take no `where`."""
    if loaded.model.config.low_res:
        return LowRes(where, loaded, device, autoencoder)
    if where:
        raise UserError(f"low_res={where!r} would do nothing: {loaded.source} is no super-resolution model")


def read_inputs(where: str, class_names: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Images (n, C, H, W) uint8 and labels (n,) of an .npz or a folder."""
    path, options = Path(where).expanduser(), Options(val_fraction=0)
    if not path.is_dir() and not (path.is_file() and path.suffix == ".npz"):
        raise UserError(f"low_res={where!r} is not there; accepted: an .npz file, a folder of images, val")
    source = open_source("folder" if path.is_dir() else "npz", str(path), options)
    images, labels, _ = (np.concatenate(arrays) for arrays in zip(*source.blocks))
    if source.skipped:  # once the blocks are read
        raise UserError(f"low_res={where!r}: {source.skipped[0]}")
    given, known = len(source.class_names), len(class_names)
    if known and not 1 <= given <= known:
        raise UserError(f"low_res={where!r} has {given} classes, the model {known}; see arr_1, or sub-folders")
    if known and path.is_dir():  # classes go by name
        labels = np.array(match_labels(source.class_names, class_names, f"low_res={where!r}"))[labels]
    return images, labels
