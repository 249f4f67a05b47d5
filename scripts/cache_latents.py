"""
Stage one of two-stage training: encode the images of a set once with an autoencoder; training reads their latents.

    python -m scripts.cache_latents --data=photos --autoencoder=taef2_encoder.pth       # makes photos_taef2
    torchrun --standalone --nproc_per_node=8 -m scripts.cache_latents --data=imagenet256 --autoencoder=sd-vae/ --flip

Stores each latent's mean and standard deviation in fp16, with --flip also the mirrored image's. Shards go one by
one to a hidden folder, renamed at the end: after a kill the same command resumes, with any number of ranks.
"""

import contextlib
import json

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from configurator import configure
from nanodiff.common import Progress, UserError, get_dist, in_batches, print0
from nanodiff.conditions import FILES, GIVEN, from_stored, to_model_range
from nanodiff.data.dataset import DatasetWriter, open_dataset, write_shard
from nanodiff.data.latents import check_sides, describe_latents
from nanodiff.data.parts import images_per_part, write_note
from nanodiff.device import init_device
from nanodiff.dist import collective, leave_together
from nanodiff.files import sha256_of
from nanodiff.models.autoencoder import open_autoencoder

data = ""  # name of an image set, or the path of its folder
autoencoder = ""  # weights of the autoencoder: a file, one of an encoder/decoder pair, or a folder
name = ""  # name of the latent set; "" = DATA_AUTOENCODER
latent_norm = "channels"  # channels|scale: normalise by the set's mean and std, or by the autoencoder's published scale
flip = False  # also encode the mirrored images, so that training can use --flip
batch_size = 16  # >= 1: images at a time on each rank
overwrite = False  # replace a set of the same name
device_type = ""  # ""|cuda|cpu|mps: "" = the best that is present
config = configure(globals())

# ---------------------------------------------------------------------------------------------------------------------
# Setup: the source, the autoencoder, the shards to make

if not data or not autoencoder:
    raise UserError("give --data=NAME of an image set and --autoencoder=PATH of its weights")
rank, _, world = get_dist()
device = init_device(device_type)
source = open_dataset(data)
splits = {split: source if split == source.split else open_dataset(data, split) for split in source.meta["splits"]}
encoder = open_autoencoder(autoencoder).to(device)
check_sides(source, encoder)
writer = DatasetWriter(name or f"{source.path.name}_{encoder.name}", source.class_names, overwrite)
stack = contextlib.ExitStack()
if rank == 0:
    stack.enter_context(writer)

copies = 2 if flip else 1
channels = copies * encoder.parts * encoder.latent_channels
second = source.meta.get("given_channels", 0)  # channels of second images, scaled to the latents' size
latent_size = source.resolution // encoder.downsample
latent_bytes = 2 * (channels + second) * latent_size**2  # fp16
per_shard = images_per_part(len(source), latent_bytes)


shards = []  # the note is written when the shard is finished: its entry in meta.json and its statistics
for split, dataset in splits.items():
    for k, rows in enumerate(dataset.batches(np.arange(len(dataset)), per_shard)):
        note = writer.parts / "notes" / f"{split}_{k:03d}.json"
        shards.append((dataset, rows, writer.parts / f"{split}_images_{k:03d}.npy", note))

if rank == 0:
    plan = {
        "source": sha256_of(source.path / "meta.json"),
        "autoencoder": encoder.sha256,
        "flip": flip,
    }
    writer.resume(plan)
    todo = [rows for _, rows, _, note in shards if not note.is_file()]
    num_todo = sum(map(len, todo))
    num_images = sum(len(dataset) for dataset in splits.values())
    print0(f"{num_images:,} images of {data!r}, {num_todo:,} to encode in {len(todo)} shards")
if world > 1:
    with collective("the wait for the plan"):
        dist.barrier()

# ---------------------------------------------------------------------------------------------------------------------
# Encode: each rank encodes its shards. A shard is done once its note is on the disk.

mine = [shard for shard in shards[rank::world] if not shard[-1].is_file()]
with Progress(sum(len(rows) for _, rows, _, _ in mine), "images", "encoding") as bar:
    for dataset, rows, file, note in mine:
        encoded = []  # (B, channels, h, w) fp16
        sums = torch.zeros(2, encoder.latent_channels, dtype=torch.float64)  # sums of z and z^2, per channel
        for ids in in_batches(rows, batch_size):
            images, cond = dataset.rows(ids)
            images = to_model_range(torch.from_numpy(images).to(device))
            blocks = []
            for x in [images, images.flip(3)][:copies]:
                mean, std = encoder.encode(x)  # (B, C, h, w) fp32
                blocks += [mean, std][: encoder.parts]
                mean, std = mean.cpu().double(), std.cpu().double()
                sums[0] += mean.sum((0, 2, 3))
                sums[1] += (mean**2 + std**2).sum((0, 2, 3))
            if second:
                given = from_stored(cond, {}, device=device)["given"]
                blocks.append(F.interpolate(given, mean.shape[2:], mode="area"))
            encoded.append(torch.cat(blocks, 1).half().cpu().numpy())
            bar.update(len(ids))
        latents = np.concatenate(encoded)
        if not np.isfinite(latents).all():
            which = f"{dataset.split} {rows[0]}..{rows[-1]}"
            raise UserError(f"{encoder.name} gives latents beyond fp16 for images of {which}")
        facts = {
            "shard": write_shard(file, latents, dataset.captions(rows)),
            "sums": sums.tolist(),
            "count": latents[:, 0].size * copies,
        }
        write_note(note, facts)

# ---------------------------------------------------------------------------------------------------------------------
# Labels, vectors, statistics, the name

if world > 1:
    with collective("the wait for the other ranks' shards"):
        dist.barrier()
if rank == 0:
    writer.meta |= {"kind": "latents", "resolution": latent_size}
    writer.meta |= {name: source.meta[name] for name in (*FILES, *GIVEN) if name in source.meta}
    sums, count = torch.zeros(2, encoder.latent_channels, dtype=torch.float64), 0
    for dataset, rows, _, note in shards:
        facts = json.loads(note.read_bytes())
        writer.add(dataset.split, facts["shard"], **dataset.cond(rows))
        if dataset.split == "train":
            sums += torch.tensor(facts["sums"], dtype=torch.float64)
            count += facts["count"]
    mean, square = sums / count
    std = (square - mean**2).clamp(min=1e-12).sqrt()
    latents = describe_latents(encoder, autoencoder) | {"source": source.name, "copies": copies}
    if latent_norm == "channels":
        latents |= {"mean": mean.tolist(), "std": std.tolist()}
    writer.meta["latents"] = latents
    stack.close()
    shape = f"{encoder.latent_channels}x{latent_size}x{latent_size}"
    print0(f"made {writer.path}: {num_images:,} latents of {shape}")
    print0(f"train on it: python -m scripts.base_train --data={writer.path.name}")
leave_together()
