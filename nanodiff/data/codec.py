"""Codecs between stored data, x0 and pixels: images or other arrays as they are, or latents of an autoencoder.

Checkpoints keep a codec's `description`. make_codec makes a codec for training; load_codec makes a trained model's.
"""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from nanodiff.common import UserError
from nanodiff.conditions import describe_conditions, facts_to_match, from_stored, mirror
from nanodiff.models.autoencoder import open_autoencoder


def to_model_range(images: torch.Tensor, flip: torch.Tensor | None = None) -> torch.Tensor:
    """uint8 (N, C, H, W) -> float32 in [-1, 1]; mirrored left-right where `flip` (N,) is True."""
    return mirror(images.float() / 127.5 - 1, flip)


def to_uint8(x: torch.Tensor) -> torch.Tensor:
    """[-1, 1] -> uint8, rounded and clamped."""
    levels = (x.float() + 1) * 127.5
    return levels.round().clamp(0, 255).to(torch.uint8)


def visible(x):
    """Images (N, C, H, W), a tensor or an array -> their first three channels as colours, or the first as gray."""
    return x[:, :3] if x.shape[1] >= 3 else x[:, :1]


class Codec:
    """Stored data <-> x0 <-> uint8 images; see Pixels, Arrays and Latents.

    `undecodable`: why there are no pixels, or "".
    """

    undecodable = ""
    rounding = "round(127.5 (x + 1)), clamped to 0..255"

    def __init__(self, description: dict):
        self.description = description
        channels, side = description["channels"], description["resolution"]
        self.shape = (channels, side, side)  # (C, H, W) of x0; for a set in buckets, a square of the same area
        sizes = description.get("sizes") or [(side, side, 1)]
        self.shapes = [(channels, height, width) for height, width, _ in sizes]  # all there are
        self.counts = np.cumsum([number for _, _, number in sizes])  # cumulative image counts
        self.image_size = side  # of decoded images in pixels

    def sample_shape(self, number: int) -> tuple[int, int, int]:
        """(C, H, W) of a sample's x0: each row of 8 shares a shape; shapes are as frequent as in the data."""
        u = (number // 8 + 0.5) * 0.618033988749895 % 1  # multiples of the golden ratio spread evenly
        return self.shapes[np.searchsorted(self.counts / self.counts[-1], u, side="right")]

    def to_x0(self, stored, flip=None, randn_like=None) -> torch.Tensor:
        """What the data set stores -> x0, float32; mirrored where `flip` (N,).

        A stored latent is a distribution, from which `randn_like` (as torch's) draws; None takes its mean.
        """

    def to_pixels(self, x0) -> torch.Tensor:
        """x0 -> uint8 images (N, 1 or 3, H, W) on the CPU."""

    def to_output(self, x0) -> np.ndarray:
        """x0 -> (N, C, H, W) as the source of the data had them: all channels, dtype and range."""
        return self.to_pixels(x0).numpy()

    def picture(self, output: np.ndarray) -> np.ndarray:
        """What to_output gave -> uint8 (N, 1 or 3, H, W)."""
        return visible(output)

    def preview(self, x0) -> torch.Tensor:
        """x0 during sampling -> uint8 (N, 1 or 3, H, W) on the CPU, without decoding."""

    def keep_loaded(self) -> None:
        """Keep the decoder in memory, to decode batch after batch."""


class Pixels(Codec):
    """Images: uint8 (N, C, H, W) <-> x0 in [-1, 1]."""

    def to_x0(self, stored, flip=None, randn_like=None):
        return to_model_range(stored, flip)

    def to_pixels(self, x0):
        return to_uint8(visible(x0)).cpu()

    def to_output(self, x0):
        return to_uint8(x0).cpu().numpy()

    def preview(self, x0):
        return self.to_pixels(x0)


class Arrays(Pixels):
    """Arrays beyond 8 bits: fp16 (N, C, H, W) in [-1, 1] <-> x0. `range` of the source's values became [-1, 1]."""

    rounding = "clamped to the range of the data"

    def to_x0(self, stored, flip=None, randn_like=None):
        if stored.dtype != torch.float16:
            raise UserError(f"the model makes arrays of {self.description['dtype']}, and is given uint8 images")
        return mirror(stored.float(), flip)

    def to_output(self, x0):
        low, high = self.description["range"]
        dtype = np.dtype(self.description["dtype"])
        share = (x0.double().clamp(-1, 1).cpu().numpy() + 1) / 2
        values = low + share * (high - low)
        if dtype.kind in "ui":
            values = np.rint(values)
        return values.astype(dtype)

    def picture(self, output):
        low, high = self.description["range"]
        share = (visible(output).astype(np.float64) - low) / (high - low)
        return np.rint(255 * share).astype(np.uint8)


class Latents(Codec):
    """Latents of an autoencoder: x0 = (mean + std eps - offset) / scale, with offset and scale per channel.

    A latent set stores fp16 channels: mean, then std unless it is zero (`parts` is 1 or 2), and again for the mirrored
    image if the set has it (`copies`). `autoencoder` encodes images; without it, `path` overrides the decoder's path in
    the description.
    """

    def __init__(self, description: dict, device, autoencoder=None, path: str = ""):
        super().__init__(description)
        self.device = device
        self.info = description["latents"]
        self.image_size = description["resolution"] * self.info["downsample"]
        offset_and_scale = torch.tensor([self.info["offset"], self.info["scale"]], device=device)
        self.offset, self.scale = offset_and_scale.view(2, 1, -1, 1, 1)
        self.autoencoder = autoencoder
        self.path = path or self.info["path"]
        if autoencoder is None:
            try:
                open_matching(self.path, self.info)
            except UserError as error:
                if path:
                    raise
                self.undecodable = f"{error}; give --autoencoder=PATH"

    def to_x0(self, stored, flip=None, randn_like=None):
        if stored.dtype == torch.uint8:
            with torch.autocast(stored.device.type, enabled=False):
                mean, std = self.autoencoder.encode(to_model_range(stored, flip))
        else:
            sizes = (self.info["copies"], self.info["parts"], -1)
            copies = stored.float().unflatten(1, sizes)  # (N, copies, parts, C, h, w)
            latent = copies[:, 0]  # (N, parts, C, h, w)
            if flip is not None:
                flip = flip.to(stored.device).view(-1, 1, 1, 1, 1)
                latent = torch.where(flip, copies[:, 1], latent)
            mean, std = latent[:, 0], latent[:, -1]
        z = mean
        if randn_like and self.info["parts"] == 2:
            z = mean + std * randn_like(mean)
        return (z - self.offset) / self.scale

    def to_pixels(self, x0):
        if self.undecodable:
            return self.preview(x0)
        autoencoder = self._open()  # not kept: training needs the memory
        z = x0.float().to(self.device) * self.scale + self.offset
        with torch.autocast(self.device.type, enabled=False):
            images = [to_uint8(autoencoder.decode(part)).cpu() for part in z.split(16)]
        return torch.cat(images)

    def preview(self, x0):
        return to_uint8(visible(x0) / 2).cpu()

    def keep_loaded(self):
        if not self.undecodable:
            self.autoencoder = self._open()

    def _open(self):
        return self.autoencoder or open_matching(self.path, self.info).to(self.device)


def open_matching(path: str, info: dict):
    """The autoencoder at `path`; UserError unless it made the latents that `info` describes."""
    if not path:
        raise UserError("the model's file does not say which autoencoder made its latents (--autoencoder)")
    model = open_autoencoder(path)
    if info["sha256"] and model.sha256 != info["sha256"]:
        made_by = f"{info['autoencoder']} (SHA-256 {info['sha256'][:16]}...)"
        raise UserError(f"these latents were made by {made_by}, not by {model.name} ({model.sha256[:16]}...)")
    if model.latent_channels != len(info["offset"]):
        raise UserError(f"{model.name} has {model.latent_channels} latent channels, the model {len(info['offset'])}")
    return model


def describe_data(dataset, unit: int = 1) -> dict:
    """What sampling needs to know of the training set; sizes in `unit`s."""
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


def describe_latents(autoencoder, path: str, source: str, copies: int = 1) -> dict:
    """description["latents"] for latents of this autoencoder, normalised by its published scale and shift."""
    return {
        "autoencoder": autoencoder.name,
        "sha256": autoencoder.sha256,
        "path": path,
        "source": source,
        "downsample": autoencoder.downsample,
        "parts": autoencoder.parts,
        "copies": copies,
        "offset": [autoencoder.shift] * autoencoder.latent_channels,
        "scale": [1 / autoencoder.scale] * autoencoder.latent_channels,
    }


def check_same_data(old: dict, new: dict, model_tag: str) -> None:
    """UserError if a run would resume with data that differ from its checkpoint's beyond their location."""
    changed = [key for key in new if key not in ("name", "latents") and new[key] != old.get(key)]
    old_latents = old.get("latents", {})
    new_latents = new.get("latents", {})
    for key in ("sha256", "offset", "scale"):
        if new_latents.get(key) != old_latents.get(key):
            changed.append(f"{key} of the latents")
    if changed:
        raise UserError(f"{model_tag} was trained on data with other {', '.join(changed)}; use another model_tag")


def make_codec(
    dataset,
    device,
    autoencoder: str = "",
    latent_norm: str = "channels",
    flip: bool = False,
    like: dict | None = None,
) -> Codec:
    """For training: Latents for a latent set, or for an image set with the path of an `autoencoder`; else Pixels.

    `latent_norm`: "channels" normalises a latent set by its mean and deviation per channel, "scale" by the
    autoencoder's published scale and shift, as for latents made on the fly. `like`: the description of the model that
    training starts from: latents and vectors are then normalised as that model knows them.
    """
    if flip and dataset.meta["kind"] == "latents" and dataset.meta["latents"]["copies"] < 2:
        raise UserError(f"flip: {dataset.name!r} has no mirrored copies; make it with scripts.cache_latents --flip")
    if like:
        return load_codec(adapted(like, dataset, autoencoder), device, autoencoder, dataset)
    description = describe_data(dataset)
    if description["kind"] == "latents":
        info = dict(dataset.meta["latents"])
        mean, std = info.pop("mean"), info.pop("std")
        if latent_norm == "channels":
            info["offset"], info["scale"] = mean, std
        description["channels"] = len(mean)
        description["latents"] = info
        return Latents(description, device, path=autoencoder)
    if not autoencoder:
        return make_pixels(description)
    model = open_autoencoder(autoencoder).to(device)
    check_sides(dataset, model)
    description = describe_data(dataset, model.downsample)
    description["kind"] = "latents"
    description["channels"] = model.latent_channels
    description["latents"] = describe_latents(model, str(Path(autoencoder).absolute()), dataset.name)
    return Latents(description, device, model)


def adapted(description: dict, dataset, autoencoder: str) -> dict:
    """A model's description with the names, sizes and classes of another set to train it on."""
    unit = 1
    description = {key: value for key, value in description.items() if key != "sizes"}
    if description["kind"] == "latents":
        if dataset.meta["kind"] == "latents" and "latents" not in description:  # a published model's
            description["latents"] = dataset.meta["latents"]
        description["latents"] = latents_of(description, autoencoder)
        if dataset.meta["kind"] == "images":
            unit = description["latents"]["downsample"]
    own = describe_data(dataset, unit)
    keys = ("name", "sha256", "order", "resolution", "sizes", "num_classes", "class_names")
    return description | {key: own[key] for key in keys if key in own}


def make_pixels(description: dict) -> Pixels:
    return Arrays(description) if description["kind"] == "arrays" else Pixels(description)


def load_codec(description: dict, device, autoencoder: str = "", dataset=None) -> Codec:
    """A trained model's codec, from the description in its checkpoint; with `dataset`, it reads that set.

    `autoencoder`: its path if it was moved, or if the model was published without one.
    """
    wanted = {key: description.get(key) for key in ("kind", "channels", "resolution", "range")}  # of the set
    wanted |= facts_to_match(description)
    if description["kind"] != "latents":
        codec = make_pixels(description)
    else:
        info = latents_of(description, autoencoder)
        encoder = None
        if dataset is not None and dataset.meta["kind"] == "latents":
            found = dataset.meta["latents"]
            if found["sha256"] != info["sha256"]:
                made_by = found["autoencoder"]
                raise UserError(f"{dataset.name!r} holds latents of {made_by}, the model wants {info['autoencoder']}'s")
            info["parts"], info["copies"] = found["parts"], found["copies"]
            wanted["channels"] *= info["parts"] * info["copies"]
        elif dataset is not None:  # images, which are encoded on the fly
            encoder = open_matching(autoencoder or info["path"], info).to(device)
            check_sides(dataset, encoder)
            info["parts"] = encoder.parts
            wanted["kind"] = "images"
            wanted["channels"] = 3
            wanted["resolution"] *= encoder.downsample
        codec = Latents(description | {"latents": info}, device, encoder, autoencoder)
    if dataset is not None:
        found = describe_data(dataset)
        for key, value in wanted.items():
            if found.get(key) != value:
                raise UserError(f"data={dataset.name!r} has {key} {found.get(key)}, the model wants {value}")
    return codec


def latents_of(description: dict, autoencoder: str) -> dict:
    """description["latents"]; published weights lack it, and may be used with an `autoencoder` or without."""
    if "latents" in description:
        return dict(description["latents"])
    if autoencoder:
        return describe_latents(open_autoencoder(autoencoder), autoencoder, "")
    unknown = SimpleNamespace(
        name="",
        sha256="",
        latent_channels=description["channels"],
        downsample=8,
        parts=1,
        shift=0.0,
        scale=1.0,
    )
    return describe_latents(unknown, "", "")


def check_sides(dataset, autoencoder) -> None:
    """UserError unless this autoencoder can encode the images of the set."""
    unit, kind = autoencoder.downsample, dataset.meta["kind"]
    sides = {dataset.resolution}.union(*dataset.buckets)
    if kind != "images" or dataset.channels != 3 or any(side % unit for side in sides):
        given = f"{kind}, {dataset.channels} channels, sides of {', '.join(map(str, sorted(sides)))} px"
        raise UserError(f"data={dataset.name!r} holds {given}; accepted: images, 3 channels, multiples of {unit} px")


def stored_images(dataset, ids, codec, device, randn_like=None):
    """x0 (N, C, H, W) and the conditions as models take them; latents are samples if `randn_like` is given, else
    means."""
    images, rows = dataset.rows(ids)
    x0 = codec.to_x0(torch.from_numpy(images).to(device), None, randn_like)
    return x0, from_stored(rows, codec.description, device=device)
