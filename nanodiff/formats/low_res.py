"""The inputs of super-resolution: small images of a file, of a folder, or of the set that the model was trained on."""

import hashlib
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from nanodiff.common import UserError
from nanodiff.data.dataset import match_labels, open_dataset
from nanodiff.data.images import Options, read_images
from nanodiff.data.latents import load_codec
from nanodiff.data.sources import read_npz
from nanodiff.diffusion.sampling import conditioning


class LowRes:
    """What a super-resolution model (a Loaded) enlarges; the samples take the images in turn.

    `where`: an .npz (arr_0 and, in labels or arr_1, classes), a folder (sub-folders are classes), or val; "" is val,
    or the training set without one. Images as large as the model's are made smaller as in training.
    """

    def __init__(self, where: str, loaded, device, num_images: int, autoencoder: str = ""):
        self.config, self.device, dataset = loaded.model.config, device, None
        name, class_names = loaded.data["name"], loaded.data["class_names"][: loaded.num_classes]
        if where not in ("", "val"):
            images, labels = read_small(where, num_images, class_names)
            sizes = [(self.config.in_channels, size, size) for size in (self.config.low_res, self.config.image_size)]
            if images.shape[1:] not in sizes or loaded.data["kind"] != "images":
                wanted = f"{sizes[0]}, or {sizes[1]} to make smaller" if loaded.data["kind"] == "images" else "val"
                raise UserError(
                    f"low_res={where!r} has (channels, height, width) {images.shape[1:]}; accepted: {wanted}"
                )
            self.stored = images.__getitem__
            self.described = f"{where}, SHA-256 {hashlib.sha256(images).hexdigest()}"
        elif name:
            dataset = open_dataset(name)
            if where or "val" in dataset.meta["splits"]:
                dataset = open_dataset(name, "val")
            self.stored, labels = dataset.images, dataset.labels(range(len(dataset)))
            self.described = f"{name}, {dataset.split}"
        else:
            raise UserError(f"{loaded.source} names no data set to take small images from: give --low_res=FILE.npz")
        self.codec = load_codec(loaded.data, device, autoencoder, dataset)
        self.labels = torch.from_numpy(labels)  # (number of images,) int64

    def images(self, ids) -> torch.Tensor:
        """The model's input low_res (n, C, h, w) for the samples of these numbers (n,)."""
        stored = torch.from_numpy(self.stored(np.asarray(ids) % len(self.labels))).to(self.device)
        return conditioning(self.config, self.codec.to_x0(stored), None)["low_res"]

    def pixels(self, ids) -> torch.Tensor:
        """The same to look at: (n, C, H, W) uint8 on the CPU, as large as the samples."""
        return self.codec.to_pixels(F.interpolate(self.images(ids), size=self.config.image_size, mode="nearest"))


def read_small(where: str, most: int, class_names: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """The first images (n, C, H, W) uint8 and labels (n,) of an .npz or a folder; a folder's classes go by name."""
    path, options, images, labels = Path(where).expanduser(), Options(val_fraction=0), [], []
    if not path.is_dir() and not (path.is_file() and path.suffix == ".npz"):
        raise UserError(f"low_res={where!r} is not there; accepted: an .npz file, a folder of images, val")
    source = read_images(path, "folder", options) if path.is_dir() else read_npz(path, options)
    if class_names and not source.class_names:
        raise UserError(
            f"low_res={where!r} has no classes, the model has {len(class_names)}; see arr_1, or sub-folders"
        )
    try:
        while sum(map(len, labels)) < min(most, source.num_images):
            more, their_labels, _ = next(source.blocks)
            images.append(more)
            labels.append(their_labels)
    except (UserError, StopIteration) as error:
        unreadable = source.skipped[0] if source.skipped else str(error).removesuffix("; give --resolution=...")
        raise UserError(f"low_res={where!r}: {unreadable}") from None
    labels = np.concatenate(labels)[:most]
    if class_names and path.is_dir():
        labels = np.array(match_labels(source.class_names, class_names, f"low_res={where!r}"))[labels]
    elif class_names and labels.max() >= len(class_names):
        raise UserError(f"low_res={where!r} has class {labels.max()}; accepted: 0 to {len(class_names) - 1}")
    return np.ascontiguousarray(np.concatenate(images)[:most]), labels if class_names else np.zeros_like(labels)
