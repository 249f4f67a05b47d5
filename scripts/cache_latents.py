"""
Stage one of two-stage training: the images of a set go through an autoencoder once, and training reads their latents.

    python -m scripts.cache_latents --data=photos --autoencoder=taef2_encoder.pth       # makes photos_taef2
    torchrun --standalone --nproc_per_node=8 -m scripts.cache_latents --data=imagenet256 --autoencoder=sd-vae/ --flip

Kept in fp16: mean and standard deviation of each latent, from which training draws, and with --flip those of the
mirrored image. Shards are written one after the other into a hidden folder, which is renamed at the end: the same
command goes on where a killed one stopped, with any number of ranks.
"""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from configurator import configure
from nanodiff.common import Progress, UserError, collective, get_dist, leave_together, print0
from nanodiff.data.dataloader import to_model_range
from nanodiff.data.dataset import open_dataset
from nanodiff.data.dataset_writer import (
    DISK_ERRORS,
    DTYPES,
    FORMAT,
    check_free,
    data_dir,
    is_name,
    lock_set,
    npy_header,
    publish,
)
from nanodiff.data.latents import latent_facts
from nanodiff.device import init_device
from nanodiff.files import fsync_dir, write_atomic
from nanodiff.models.autoencoder import open_autoencoder

data = ""  # name of an image set, or the path of its folder
autoencoder = ""  # its weights: a file, one of a pair of encoder and decoder, or a folder
name = ""  # of the latent set; "" = made from the two
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
source = open_dataset(data, "train")
splits = {split: open_dataset(data, split) for split in source.meta["splits"]}
encoder = open_autoencoder(autoencoder).to(device)
if source.meta["kind"] != "images" or source.channels != 3 or source.resolution % encoder.downsample:
    given = f"{source.meta['kind']}, {source.channels} channels of {source.resolution} px"
    raise UserError(f"data={data!r} holds {given}; accepted: images, 3 channels, multiples of {encoder.downsample} px")
name = name or f"{source.path.name}_{encoder.name}"
if not is_name(name):
    raise UserError(f"name={name!r} cannot name a data set; accepted: letters, digits and _ . + - (no /)")
path, parts_dir = data_dir() / name, data_dir() / f".{name}.parts"
check_free(path, overwrite)
lock = lock_set(path) if rank == 0 else None

