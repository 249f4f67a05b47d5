"""The codec between what a data set stores, x0, and pixels: images as they are, or latents of an autoencoder.

make_codec serves training, load_codec a trained model. A codec is described by its `facts`, which checkpoints keep.
"""

from pathlib import Path

import torch

from nanodiff.common import UserError
from nanodiff.models.autoencoder import open_autoencoder


def to_model_range(images: torch.Tensor, flip: torch.Tensor | None = None) -> torch.Tensor:
    """uint8 (N, C, H, W) -> float32 in [-1, 1], on the same device; mirrored left-right where `flip` (N,) is True."""
    x = images.float() / 127.5 - 1
    return x if flip is None else torch.where(flip.to(x.device)[:, None, None, None], x.flip(3), x)


def to_uint8(x: torch.Tensor) -> torch.Tensor:
    """The inverse of to_model_range: [-1, 1] -> uint8, rounded and clamped."""
    return ((x.float() + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


class Pixels:
    """Images: uint8 (N, C, H, W) <-> x0 in [-1, 1]. Latents has the same methods.

    `stochastic`: True if latents are sampled, so that to_x0 needs eps; `undecodable`: why there are no pixels, or "".
    """

    stochastic = False
    undecodable = ""

    def __init__(self, facts: dict):
        self.facts = facts
        self.shape = (facts["channels"], facts["resolution"], facts["resolution"])  # (C, H, W) of x0
        self.image_size = facts["resolution"]  # side of decoded images in pixels

    def to_x0(self, stored, flip=None, eps=None):
        """What the data set stores -> x0, float32, on the same device; mirrored where `flip` (N,); `eps` like x0."""
        return to_model_range(stored, flip)

    def to_pixels(self, x0) -> torch.Tensor:
        """x0 -> uint8 images (N, C, H, W) on the CPU."""
        return to_uint8(x0).cpu()

    def preview(self, x0) -> torch.Tensor:
        """x0 during sampling -> uint8 (N, 1 or 3, H, W) on the CPU, without decoding."""
        return self.to_pixels(x0)

    def keep_loaded(self) -> None:
        """Keep the decoder in memory from now on, for callers that decode batch after batch."""


class Latents(Pixels):
    """Latents of an autoencoder: x0 = (mean + std eps - offset) / scale, with offset and scale per channel.

    A latent set stores fp16 channels: mean, std unless it is zero, and both for the mirrored image if the set has it
    (`facts["latents"]`: parts, copies). Images are encoded by `autoencoder`. `path`: where the decoder is, if not where
    the facts say; UserError unless it is the one that made the latents.
    """

    def __init__(self, facts: dict, device, autoencoder=None, path: str = ""):
        super().__init__(facts)
        self.device = device
        self.info = facts["latents"]
        self.image_size = facts["resolution"] * self.info["downsample"]
        self.stochastic = self.info["parts"] == 2
        self.offset = torch.tensor(self.info["offset"], device=device).view(1, -1, 1, 1)
        self.scale = torch.tensor(self.info["scale"], device=device).view(1, -1, 1, 1)
        self.autoencoder = autoencoder
        self.path = path or self.info["path"]
        if autoencoder is None:
            try:
                self._open()
            except UserError as error:
                if path:
                    raise
                self.undecodable = f"{error}; give --autoencoder=PATH"

    def to_x0(self, stored, flip=None, eps=None):
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
        z = mean if eps is None or not self.stochastic else mean + std * eps
        return (z - self.offset) / self.scale

    def to_pixels(self, x0) -> torch.Tensor:
        """x0 -> uint8 images (N, 3, H, W) on the CPU; like preview if `undecodable`."""
        if self.undecodable:
            return self.preview(x0)
        autoencoder = self.autoencoder or self._open().to(self.device)  # not kept: training needs the memory
        z = x0.float().to(self.device) * self.scale + self.offset
        with torch.autocast(self.device.type, enabled=False):
            return torch.cat([to_uint8(autoencoder.decode(part)).cpu() for part in z.split(16)])

    def preview(self, x0) -> torch.Tensor:
        """Shows the first three channels as colours, or one as gray."""
        return to_uint8(x0[:, :3] / 2 if x0.shape[1] >= 3 else x0[:, :1] / 2).cpu()

    def keep_loaded(self) -> None:
        if not self.undecodable:
            self.autoencoder = self.autoencoder or self._open().to(self.device)

    def _open(self):
        if not self.path:
            raise UserError("the model's file does not say which autoencoder made its latents")
        return open_matching(self.path, self.info)


def open_matching(path: str, info: dict):
    """The autoencoder at `path`; UserError unless it made the latents that `info` describes."""
    model = open_autoencoder(path)
    if info["sha256"] and model.sha256 != info["sha256"]:
        made_by = f"{info['autoencoder']} (SHA-256 {info['sha256'][:16]}...)"
        raise UserError(f"these latents are of the autoencoder {made_by}, not of {model.name} ({model.sha256[:16]}...)")
    if model.latent_channels != len(info["offset"]):
        raise UserError(f"{model.name} has {model.latent_channels} latent channels, the model {len(info['offset'])}")
    return model


def data_facts(dataset) -> dict:
    """What a model must know of the set that it was trained on, to be sampled from without it."""
    facts = {"name": dataset.name, "kind": dataset.meta["kind"]}
    facts |= {"channels": dataset.channels, "resolution": dataset.resolution}
    return facts | {"num_classes": dataset.num_classes, "class_names": list(dataset.class_names)}


def latent_facts(autoencoder, path: str, source: str, copies: int = 1) -> dict:
    """facts["latents"] for latents of this autoencoder, normalised by its published scale and shift."""
    info = {"autoencoder": autoencoder.name, "sha256": autoencoder.sha256, "path": path, "source": source}
    info |= {"downsample": autoencoder.downsample, "parts": autoencoder.parts, "copies": copies}
    info["offset"] = [autoencoder.shift] * autoencoder.latent_channels
    info["scale"] = [1 / autoencoder.scale] * autoencoder.latent_channels
    return info


def check_same_data(old: dict, facts: dict, model_tag: str) -> None:
    """UserError if a run would resume with data that differ from its checkpoint's in more than their place."""
    theirs = old.get("latents", {})
    ours = facts.get("latents", {})
    if theirs.get("sha256") != ours.get("sha256"):
        was = f"{theirs.get('autoencoder', 'no autoencoder')} (SHA-256 {theirs.get('sha256', '-')[:16]})"
        now = f"{ours.get('autoencoder', 'no autoencoder')} ({ours.get('sha256', '-')[:16]})"
        raise UserError(f"{model_tag} was trained on latents of {was}, not of {now}; use another model_tag")
    changed = [key for key in facts if key not in ("name", "latents") and facts[key] != old.get(key)]
    changed += [key for key in ("offset", "scale") if ours.get(key) != theirs.get(key)]
    if changed:
        raise UserError(f"{model_tag} was trained on data with other {', '.join(changed)}; use another model_tag")


def make_codec(dataset, device, autoencoder: str = "", latent_norm: str = "channels", flip: bool = False):
    """To train: Latents for a latent set, or an image set with `autoencoder`, the path of one; else Pixels.

    `latent_norm`: "channels" normalises a latent set by its mean and deviation per channel, "scale" by the
    autoencoder's published scale and shift, as latents made on the fly always are.
    """
    facts = data_facts(dataset)
    if facts["kind"] == "latents":
        info = dict(dataset.meta["latents"])
        if flip and info["copies"] < 2:
            raise UserError(f"flip: {dataset.name!r} has no mirrored copies; make it with scripts.cache_latents --flip")
        mean, std = info.pop("mean"), info.pop("std")
        if latent_norm == "channels":
            info |= {"offset": mean, "scale": std}
        return Latents(facts | {"channels": len(mean), "latents": info}, device, path=autoencoder)
    if not autoencoder:
        return Pixels(facts)
    model = open_autoencoder(autoencoder)
    if dataset.channels != 3 or dataset.resolution % model.downsample:
        accepted = f"3 channels and multiples of {model.downsample} px"
        given = f"{dataset.channels} channels of {dataset.resolution} px"
        raise UserError(f"autoencoder: {model.name} takes {accepted}, not {given}")
    facts |= {"kind": "latents", "channels": model.latent_channels}
    facts["resolution"] = dataset.resolution // model.downsample
    facts["latents"] = latent_facts(model, str(Path(autoencoder).absolute()), dataset.name)
    return Latents(facts, device, model.to(device))


def load_codec(facts: dict, device, autoencoder: str = "", dataset=None):
    """For a trained model, from the facts in its checkpoint; with `dataset`, to feed it from that set.

    `autoencoder`: path of the autoencoder if it was moved, or for a model published without facts.
    """
    info = facts.get("latents") or _published_latents(facts, autoencoder)
    size = facts["resolution"]
    wanted = (facts["channels"], size)  # channels and side in pixels of what the set must hold
    encoder = None
    if dataset is not None and dataset.meta["kind"] == "latents":
        theirs = dataset.meta["latents"]
        if facts["kind"] == "images":
            raise UserError(f"{dataset.name!r} holds latents, the model was trained on images")
        if theirs["sha256"] != info["sha256"]:
            made_by = theirs["autoencoder"]
            raise UserError(f"{dataset.name!r} holds latents of {made_by}, the model wants {info['autoencoder']}'s")
        info = info | {"parts": theirs["parts"], "copies": theirs["copies"]}
        wanted = (facts["channels"] * info["parts"] * info["copies"], size)
    elif dataset is not None and facts["kind"] == "latents":  # images, which are encoded on the fly
        path = autoencoder or info["path"]
        if not path:
            raise UserError("the model's file does not say which autoencoder made its latents; give --autoencoder=PATH")
        encoder = open_matching(path, info).to(device)
        info = info | {"parts": encoder.parts}
        wanted = (3, size * encoder.downsample)
    given = (dataset.channels, dataset.resolution) if dataset is not None else wanted
    if given != wanted:
        raise UserError(f"data={dataset.name!r} has (channels, pixels) {given}, the model wants {wanted}")
    if facts["kind"] == "images":
        return Pixels(facts)
    return Latents(facts | {"latents": info}, device, encoder, autoencoder)


def _published_latents(facts: dict, autoencoder: str) -> dict:
    """facts["latents"] for published weights, which come without; without `autoencoder`, nothing can be decoded."""
    if autoencoder and facts["kind"] == "latents":
        return latent_facts(open_autoencoder(autoencoder), autoencoder, "")
    info = dict(autoencoder="", sha256="", path="", source="", downsample=8, parts=1, copies=1)
    return info | {"offset": [0.0] * facts["channels"], "scale": [1.0] * facts["channels"]}
