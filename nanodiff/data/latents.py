"""Between what a data set stores, what a model sees (x0), and pixels: images as they are, or latents of an autoencoder.

`make_codec` serves training: images -> x0 in [-1, 1]; a latent set (scripts/cache_latents.py) -> normalised latents;
an image set with an autoencoder -> the same latents, made on the fly. `load_codec` serves a trained model. What a codec
does is told by its `facts`, which are kept in checkpoints.
"""

from pathlib import Path

import torch

from nanodiff.common import UserError
from nanodiff.data.dataloader import to_model_range, to_uint8
from nanodiff.models.autoencoder import open_autoencoder


class Codec:
    """Base class. `facts`: see data_facts; `stochastic`: True if latents are sampled, so that to_x0 needs eps;
    `undecodable`: why to_pixels cannot show pixels, or ""."""

    stochastic, undecodable = False, ""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(C, H, W) of x0."""
        return self.facts["channels"], self.facts["resolution"], self.facts["resolution"]

    @property
    def image_size(self) -> int:
        """Pixels a side of what to_pixels gives."""
        return self.facts["resolution"] * self.facts.get("latents", {"downsample": 1})["downsample"]

    def preview(self, x0) -> torch.Tensor:
        """x0 in the midst of sampling -> uint8 (N, 1 or 3, H, W) on the CPU, at no cost: latents as they are."""
        return self.to_pixels(x0)

    def keep_loaded(self) -> None:
        """For a caller of to_pixels batch after batch: load what it needs once rather than each time."""


class Pixels(Codec):
    """Images: uint8 (N, C, H, W) <-> x0 in [-1, 1]."""

    def __init__(self, facts: dict):
        self.facts = facts

    def to_x0(self, stored, flip=None, eps=None):
        """(N, C, H, W) as the data set stores it -> x0, float32, on the same device; mirrored where `flip` (N,)."""
        return to_model_range(stored, flip)

    def to_pixels(self, x0) -> torch.Tensor:
        """x0 -> uint8 images on the CPU."""
        return to_uint8(x0).cpu()


class Latents(Codec):
    """Latents: x0 = (mean + std eps - offset) / scale, eps being noise, offset and scale (C,) the normalisation.

    Cached ones are stored in fp16 as channels: mean, std unless it is zero, then the same of the mirrored image where
    the set has it (`facts["latents"]`: parts, copies). Others are encoded by `autoencoder` from uint8 images. Raises
    UserError where the autoencoder at `path` is not the one that made the latents.
    """

    def __init__(self, facts: dict, device, autoencoder=None, path: str = ""):
        self.facts, self.device, self.info = facts, device, facts["latents"]
        self.autoencoder, self.path = autoencoder, path or self.info["path"]
        self.offset, self.scale = (
            torch.tensor(self.info[key], device=device).view(1, -1, 1, 1) for key in ("offset", "scale")
        )
        self.undecodable = ""
        if autoencoder is None:
            try:
                self._open()
            except UserError as e:
                if path:
                    raise
                self.undecodable = f"{e}; give --autoencoder=PATH"

    @property
    def stochastic(self) -> bool:
        return self.info["parts"] == 2

    def to_x0(self, stored, flip=None, eps=None):
        """As the data set stores it -> x0 (N, C, h, w) float32; `eps` as x0, or None for the mean."""
        if stored.dtype == torch.uint8:
            with torch.autocast(stored.device.type, enabled=False):
                mean, std = self.autoencoder.encode(to_model_range(stored, flip))
        else:
            blocks = stored.float().unflatten(1, (self.info["copies"], self.info["parts"], -1))  # (N, 2, 2, C, h, w)
            block = blocks[:, 0]
            if flip is not None:
                block = torch.where(flip.to(stored.device).view(-1, 1, 1, 1, 1), blocks[:, 1], block)
            mean, std = block[:, 0], block[:, -1]
        z = mean if eps is None or not self.stochastic else mean + std * eps
        return (z - self.offset) / self.scale

    def to_pixels(self, x0) -> torch.Tensor:
        """x0 -> uint8 images (N, 3, H, W) on the CPU; the first three channels as they are if `undecodable`.

        The autoencoder is loaded for as long as it takes, unless training needs it anyway.
        """
        if self.undecodable:
            return self.preview(x0)
        autoencoder = self.autoencoder or self._open().to(self.device)
        z = x0.float().to(self.device) * self.scale + self.offset
        with torch.autocast(self.device.type, enabled=False):
            return torch.cat([to_uint8(autoencoder.decode(part)).cpu() for part in z.split(16)])

    def preview(self, x0) -> torch.Tensor:
        return to_uint8(x0[:, :3] / 2 if x0.shape[1] >= 3 else x0[:, :1] / 2).cpu()

    def keep_loaded(self) -> None:
        if not self.undecodable:
            self.autoencoder = self.autoencoder or self._open().to(self.device)

    def _open(self):
        if not self.path:
            raise UserError("the file does not say which autoencoder decodes them")
        autoencoder = open_autoencoder(self.path)
        check_autoencoder(autoencoder, self.info)
        return autoencoder


def check_autoencoder(autoencoder, info: dict) -> None:
    """UserError where it is not the one that `info`, the latents' facts, names."""
    if info["sha256"] and autoencoder.sha256 != info["sha256"]:
        raise UserError(
            f"these latents are of the autoencoder {info['autoencoder']} (SHA-256 {info['sha256'][:16]}...), not of "
            f"{autoencoder.name} ({autoencoder.sha256[:16]}...)"
        )
    if autoencoder.latent_channels != len(info["offset"]):
        channels = f"{autoencoder.latent_channels} latent channels"
        raise UserError(f"{autoencoder.name} has {channels}, the model {len(info['offset'])}")


