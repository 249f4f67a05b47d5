"""
Stage one of two-stage training: encode the images of a set once with an autoencoder; training reads their latents.

    python3 -m scripts.cache_latents --data=photos --autoencoder=taef2_encoder.pth       # makes photos_taef2
    torchrun --standalone --nproc_per_node=8 -m scripts.cache_latents --data=imagenet256 --autoencoder=sd-vae/ --flip

Stores in fp16 each latent's mean and, unless it is zero, its standard deviation; with --flip also the mirrored image's.
Shards go to a hidden folder, renamed at the end: after a kill the same command resumes, with any number of ranks.
"""

import contextlib
import functools

import numpy as np
import torch
import torch.nn.functional as F

from configurator import configure
from nanodiff.common import UserError, in_batches, is_first_rank, print0
from nanodiff.conditions import FILES, GIVEN
from nanodiff.data.dataset import Dataset, DatasetWriter, check_file, open_dataset, verify, write_npy
from nanodiff.data.latents import check_sides, describe_latents
from nanodiff.data.pixels import to_model_range
from nanodiff.device import init_device
from nanodiff.dist import collective, gather_batches, leave_together, wait_for_first_rank
from nanodiff.files import read_json, sha256_of
from nanodiff.models.autoencoder import open_autoencoder
from nanodiff.prepare.parts import images_per_part, write_note

data = ""  # name of an image set, or the path of its folder
autoencoder = ""  # weights of the autoencoder: a file, one of an encoder/decoder pair, or diffusers' folder
name = ""  # name of the latent set; "" = DATA_AUTOENCODER
latent_norm = "channels"  # channels|scale: normalise by the set's mean and std, or by the autoencoder's published scale
flip = False  # also encode the mirrored images, so that training can use --flip
batch_size = 16  # >= 1: images at a time on each rank
overwrite = False  # replace a set of the same name
device_type = ""  # ""|cuda|cpu|mps: "" = the best present
config = configure(globals())

# ---------------------------------------------------------------------------------------------------------------------
# Setup: the source, the autoencoder, the shards to make

if not data or not autoencoder:
    raise UserError("give --data=NAME of an image set and --autoencoder=PATH of its weights")
device = init_device(device_type, config=config)
source = open_dataset(data)
encoder = open_autoencoder(autoencoder).to(device)
check_sides(source, encoder.downsample)
writer = DatasetWriter(name or f"{source.path.name}_{encoder.name}", source.class_names, overwrite)
if writer.path == source.path:
    raise UserError(f"name={name!r} is the set that is read; accepted: another")

copies = 2 if flip else 1
channels = copies * encoder.parts * encoder.latent_channels
second = source.data.given_channels  # channels of second images, scaled to the latents' size
latent_size = source.resolution // encoder.downsample
latent_bytes = 2 * (channels + second) * latent_size**2  # fp16
per_shard = images_per_part(len(source), latent_bytes)

# ---------------------------------------------------------------------------------------------------------------------
# Encode: each rank encodes its shards


def encode(dataset: Dataset, rows: np.ndarray) -> dict:
    """Make the shard of images `rows` (n,) -> its note: its entry in meta.json, and its statistics. A shard is finished
    once its note is on the disk."""
    name = f"{dataset.split}_images_{rows[0]:08d}"
    note = writer.parts / "notes" / f"{name}.json"
    with contextlib.suppress(UserError):  # there is no note, or it or its shard is damaged
        facts = read_json(note)
        check_file(writer.parts, facts["shard"])
        return facts
    parts = []  # (B, channels, h, w) fp16
    sums = torch.zeros(2, encoder.latent_channels, dtype=torch.float64)  # sums of z and z^2, per channel
    for ids in in_batches(rows, batch_size):
        images, cond = dataset.rows(ids)
        images = to_model_range(torch.from_numpy(images).to(device))
        blocks = []
        for x in [images, images.flip(3)][:copies]:
            mean, std = encoder.encode(x)  # (B, C, h, w) fp32
            blocks += [mean, std][: encoder.parts]
            mean = mean.cpu().double()
            std = std.cpu().double()
            sums += torch.stack([mean, mean**2 + std**2]).sum((1, 3, 4))
        if second:
            second_images = to_model_range(torch.from_numpy(cond["given"]).to(device))
            blocks.append(F.interpolate(second_images, mean.shape[2:], mode="area"))
        parts.append(torch.cat(blocks, 1).half().cpu().numpy())
    latents = np.concatenate(parts)
    if not np.isfinite(latents).all():
        raise UserError(f"{encoder.name} gives latents beyond fp16 for images of {dataset.split} {rows[0]}..{rows[-1]}")
    facts = {
        "shard": write_npy(writer.parts / f"{name}.npy", latents),
        "sums": sums.tolist(),
        "count": latents[:, 0].size * copies,
    }
    write_note(note, facts)
    return facts


with writer if is_first_rank() else contextlib.nullcontext():  # only the first rank adds to the set
    if is_first_rank():
        writer.resume({"source": sha256_of(source.path / "meta.json"), "autoencoder": encoder.sha256, "flip": flip})
    verify(source)  # else damaged images would get new, valid hashes
    with collective("the wait for the first rank"):
        wait_for_first_rank()
    sums = np.zeros((2, encoder.latent_channels))
    count = 0
    for split in source.meta["splits"]:
        dataset = open_dataset(data, split)
        batches = dataset.batches(np.arange(len(dataset)), per_shard)
        notes = gather_batches(functools.partial(encode, dataset), batches, f"encoding {split}")  # [] unless rank 0
        for rows, facts in zip(batches, notes):
            writer.add(split, facts["shard"], **dataset.cond(rows))
            if split == "train":
                sums += facts["sums"]
                count += facts["count"]
    writer.meta |= {"kind": "latents", "resolution": latent_size}
    for key in (*FILES, *GIVEN):
        if key in source.meta:
            writer.meta[key] = source.meta[key]
    mean, square = sums / max(count, 1)  # count is 0 on other ranks
    std = np.sqrt((square - mean**2).clip(1e-12))
    latents = describe_latents(encoder, autoencoder) | {"source": source.name, "copies": copies}
    if latent_norm == "channels":
        latents |= {"mean": mean.tolist(), "std": std.tolist()}
    writer.meta["latents"] = latents
print0(f"made {writer.path}: latents of {encoder.latent_channels}x{latent_size}x{latent_size}")
print0(f"train on it: python3 -m scripts.base_train --data={writer.path.name}")
leave_together()
