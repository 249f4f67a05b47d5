"""What samples are conditioned on besides classes: rows of a file, a folder, or the model's data set."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from nanodiff.common import UserError
from nanodiff.conditions import IMAGES, from_stored, made_from, row_shapes
from nanodiff.data.codec import load_codec, stored_images
from nanodiff.data.dataset import match_labels, open_dataset
from nanodiff.data.decode import decode_items
from nanodiff.data.sources import Options, open_source, read_vectors


@dataclass
class Inputs:
    """Rows of one condition: sample i takes row i, modulo `count`, and its label, if rows have labels (count,) int64.

    `read`: numbers (n,) of rows -> (n, ...) as models take them. `described`: for protocols.
    """

    read: Callable
    count: int
    labels: np.ndarray | None
    described: str

    def __call__(self, ids) -> torch.Tensor:
        return self.read(np.asarray(ids) % self.count)


def open_inputs(loaded, where: dict[str, str], autoencoder: str = "") -> dict[str, Inputs]:
    """Open the conditions that a Loaded model takes besides classes.

    `where`: {name: file, folder or "val"}; "" means the validation split, or the training split if there is none.
    """
    taken = [name for name in row_shapes(loaded.model.config) if name != "y"]
    for name, place in where.items():
        if place and name not in taken:
            raise UserError(f"{name}={place!r} would do nothing: {loaded.source} was trained without {name}")
    inputs = {}
    for name in taken:
        place = where.get(name, "")
        if place in ("", "val"):
            dataset = own_set(loaded, name, place)
            codec = load_codec(loaded.data, loaded.device, autoencoder, dataset if name in IMAGES else None)
            inputs[name] = rows_of(dataset, name, codec, loaded.model.config, loaded.device)
        else:
            codec = load_codec(loaded.data, loaded.device, autoencoder)
            inputs[name] = READERS[name](place, loaded, codec)
    return inputs


def rows_of(dataset, name: str, codec, config, device) -> Inputs:
    """The rows of a condition in a set, with their labels. Only conditions that are images read the set's images."""

    def read(numbers):
        if name not in IMAGES:
            return from_stored(dataset.cond(numbers), codec.description)[name]
        x0, given = stored_images(dataset, numbers, codec, device)
        return (given | made_from(x0, config))[name]

    return Inputs(read, len(dataset), dataset.labels(np.arange(len(dataset))), dataset.described)


# ---------------------------------------------------------------------------------------------------------------------
# From files: (place, loaded, codec) -> Inputs


def read_low_res(where: str, loaded, codec) -> Inputs:
    """Small images of an .npz (arr_0 and, in labels or arr_1, classes) or a folder (sub-folders are classes). Images of
    the model's size are downsampled as in training."""
    config = loaded.model.config
    images, labels, names = read_images("low_res", where)
    known = loaded.class_names
    if known and not 1 <= len(names) <= len(known):
        raise UserError(
            f"low_res={where!r} has {len(names)} classes, the model {len(known)}; see arr_1, or sub-folders"
        )
    if known and Path(where).expanduser().is_dir():  # classes go by name
        labels = np.array(match_labels(names, known, f"low_res={where!r}"))[labels]
    shapes = [(config.in_channels, side, side) for side in (config.low_res, config.image_size)]
    if images.shape[1:] not in shapes or loaded.data["kind"] != "images":
        accepted = f"(channels, height, width) {shapes[0]} or {shapes[1]}; val for latents"
        raise UserError(f"low_res={where!r} holds images {images.shape[1:]}; accepted: {accepted}")

    def read(numbers):
        stored = torch.from_numpy(images[numbers]).to(loaded.device)
        return made_from(codec.to_x0(stored), config)["low_res"]

    return Inputs(read, len(images), labels, with_hash(where, images, labels))


def read_vector_file(where: str, loaded, codec) -> Inputs:
    """Vectors of an .npy or .npz, as prepare_data takes them; names in the file are ignored."""
    _, array = read_vectors(Path(where).expanduser())
    shape = row_shapes(loaded.model.config)["vectors"]
    if array.shape[1:] != shape or not len(array):
        raise UserError(f"vectors={where!r} holds vectors of {array.shape}; accepted: {('n', *shape)}")
    if not np.isfinite(array).all():
        raise UserError(f"vectors={where!r} holds NaN or infinity")
    rows = from_stored({"vectors": np.array(array)}, codec.description)["vectors"]
    return Inputs(rows.__getitem__, len(rows), None, with_hash(where, array))


READERS = {"low_res": read_low_res, "vectors": read_vector_file}  # for each condition that can come from a file


def own_set(loaded, name: str, where: str):
    """The validation split of the set that the model was trained on; for "", its training split if it has none."""
    own = loaded.data["name"]
    if not own:
        raise UserError(f"{loaded.source} names no data set to take {name} from; give --{name}=FILE")
    train_set = open_dataset(own, "train")
    if where == "" and "val" not in train_set.meta["splits"]:
        return train_set
    return open_dataset(own, "val")


def read_images(
    setting: str,
    where: str,
    resolution=0,
    value_range=None,
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Images (n, C, H, W), labels (n,) and class names of an .npz or .npy, or of a folder, cropped to `resolution`.

    Images are uint8; arrays of other numbers become fp16, with value_range mapped to [-1, 1].
    """
    path = Path(where).expanduser()
    kind = "folder" if path.is_dir() else path.suffix[1:]
    if kind not in ("folder", "npz", "npy") or not path.exists():
        fault = "is neither" if path.exists() else "is not there"
        raise UserError(f"{setting}={where!r} {fault}; accepted: an .npz file, a folder of images, an .npy")
    options = Options(val_fraction=0, range=value_range)
    if path.is_dir():
        options = Options(val_fraction=0, resolution=resolution)
    source = open_source(kind, str(path), options)
    done, skipped = decode_items(source.items, source.sizes)
    if skipped:
        raise UserError(f"{setting}={where!r}: {skipped[0]}")
    images = np.stack([item.payload for item, _ in done])
    labels = np.array([item.label for item, _ in done], np.int64)
    return images, labels, source.class_names


def with_hash(where: str, *arrays: np.ndarray) -> str:
    """Describe a file in a protocol by path and content, as the content may change under one path."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(array.tobytes())
    return f"{where}, SHA-256 {digest.hexdigest()}"
