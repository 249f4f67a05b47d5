"""The codec of latents, which an autoencoder encodes from images once for a set, or at each step."""

import torch

from nanodiff.common import UserError, at
from nanodiff.conditions import DataInfo
from nanodiff.data.pixels import Pixels, to_model_range, to_uint8, visible
from nanodiff.models.autoencoder import Autoencoder, open_autoencoder
from nanodiff.models.unet import no_autocast


class Latents(Pixels):
    """Latents of an autoencoder: x0 = (mean + std eps - offset) / scale, with offset and scale per channel.

    A latent set stores fp16 channels: mean, then std unless it is zero (`parts` is 1 or 2), then the same of the
    mirrored image if `copies` is 2. `path` overrides the autoencoder's path in the data.
    """

    autoencoder = None  # while it is loaded

    def __init__(self, data: DataInfo, device, path: str = ""):
        super().__init__(data, device)
        self.info = info = dict(data.latents)
        self.downsample = info["downsample"]
        self.image_size *= self.downsample
        offset_and_scale = torch.tensor([info["offset"], info["scale"]], device=device)
        self.offset, self.scale = offset_and_scale.view(2, 1, -1, 1, 1)
        self.path = path or info["path"]

    def accept(self, dataset):
        """Accept latents of this autoencoder, or images, which are then encoded on the fly."""
        latents = dataset.data.latents
        if not latents:
            check_sides(dataset, self.downsample)
            super().accept(dataset, kind="images", channels=3, resolution=self.image_size)
            self.keep_loaded()
            return
        if latents["sha256"] != self.info["sha256"]:
            raise UserError(
                f"{dataset.name!r} holds latents of {latents['autoencoder']}, "
                f"the model wants {self.info['autoencoder']}'s"
            )
        super().accept(dataset, channels=self.shape[0] * latents["parts"] * latents["copies"])
        self.info["copies"] = latents["copies"]
        if self.path != self.info["path"]:  # refuse another autoencoder now
            self.decoder()
            self.data.latents["path"] = self.path  # a checkpoint tells it to samples

    def to_x0(self, batch, flip=None, randn_like=None):
        if batch.dtype == torch.uint8:
            with no_autocast(batch):
                mean, std = self.autoencoder.encode(to_model_range(batch, flip))
        else:
            sizes = (self.info["copies"], self.info["parts"], -1)
            copies = batch.float().unflatten(1, sizes)  # (N, copies, parts, C, h, w)
            latent = copies[:, 0]  # (N, parts, C, h, w)
            if flip is not None:
                flip = flip.to(batch.device).view(-1, 1, 1, 1, 1)
                latent = torch.where(flip, copies[:, 1], latent)
            mean = latent[:, 0]
            std = latent[:, -1]
        z = mean
        if randn_like and self.info["parts"] == 2:
            z = mean + std * randn_like(mean)
        return (z - self.offset) / self.scale

    def to_pixels(self, x0):
        autoencoder = self.decoder()  # not kept: training needs the memory
        z = x0.float().to(self.device) * self.scale + self.offset
        with no_autocast(z):
            images = [to_uint8(autoencoder.decode(part)).cpu() for part in z.split(16)]
        return torch.cat(images)

    def to_output(self, x0):
        return self.to_pixels(x0).numpy()

    def preview(self, x0):
        return to_uint8(visible(x0) / 2).cpu()

    def keep_loaded(self):
        self.autoencoder = self.decoder()

    def decoder(self):
        if self.autoencoder:
            return self.autoencoder
        info = self.info
        try:
            if not self.path:
                raise UserError("it is not known which autoencoder made these latents")
            model = open_autoencoder(self.path)
            if info["sha256"] and model.sha256 != info["sha256"]:
                raise UserError(
                    f"these latents were made by {info['autoencoder']} (SHA-256 {info['sha256'][:16]}...), "
                    f"not by {model.name} ({model.sha256[:16]}...)"
                )
            if model.latent_channels != self.shape[0]:
                raise UserError(f"{model.name} has {model.latent_channels} latent channels, the model {self.shape[0]}")
        except UserError as error:
            raise UserError(f"{error}; samples need --autoencoder=PATH; encoding images needs it too") from None
        return model.to(self.device)


def describe_latents(autoencoder, path: str) -> dict:
    """Make DataInfo.latents for this autoencoder's latents, normalised by its published scale and shift."""
    return {
        "autoencoder": autoencoder.name,
        "sha256": autoencoder.sha256,
        "path": path and str(at(path).absolute()),
        "downsample": autoencoder.downsample,
        "parts": autoencoder.parts,
        "copies": 1,
        "offset": [autoencoder.shift] * autoencoder.latent_channels,
        "scale": [1 / autoencoder.scale] * autoencoder.latent_channels,
    }


def latents_of(data: DataInfo, autoencoder: str) -> dict:
    """data.latents, or if they are missing (published weights), made from `autoencoder` or with scale 1."""
    if data.latents:
        return data.latents
    if autoencoder:
        model = open_autoencoder(autoencoder)
    else:
        model = Autoencoder()  # a placeholder
        model.latent_channels = data.channels
    return describe_latents(model, autoencoder)


def check_sides(dataset, unit: int) -> None:
    """Raise UserError unless an autoencoder that downsamples by `unit` can encode the images of the set."""
    kind = dataset.data.kind
    sides = {dataset.resolution}.union(*dataset.buckets)
    if kind != "images" or dataset.channels != 3 or any(side % unit for side in sides):
        raise UserError(
            f"data={dataset.name!r} holds {kind}, {dataset.channels} channels, sides of "
            f"{', '.join(map(str, sorted(sides)))} px; accepted: images, 3 channels, multiples of {unit} px"
        )
