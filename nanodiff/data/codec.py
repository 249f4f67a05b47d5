"""Choose the codec between a data set, x0 and pixels: Pixels, Arrays or Latents.

Checkpoints keep a codec's `description`. make_codec makes a codec for training, load_codec that of a trained model.
"""

from nanodiff.common import UserError
from nanodiff.conditions import FACTS, GIVEN, describe_conditions
from nanodiff.data.pixels import Arrays, Pixels

# Keys that describe only the set; fine-tuning takes them from the new one
OWN = ("name", "sha256", "resolution", "sizes", "num_classes", "class_names")


def make_codec(
    dataset,
    device,
    autoencoder: str = "",
    flip: bool = False,
    like: dict | None = None,
) -> Pixels:
    """The codec for training: Latents for a latent set, or for images with the path of an `autoencoder`; else Pixels
    or Arrays.

    Latents are normalised by the autoencoder's published scale and shift if they are made on the fly or with
    latent_norm=scale; else by the set's mean and deviation per channel. `like`: the description of the model that
    training starts from, whose normalisation of latents and vectors is kept.
    """
    stored = dataset.meta.get("latents")
    if flip and stored and stored["copies"] < 2:
        raise UserError(f"flip: {dataset.name!r} has no mirrored copies; make it with scripts.cache_latents --flip")
    unit = 1
    description = {key: value for key, value in (like or {}).items() if key not in OWN}
    if description.get("kind") == "latents" or (not like and (stored or autoencoder)):
        if stored:
            description.setdefault("latents", stored)
        from nanodiff.data.latents import latents_of  # a door: pixels need no autoencoder

        info = latents_of(description, autoencoder)
        if not like and "mean" in info:
            info["offset"] = info.pop("mean")
            info["scale"] = info.pop("std")
        if not stored:
            unit = info["downsample"]
        description |= {"kind": "latents", "channels": len(info["offset"]), "latents": info}
    own = describe_data(dataset, unit)
    if like:
        own = {key: value for key, value in own.items() if key in (*OWN, *GIVEN)}
    return load_codec(own | description, device, autoencoder, dataset)


def load_codec(description: dict, device, autoencoder: str = "", dataset=None) -> Pixels:
    """A trained model's codec, from the description in its checkpoint; with `dataset`, it reads that set.

    `autoencoder`: its path if it was moved, or if the model was published without one.
    """
    facts = ("kind", "channels", "resolution", "range", *FACTS[1:])  # classes are matched by name
    wanted = {key: description.get(key) or 0 for key in facts}  # what the set must have
    if description["kind"] == "images":
        codec = Pixels(description)
    elif description["kind"] == "arrays":
        codec = Arrays(description)
    else:
        from nanodiff.data.latents import Latents, check_sides, latents_of, open_matching  # a door

        info = latents_of(description, autoencoder)
        encoder = None
        if dataset is not None and dataset.meta["kind"] == "latents":
            found = dataset.meta["latents"]
            if found["sha256"] != info["sha256"]:
                raise UserError(
                    f"{dataset.name!r} holds latents of {found['autoencoder']}, the model wants {info['autoencoder']}'s"
                )
            info["parts"] = found["parts"]
            info["copies"] = found["copies"]
            wanted["channels"] *= info["parts"] * info["copies"]
        elif dataset is not None:  # images, which are encoded on the fly
            encoder = open_matching(autoencoder or info["path"], info).to(device)
            check_sides(dataset, encoder)
            info["parts"] = encoder.parts
            wanted |= {"kind": "images", "channels": 3, "resolution": wanted["resolution"] * encoder.downsample}
        codec = Latents(description | {"latents": info}, device, encoder, autoencoder)
    if dataset is not None:
        found = describe_data(dataset)
        for key, value in wanted.items():
            has = found.get(key) or 0
            if has != value:
                raise UserError(f"data={dataset.name!r} has {key} {has}, the model wants {value}")
    return codec


def describe_data(dataset, unit: int = 1) -> dict:
    """What sampling must know of the training set; a `unit` of its sizes is that many pixels."""
    description = {
        "name": dataset.name,
        "kind": dataset.meta["kind"],
        "channels": dataset.channels,
        "resolution": dataset.resolution // unit,
        "sha256": dataset.sha256,
        **describe_conditions(dataset.meta),
    }
    if description["kind"] == "arrays":
        description["range"] = dataset.meta["range"]
        description["dtype"] = dataset.meta["dtype"]
    if list(dataset.buckets) != [(dataset.resolution, dataset.resolution)]:
        description["sizes"] = [
            [height // unit, width // unit, len(bucket)] for (height, width), bucket in dataset.buckets.items()
        ]
    return description


def check_same_data(old: dict, new: dict, model_tag: str) -> None:
    """Raise UserError if a run would resume with data other than its checkpoint's; their location may differ."""
    changed = [key for key in new if key not in ("name", "latents") and new[key] != old.get(key)]
    old_latents = old.get("latents", {})
    new_latents = new.get("latents", {})
    for key in ("sha256", "offset", "scale"):
        if new_latents.get(key) != old_latents.get(key):
            changed.append(f"{key} of the latents")
    if changed:
        raise UserError(f"{model_tag} was trained on data with other {', '.join(changed)}; use another model_tag")
