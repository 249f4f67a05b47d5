"""Choose the codec between a data set, x0 and pixels: Pixels, Arrays or Latents.

make_codec makes a codec for training, load_codec a trained model's, from the `data` that its checkpoint keeps.
"""

from dataclasses import replace

import numpy as np

from nanodiff.common import UserError, print0
from nanodiff.conditions import GIVEN, DataInfo
from nanodiff.data.pixels import Arrays, Pixels

# Fields of DataInfo that describe only the set; fine-tuning takes them from the new one
SET_KEYS = "name sha256 val_sha256 resolution sizes num_classes class_names".split()


def make_codec(
    dataset,
    device,
    autoencoder: str = "",
    flip: bool = False,
    source_data: DataInfo | None = None,
) -> Pixels:
    """The codec for training: Latents for a latent set, or for images with the path of an `autoencoder`; else Pixels
    or Arrays.

    Latents are normalised by the autoencoder's published scale and shift if they are made on the fly or with
    latent_norm=scale; else by the set's mean and deviation per channel. `source_data`: of the model that training
    starts from, whose normalisation of latents and vectors is kept.
    """
    data = dataset.data
    latents = data.latents
    if flip and latents and latents["copies"] < 2:
        raise UserError(f"flip: {dataset.name!r} has no mirrored copies; make it with scripts.cache_latents --flip")
    if source_data:
        keys = SET_KEYS if source_data.given_channels else [*SET_KEYS, *GIVEN]
        changes = {key: getattr(data, key) for key in keys}
        data = replace(source_data, **changes)
    if data.kind == "latents" or autoencoder:
        from nanodiff.data.latents import latents_of  # a lazy import: pixels need no autoencoder

        info = dict(data.latents or latents or latents_of(data, autoencoder))
        if not source_data and "mean" in info:
            info["offset"] = info.pop("mean")
            info["scale"] = info.pop("std")
        if not latents:
            unit = info["downsample"]
            sizes = [[height // unit, width // unit, number] for height, width, number in data.sizes or ()]
            data = replace(data, resolution=data.resolution // unit, sizes=sizes or None)
        data = replace(data, kind="latents", channels=len(info["offset"]), latents=info)
    # A model that keeps its classes has learned them from other images
    if dataset.num_classes and not (source_data and source_data.class_names):
        empty = np.delete(dataset.class_names, dataset.labels(slice(None)))
        if empty.size:
            print0(f"note: {empty.size:,} of the classes have no training image: {', '.join(empty[:20])}")
    codec = load_codec(data, device, autoencoder)
    codec.accept(dataset)
    return codec


def load_codec(data: DataInfo, device, autoencoder: str = "") -> Pixels:
    """A trained model's codec. Before it reads a set, call `accept`.

    `autoencoder`: its path if it was moved, or if the model was published without one.
    """
    if autoencoder and data.kind != "latents":
        raise UserError(f"autoencoder={autoencoder!r}: the model is of {data.kind}, not of latents")
    if data.kind == "images":
        return Pixels(data, device)
    if data.kind == "arrays":
        return Arrays(data, device)
    from nanodiff.data.latents import Latents, latents_of  # a lazy import

    data = replace(data, latents=latents_of(data, autoencoder))
    return Latents(data, device, autoencoder)


def check_same_data(old: DataInfo, new: DataInfo, model_tag: str) -> None:
    """Raise UserError if a run would resume with data other than its checkpoint's; their location may differ."""
    compared = vars(new).keys() - {"name", "latents", "val_sha256"}
    differences = sorted(key for key in compared if getattr(new, key) != getattr(old, key))
    old_latents = old.latents or {}
    new_latents = new.latents or {}
    for key in "sha256 offset scale".split():
        if new_latents.get(key) != old_latents.get(key):
            differences.append(f"{key} of the latents")
    if differences:
        raise UserError(f"{model_tag} was trained on data with other {', '.join(differences)}; use another model_tag")
    if old.val_sha256 not in (None, new.val_sha256):
        print0("note: the validation split has changed since the run began: its earlier losses do not compare")
