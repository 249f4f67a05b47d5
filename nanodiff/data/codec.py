"""Codecs between stored data, x0 and pixels: images as they are, or latents of an autoencoder.

Checkpoints keep a codec's `description`. make_codec makes a codec for training; load_codec makes a trained model's.
"""

from pathlib import Path

import numpy as np
import torch

from nanodiff.common import UserError
from nanodiff.models.autoencoder import open_autoencoder


def to_model_range(images: torch.Tensor, flip: torch.Tensor | None = None) -> torch.Tensor:
    """uint8 (N, C, H, W) -> float32 in [-1, 1]; mirrored left-right where `flip` (N,) is True."""
    x = images.float() / 127.5 - 1
    return x if flip is None else torch.where(flip.to(x.device)[:, None, None, None], x.flip(3), x)


def to_uint8(x: torch.Tensor) -> torch.Tensor:
    """[-1, 1] -> uint8, rounded and clamped."""
    return ((x.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


class Pixels:
    """Images: uint8 (N, C, H, W) <-> x0 in [-1, 1]. Latents has the same methods.

    `undecodable`: why there are no pixels, or "".
    """

    undecodable = ""

    def __init__(self, description: dict):
        self.description = description
        channels, side = description["channels"], description["resolution"]
        self.shape = (channels, side, side)  # (C, H, W) of x0; for a set in buckets, a square of the same area
        sizes = description.get("sizes") or [(side, side, 1)]
        self.shapes = [(channels, h, w) for h, w, _ in sizes]  # all there are
        self.counts = np.cumsum([n for *_, n in sizes])  # cumulative image counts
        self.image_size = side  # of decoded images in pixels

    def sample_shape(self, number: int) -> tuple[int, int, int]:
        """(C, H, W) of a sample's x0: each row of 8 shares a shape; shapes are as frequent as in the data."""
        u = (number // 8 + 0.5) * 0.618033988749895 % 1  # multiples of the golden ratio spread evenly
        return self.shapes[np.searchsorted(self.counts / self.counts[-1], u, side="right")]

    def to_x0(self, stored, flip=None, randn_like=None):
        """What the data set stores -> x0, float32; mirrored where `flip` (N,).

        A stored latent is a distribution, from which `randn_like` (as torch's) draws; None takes its mean.
        """
        return to_model_range(stored, flip)

    def to_pixels(self, x0) -> torch.Tensor:
        """x0 -> uint8 images (N, C, H, W) on the CPU."""
        return to_uint8(x0).cpu()

    def preview(self, x0) -> torch.Tensor:
        """x0 during sampling -> uint8 (N, 1 or 3, H, W) on the CPU, without decoding."""
        return self.to_pixels(x0)

    def keep_loaded(self) -> None:
        """Keep the decoder in memory, to decode batch after batch."""


class Latents(Pixels):
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
        self.offset = torch.tensor(self.info["offset"], device=device).view(1, -1, 1, 1)
        self.scale = torch.tensor(self.info["scale"], device=device).view(1, -1, 1, 1)
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
            blocks = stored.float().unflatten(1, sizes)  # (N, copies, parts, C, h, w)
            block = blocks[:, 0]
            if flip is not None:
                block = torch.where(flip.to(stored.device).view(-1, 1, 1, 1, 1), blocks[:, 1], block)
            mean, std = block[:, 0], block[:, -1]
        z = mean + std * randn_like(mean) if randn_like and self.info["parts"] == 2 else mean
        return (z - self.offset) / self.scale

    def to_pixels(self, x0) -> torch.Tensor:
        if self.undecodable:
            return self.preview(x0)
        autoencoder = self._open()  # not kept: training needs the memory
        z = x0.float().to(self.device) * self.scale + self.offset
        with torch.autocast(self.device.type, enabled=False):
            return torch.cat([to_uint8(autoencoder.decode(part)).cpu() for part in z.split(16)])

    def preview(self, x0) -> torch.Tensor:
        """The first three channels as colours, or one as gray."""
        return to_uint8(x0[:, :3] / 2 if x0.shape[1] >= 3 else x0[:, :1] / 2).cpu()

    def keep_loaded(self) -> None:
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
    """Facts about the training set that sampling needs without it; sizes in `unit`s."""
    description = {"name": dataset.name, "kind": dataset.meta["kind"]}
    description |= {"channels": dataset.channels, "resolution": dataset.resolution // unit, "sha256": dataset.sha256}
    if list(dataset.buckets) != [(dataset.resolution, dataset.resolution)]:  # height, width, number of images
        description["sizes"] = [[h // unit, w // unit, len(bucket)] for (h, w), bucket in dataset.buckets.items()]
    return description | {"num_classes": dataset.num_classes, "class_names": list(dataset.class_names)}


def describe_latents(autoencoder, path: str, source: str, copies: int = 1) -> dict:
    """description["latents"] for latents of this autoencoder, normalised by its published scale and shift."""
    info = {"autoencoder": autoencoder.name, "sha256": autoencoder.sha256, "path": path, "source": source}
    info |= {"downsample": autoencoder.downsample, "parts": autoencoder.parts, "copies": copies}
    info["offset"] = [autoencoder.shift] * autoencoder.latent_channels
    info["scale"] = [1 / autoencoder.scale] * autoencoder.latent_channels
    return info


def check_same_data(old: dict, description: dict, model_tag: str) -> None:
    """UserError if a run would resume with data that differ from its checkpoint's beyond their location."""
    theirs = old.get("latents", {})
    ours = description.get("latents", {})
    if theirs.get("sha256") != ours.get("sha256"):
        names = [latents.get("autoencoder", "no autoencoder") for latents in (theirs, ours)]
        raise UserError(f"{model_tag} was trained on latents of {names[0]}, not of this {names[1]}")
    old = {"sha256": description["sha256"]} | old  # older checkpoints lack the hash
    changed = [key for key in description if key not in ("name", "latents") and description[key] != old.get(key)]
    changed += [key for key in ("offset", "scale") if ours.get(key) != theirs.get(key)]
    if changed:
        raise UserError(f"{model_tag} was trained on data with other {', '.join(changed)}; use another model_tag")


def make_codec(dataset, device, autoencoder: str = "", latent_norm: str = "channels", flip: bool = False):
    """For training: Latents for a latent set, or for an image set with the path of an `autoencoder`; else Pixels.

    `latent_norm`: "channels" normalises a latent set by its mean and deviation per channel, "scale" by the
    autoencoder's published scale and shift, as latents made on the fly always are.
    """
    description = describe_data(dataset)
    if description["kind"] == "latents":
        info = dict(dataset.meta["latents"])
        if flip and info["copies"] < 2:
            raise UserError(f"flip: {dataset.name!r} has no mirrored copies; make it with scripts.cache_latents --flip")
        mean, std = info.pop("mean"), info.pop("std")
        if latent_norm == "channels":
            info |= {"offset": mean, "scale": std}
        return Latents(description | {"channels": len(mean), "latents": info}, device, path=autoencoder)
    if not autoencoder:
        return Pixels(description)
    model = open_autoencoder(autoencoder).to(device)
    check_sides(dataset, model)
    description = describe_data(dataset, model.downsample) | {"kind": "latents", "channels": model.latent_channels}
    description["latents"] = describe_latents(model, str(Path(autoencoder).absolute()), dataset.name)
    return Latents(description, device, model)


def load_codec(description: dict, device, autoencoder: str = "", dataset=None):
    """A trained model's codec, from the description in its checkpoint; with `dataset`, it reads that set.

    `autoencoder`: its path if it was moved, or if the model was published without description.
    """
    channels, size = description["channels"], description["resolution"]
    if description["kind"] == "images":
        if dataset is not None:
            check_images(dataset, "images", channels, size)
        return Pixels(description)
    if "latents" in description:
        info = description["latents"]
    elif autoencoder:
        info = describe_latents(open_autoencoder(autoencoder), autoencoder, "")
    else:
        info = dict(autoencoder="", sha256="", path="", source="", downsample=8, parts=1, copies=1)
        info |= {"offset": [0.0] * channels, "scale": [1.0] * channels}
    encoder = None
    if dataset is not None and dataset.meta["kind"] == "latents":
        theirs = dataset.meta["latents"]
        if theirs["sha256"] != info["sha256"]:
            wanted = info["autoencoder"]
            raise UserError(f"{dataset.name!r} holds latents of {theirs['autoencoder']}, the model wants {wanted}'s")
        info = info | {"parts": theirs["parts"], "copies": theirs["copies"]}
        check_images(dataset, "latents", channels * info["parts"] * info["copies"], size)
    elif dataset is not None:  # images, which are encoded on the fly
        encoder = open_matching(autoencoder or info["path"], info).to(device)
        info = info | {"parts": encoder.parts}
        check_images(dataset, "images", 3, size * encoder.downsample)
    return Latents(description | {"latents": info}, device, encoder, autoencoder)


def check_sides(dataset, autoencoder) -> None:
    """UserError unless this autoencoder can encode the images of the set."""
    unit, kind = autoencoder.downsample, dataset.meta["kind"]
    for height, width in [(dataset.resolution, dataset.resolution), *dataset.buckets]:
        if kind != "images" or dataset.channels != 3 or height % unit or width % unit:
            given = f"{kind}, {dataset.channels} channels of {height}x{width} px"
            wanted = f"images, 3 channels, multiples of {unit} px"
            raise UserError(f"data={dataset.name!r} holds {given}; accepted: {wanted}")


def check_images(dataset, *wanted) -> None:
    """UserError unless a set is of this kind, number of channels and resolution."""
    given = (dataset.meta["kind"], dataset.channels, dataset.resolution)
    if given != wanted:
        raise UserError(f"data={dataset.name!r} has (kind, channels, pixels) {given}, the model wants {wanted}")


def stored_images(dataset, ids, codec, device, randn_like=None):
    """x0 (N, C, H, W) and labels (N,); latents are samples if `randn_like` is given, else means."""
    stored = torch.from_numpy(dataset.images(ids)).to(device)
    return codec.to_x0(stored, None, randn_like), torch.from_numpy(dataset.labels(ids)).to(device)