# A shard is what is lost at most of a rank's work: a 64th of the set, 64 to 8,192 images, at most 256 MiB
copies, latent_size = 1 + flip, source.resolution // encoder.downsample
channels = copies * encoder.parts * encoder.latent_channels
per_shard = min(8192, max(64, len(source) // 64), max(1, 2**28 // (2 * channels * latent_size**2)))
shards = [
    (split, k, range(first, min(first + per_shard, len(dataset))))
    for split, dataset in splits.items()
    for k, first in enumerate(range(0, len(dataset), per_shard))
]
source_sha256 = hashlib.sha256((source.path / "meta.json").read_bytes()).hexdigest()
plan = dict(format=FORMAT, source=source_sha256, autoencoder=encoder.sha256, flip=flip, per_shard=per_shard)
todo = [None]
if rank == 0:
    plan_file, plan_json = parts_dir / "plan.json", json.dumps(plan).encode()
    if parts_dir.exists() and not (plan_file.is_file() and plan_file.read_bytes() == plan_json):
        print0(f"{parts_dir} was begun with other images or another autoencoder, and is begun anew")
        shutil.rmtree(parts_dir)
    parts_dir.mkdir(exist_ok=True)
    write_atomic(plan_file, plan_json)
    todo = [[i for i, (split, k, _) in enumerate(shards) if not (parts_dir / f"{split}_{k:03d}.json").is_file()]]
if world > 1:
    with collective("the broadcast of what is to be done"):
        dist.broadcast_object_list(todo, src=0)
todo = todo[0]
num_images = sum(len(dataset) for dataset in splits.values())
left = sum(len(shards[i][2]) for i in todo)
print0(f"{num_images:,} images of {data!r}, {left:,} to encode, in {len(todo)} shards of up to {per_shard:,} images")

# ---------------------------------------------------------------------------------------------------------------------
# Encode: each rank its shards, each shard a file and, once that is on the disk, what is to be known of it

mine = todo[rank::world]
with Progress(sum(len(shards[i][2]) for i in mine), "images", "encoding") as bar:
    for split, k, rows in (shards[i] for i in mine):
        latents = np.empty((len(rows), channels, latent_size, latent_size), DTYPES["latents"])
        sums = torch.zeros(2, encoder.latent_channels, dtype=torch.float64)  # of z and z^2, by channel
        for first in range(0, len(rows), batch_size):
            x = to_model_range(torch.from_numpy(splits[split].images(rows[first : first + batch_size])).to(device))
            blocks = []
            for images in (x, x.flip(3))[:copies]:
                mean, std = encoder.encode(images)  # (B, C, h, w) fp32
                blocks += [mean, std][: encoder.parts]
                mean, std = mean.cpu().double(), std.cpu().double()
                sums += torch.stack([mean.sum((0, 2, 3)), (mean**2 + std**2).sum((0, 2, 3))])
            latents[first : first + len(x)] = torch.cat(blocks, 1).half().cpu().numpy()
            bar.update(len(x))
        if not np.isfinite(latents).all():
            raise UserError(f"{encoder.name} gives latents beyond fp16 for images of {split} {rows[0]}..{rows[-1]}")
        file, header = parts_dir / f"{split}_images_{k:03d}.npy", npy_header(latents.dtype, latents.shape)
        entry = {"file": file.name, "num_images": len(rows), "bytes": len(header) + latents.nbytes}
        entry["sha256"] = hashlib.sha256(header + latents.data).hexdigest()
        entry |= {"sums": sums.tolist(), "count": len(rows) * copies * latent_size**2}
        try:
            write_atomic(file, header, latents.data)
            fsync_dir(parts_dir)
            write_atomic(parts_dir / f"{split}_{k:03d}.json", json.dumps(entry).encode())
        except OSError as e:
            if e.errno not in DISK_ERRORS:
                raise
            raise UserError(f"{parts_dir}: {e.strerror}; whole shards are kept, the same command goes on") from e

# ---------------------------------------------------------------------------------------------------------------------
# The end: labels, statistics, the name

if world > 1:
    with collective("the wait for the other ranks' shards"):
        dist.barrier()
if rank == 0:
    meta = {"format": FORMAT, "kind": "latents", "channels": channels, "resolution": latent_size}
    meta |= {"source": source.name, "seed": source.meta["seed"], "class_names": source.class_names, "splits": {}}
    notes = {split: [] for split in splits}
    for split, k, _ in shards:
        notes[split].append(json.loads((parts_dir / f"{split}_{k:03d}.json").read_bytes()))
    for split, dataset in splits.items():
        entries = [{key: note[key] for key in ("file", "num_images", "bytes", "sha256")} for note in notes[split]]
        meta["splits"][split] = {"num_images": len(dataset), "labels": None, "shards": entries}
        if source.class_names:
            file, labels = parts_dir / f"{split}_labels.npy", dataset.labels(np.arange(len(dataset)))
            header = npy_header(labels.dtype, labels.shape)
            write_atomic(file, header, labels.data)
            digest = hashlib.sha256(header + labels.data).hexdigest()
            described = {"file": file.name, "bytes": len(header) + labels.nbytes, "sha256": digest}
            meta["splits"][split]["labels"] = described
    mean, square = sum(torch.tensor(n["sums"], dtype=torch.float64) for n in notes["train"]) / sum(
        n["count"] for n in notes["train"]
    )
    std = (square - mean**2).clamp(min=1e-12).sqrt()
    meta["latents"] = latent_facts(encoder, str(Path(autoencoder).expanduser().absolute()), source.name, copies=copies)
    meta["latents"] |= {"mean": mean.tolist(), "std": std.tolist()}
    publish(parts_dir, path, meta, overwrite)
    for leftover in (*path.glob(".*"), *path.glob("train_*.json"), *path.glob("val_*.json"), path / "plan.json"):
        leftover.unlink()  # killed writers' files; notes; the plan: only now, so that a kill before it loses nothing
    size = sum(entry["bytes"] for part in meta["splits"].values() for entry in part["shards"])
    print0(
        f"made {path}: {num_images:,} latents of {encoder.latent_channels}x{latent_size}x{latent_size}, "
        f"{size / 1e6:,.1f} MB, mean {mean.mean():.3f}, std {std.mean():.3f}; "
        f"train on it: python -m scripts.base_train --data={path.name}"
    )
leave_together()
