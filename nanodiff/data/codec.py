"""Choose the codec between a data set, x0 and pixels: Pixels, Arrays or Latents.

Checkpoints keep a codec's `description`. make_codec makes a codec for training, load_codec loads a trained model's.
"""

import numpy as np

from nanodiff.common import UserError, print0
from nanodiff.conditions import GIVEN
from nanodiff.data.pixels import Arrays, Pixels

# Keys that describe only the set; fine-tuning takes them from the new one
SET_KEYS = ("name", "sha256", "val_sha256", "resolution", "sizes", "num_classes", "class_names")


def make_codec(
    dataset,
    device,
    autoencoder: str = "",
    flip: bool = False,
    source_data: dict | None = None,
) -> Pixels:
    """The codec for training: Latents for a latent set, or for images with the path of an `autoencoder`; else Pixels
    or Arrays.

    Latents are normalised by the autoencoder's published scale and shift if they are made on the fly or with
    latent_norm=scale; else by the set's mean and deviation per channel. `source_data`: the description of the model
    that training starts from, whose normalisation of latents and vectors is kept.
    """
    latents = dataset.meta.get("latents")
    if flip and latents and latents["copies"] < 2:
        raise UserError(f"flip: {dataset.name!r} has no mirrored copies; make it with scripts.cache_latents --flip")
    set_info = dataset.description
    description = {key: value for key, value in (source_data or {}).items() if key not in SET_KEYS}
    if description.get("kind") == "latents" or (not source_data and (latents or autoencoder)):
        if latents:
            description.setdefault("latents", latents)
        from nanodiff.data.latents import latents_of  # a door: pixels need no autoencoder

        info = latents_of(description, autoencoder)
        if not source_data and "mean" in info:
            info["offset"] = info.pop("mean")
            info["scale"] = info.pop("std")
        if not latents:
            unit = info["downsample"]
            set_info["resolution"] //= unit
            for size in set_info.get("sizes", []):  # [height, width, number of images]
                size[:2] = size[0] // unit, size[1] // unit
        description |= {"kind": "latents", "channels": len(info["offset"]), "latents": info}
    if source_data:
        set_info = {key: value for key, value in set_info.items() if key in (*SET_KEYS, *GIVEN)}
    # A model that keeps its classes has learned them from other images
    if dataset.num_classes and not (source_data and source_data["class_names"]):
        empty = np.delete(dataset.class_names, dataset.labels(slice(None)))
        if empty.size:
            print0(f"note: {empty.size:,} of the classes have no training image: {', '.join(empty[:20])}")
    codec = load_codec(set_info | description, device, autoencoder)
    codec.accept(dataset)
    return codec


def load_codec(description: dict, device, autoencoder: str = "") -> Pixels:
    """A trained model's codec, from the description in its checkpoint. Before it reads a set, call `accept`.

    `autoencoder`: its path if it was moved, or if the model was published without one.
    """
    if description["kind"] == "images":
        return Pixels(description, device)
    if description["kind"] == "arrays":
        return Arrays(description, device)
    from nanodiff.data.latents import Latents, latents_of  # a door

    return Latents(description | {"latents": latents_of(description, autoencoder)}, device, autoencoder)


def check_same_data(old: dict, new: dict, model_tag: str) -> None:
    """Raise UserError if a run would resume with data other than its checkpoint's; their location may differ."""
    differences = [key for key in new if key not in ("name", "latents", "val_sha256") and new[key] != old.get(key)]
    old_latents = old.get("latents", {})
    new_latents = new.get("latents", {})
    for key in ("sha256", "offset", "scale"):
        if new_latents.get(key) != old_latents.get(key):
            differences.append(f"{key} of the latents")
    if differences:
        raise UserError(f"{model_tag} was trained on data with other {', '.join(differences)}; use another model_tag")
    if new["val_sha256"] != old.get("val_sha256", new["val_sha256"]):
        print0("note: the validation split has changed since the run began: its earlier losses do not compare")