def latent_facts(autoencoder, path: str, source: str, **more) -> dict:
    """What must be known of an autoencoder to use latents of it; as DiT normalises them, by its scale and shift."""
    channels = autoencoder.latent_channels
    facts = dict(autoencoder=autoencoder.name, sha256=autoencoder.sha256, path=path, source=source)
    facts |= dict(downsample=autoencoder.downsample, parts=autoencoder.parts, copies=1)
    return facts | dict(offset=[autoencoder.shift] * channels, scale=[1 / autoencoder.scale] * channels) | more


def data_facts(dataset) -> dict:
    """What a model must know of the set it was trained on, to be sampled from without it."""
    return {
        "name": dataset.name,
        "kind": dataset.meta["kind"],
        "channels": dataset.channels,
        "resolution": dataset.resolution,
        "num_classes": dataset.num_classes,
        "class_names": list(dataset.class_names),
    }


def make_codec(dataset, device, autoencoder: str = "", latent_norm: str = "channels", flip: bool = False) -> Codec:
    """Pixels or Latents, to train on an image set, a latent set, or with `autoencoder`, a path, an image set's latents.

    `latent_norm`: "channels" = by the mean and deviation of each channel over a latent set; "scale" = by the published
    scale and shift of the autoencoder, which is also all that is known of latents made on the fly. Raises UserError
    where these do not fit, or images are to be mirrored (`flip`) that have no mirrored copy in the latent set.
    """
    facts = data_facts(dataset)
    if dataset.meta["kind"] == "latents":
        if flip and dataset.meta["latents"]["copies"] < 2:
            raise UserError(f"flip: {dataset.name!r} has no mirrored copies; make it by scripts.cache_latents --flip")
        info = dict(dataset.meta["latents"])
        stats = {key: info.pop(key) for key in ("mean", "std")}
        if latent_norm == "channels":
            info |= {"offset": stats["mean"], "scale": stats["std"]}
        facts |= {"channels": len(info["offset"]), "latents": info}
        return Latents(facts, device, path=autoencoder)
    if not autoencoder:
        return Pixels(facts)
    model = open_autoencoder(autoencoder)
    if facts["channels"] != 3 or facts["resolution"] % model.downsample:
        given = f"{facts['channels']} channels of {facts['resolution']} px"
        raise UserError(
            f"autoencoder: {model.name} takes 3 channels and multiples of {model.downsample} px, not {given}"
        )
    info = latent_facts(model, str(Path(autoencoder).absolute()), facts["name"])
    facts |= {"kind": "latents", "channels": model.latent_channels, "latents": info}
    return Latents(facts | {"resolution": facts["resolution"] // model.downsample}, device, model.to(device))


def check_same_data(old: dict, facts: dict, model_tag: str) -> None:
    """UserError where a run would go on with data that differ from those of its checkpoint in more than their place."""
    theirs, ours = old.get("latents", {}), facts.get("latents", {})
    if theirs.get("sha256") != ours.get("sha256"):
        was, given = (info.get("autoencoder", "no autoencoder") for info in (theirs, ours))
        raise UserError(
            f"{model_tag} was trained on latents of {was} (SHA-256 {theirs.get('sha256', '-')[:16]}), not of {given} "
            f"({ours.get('sha256', '-')[:16]}): give that autoencoder's, or use another model_tag"
        )
    changed = [key for key in facts if key not in ("name", "latents") and facts[key] != old.get(key)]
    changed += [key for key in ("offset", "scale") if ours.get(key) != theirs.get(key)]
    if changed:
        raise UserError(
            f"{model_tag} was trained on other data, which differ in {', '.join(changed)}; use another model_tag"
        )


def load_codec(facts: dict, device, autoencoder: str = "", dataset=None) -> Codec:
    """For a trained model, from the facts in its checkpoint, and to feed it from `dataset` if that is given.

    `autoencoder`: where that lies now, if it was moved; or the one of a model published without its facts. Raises
    UserError for a data set that the model cannot be fed from.
    """
    latents = facts["kind"] == "latents"
    if latents and "latents" not in facts:  # a published file: weights alone
        if autoencoder:
            info = latent_facts(open_autoencoder(autoencoder), autoencoder, "")
        else:
            info = dict(autoencoder="", sha256="", path="", source="", downsample=8, parts=1, copies=1)
            info |= dict(offset=[0.0] * facts["channels"], scale=[1.0] * facts["channels"])
        facts = facts | {"latents": info}
    source, encoder = facts, None
    if dataset is not None:
        source = data_facts(dataset)
        if latents and source["kind"] == "images":  # encoded as they come
            if not (autoencoder or facts["latents"]["path"]):
                raise UserError(
                    "the model's file does not say which autoencoder its latents are of: give --autoencoder=PATH"
                )
            encoder = open_autoencoder(autoencoder or facts["latents"]["path"]).to(device)
            check_autoencoder(encoder, facts["latents"])
            source |= {"channels": encoder.latent_channels, "resolution": source["resolution"] // encoder.downsample}
            facts = facts | {"latents": facts["latents"] | {"parts": encoder.parts}}
        elif latents:
            theirs = dataset.meta["latents"]
            if theirs["sha256"] != facts["latents"]["sha256"]:
                wanted = facts["latents"]["autoencoder"]
                raise UserError(
                    f"{dataset.name!r} holds latents of {theirs['autoencoder']}, the model wants {wanted}'s"
                )
            source["channels"] = len(theirs["mean"])
            facts = facts | {"latents": facts["latents"] | {key: theirs[key] for key in ("parts", "copies")}}
        elif source["kind"] != "images":
            raise UserError(f"{dataset.name!r} holds latents, the model was trained on images")
        given, wanted = ((f["channels"], f["resolution"]) for f in (source, facts))
        if given != wanted:
            raise UserError(f"data={dataset.name!r} has (channels, pixels) {given}, the model wants {wanted}")
    return Latents(facts, device, encoder, autoencoder) if latents else Pixels(facts)
