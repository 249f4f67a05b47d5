"""What scripts/bench.py times: a training step, a batch of samples, a pass over a data set.

Each is made of `spec`, a dict of the bench's settings and of one candidate, and gives `step`, the function to time;
{name: function}, those to time one by one, with the device idle before and after each; and facts, a dict of numbers.
"""

import itertools
import os
import resource
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import torch

from nanodiff.common import get_dist
from nanodiff.data.dataloader import DataLoader
from nanodiff.data.dataset import DatasetWriter, open_dataset
from nanodiff.data.latents import Latents, Pixels, latent_facts, make_codec
from nanodiff.device import choose_dtype
from nanodiff.diffusion.flow import FlowMatching
from nanodiff.diffusion.gaussian import GaussianDiffusion
from nanodiff.diffusion.process import choose_sampler
from nanodiff.diffusion.sampling import SampleSettings, sample_images
from nanodiff.models.autoencoder import open_autoencoder
from nanodiff.models.build import build_model
from nanodiff.models.dit import DiTConfig
from nanodiff.models.unet import UNetConfig
from nanodiff.training.ema import EMA
from nanodiff.training.optim import LossScaler, make_optimizer

# Sets to read: kind, channels, side as stored. The latents are like SD's: mean and deviation of 4 channels.
SETS = {"32 px": ("images", 3, 32), "256 px": ("images", 3, 256), "latents of 256 px": ("latents", 8, 32)}


def open_data(spec: dict, device: torch.device):
    """The codec, and an iterator of batches on the device: stored images (N, C, H, W), labels (N,).

    Synthetic batches are one batch again and again.
    """
    n, size, (rank, _, world) = spec["batch_size"], spec["image_size"], get_dist()
    if spec["data"]:
        dataset = open_dataset(spec["data"], "train")
        codec = make_codec(dataset, device, spec["autoencoder"])
        return codec, DataLoader(dataset, n, n * world, rank, world, seed=0, device=device)
    facts = dict(kind="images", channels=spec["channels"], resolution=size, num_classes=spec["num_classes"])
    codec, g = Pixels(facts), torch.Generator().manual_seed(1)
    stored = torch.randint(256, (n, spec["channels"], size, size), dtype=torch.uint8, generator=g)
    if spec["autoencoder"]:
        encoder = open_autoencoder(spec["autoencoder"]).to(device)
        facts |= dict(kind="latents", channels=encoder.latent_channels, resolution=size // encoder.downsample)
        codec = Latents(facts | {"latents": latent_facts(encoder, spec["autoencoder"], "")}, device, encoder)
        if not spec["online"]:
            stored = torch.randn(n, encoder.parts * codec.shape[0], *codec.shape[1:], generator=g).half()
    labels = torch.arange(n) % max(spec["num_classes"], 1)
    return codec, itertools.repeat((stored.to(device), labels.to(device)))


def open_model(spec: dict, facts: dict, device: torch.device):
    """The backbone; the same, compiled if it is to be; process; autocast."""
    # all but ours learn the variance, as published: twice the channels
    process = FlowMatching() if spec["arch"] == "dit" else GaussianDiffusion(variance="learned_range")
    shape = dict(image_size=facts["resolution"], in_channels=facts["channels"], num_classes=facts["num_classes"])
    shape["out_channels"] = process.out_channels(facts["channels"])
    if spec["arch"] == "unet":
        model_config = UNetConfig.from_depth(spec["depth"], num_res_blocks=spec["num_res_blocks"], **shape)
    else:
        block = "modern" if spec["arch"] == "dit" else "classic"
        model_config = DiTConfig.from_depth(spec["depth"], patch_size=spec["patch_size"], block=block, **shape)
    model = build_model(replace(model_config, checkpointing=spec["checkpointing"]), device, 0)
    dtype = choose_dtype(spec["dtype"], device)
    autocast = nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype=dtype)
    return model, torch.compile(model, dynamic=False) if spec["compile"] else model, process, autocast


def train(spec: dict, device: torch.device, source=None):
    """A training step, of the trainer or, where spec["reference"], as published; noise and t are always the same.

    `source`: in place of open_data's.
    """
    codec, batches = source or open_data(spec, device)
    raw_model, model, process, autocast = open_model(spec, codec.facts, device)
    g, n, world = torch.Generator().manual_seed(1), spec["batch_size"], get_dist()[2]
    noise = torch.randn(n, *codec.shape, generator=g).to(device)
    t = (torch.rand(n, generator=g) * (process.num_timesteps or 1)).to(device)
    t = t.long() if process.num_timesteps else t
    scaler = LossScaler(enabled=choose_dtype(spec["dtype"], device) == torch.float16)
    num_params = sum(p.numel() for p in raw_model.parameters())
    facts = {"num_params": num_params, "flops_per_image": raw_model.estimate_flops()}
    now = {"batch": next(batches)}

    def forward():
        images, labels = now["batch"]
        cond = {"y": labels} if codec.facts["num_classes"] else {}
        x0 = codec.to_x0(images, eps=noise)
        with autocast:
            now["loss"] = scaler.scale(process.losses(model, x0, t, noise, **cond)["loss"].mean())

    def backward():
        now.pop("loss").backward()

    def data():
        now["batch"] = next(batches)

    if spec["reference"]:
        adamw = torch.optim.AdamW(raw_model.parameters(), lr=1e-4, weight_decay=0)
        averages = {name: p.detach().clone() for name, p in raw_model.named_parameters()}
        if world > 1:
            model = torch.nn.parallel.DistributedDataParallel(model)
        facts["bytes_per_step"] = 2 * (world - 1) * 4 * num_params // world  # an all-reduce on a ring

        def optim():
            adamw.step()
            adamw.zero_grad()

        @torch.no_grad()
        def ema():
            for name, p in raw_model.named_parameters():
                averages[name].mul_(0.9999).add_(p, alpha=1 - 0.9999)

    else:
        optimizer, average = make_optimizer(raw_model, spec["optimizer"]), EMA(raw_model, "0.9999")
        facts["bytes_per_step"] = optimizer.bytes_per_step

        def optim():
            norm = float(optimizer.sync_grads()) * scaler.inv_scale
            optimizer.step(grad_scale=min(1.0, 1.0 / (norm + 1e-6)) * scaler.inv_scale)
            optimizer.zero_grad()

        def ema():
            average.update(1)

    parts = {"forward": forward, "backward": backward, "data": data, "optim": optim, "ema": ema}

    def step():
        for part in parts.values():
            part()

    return step, parts, facts


def sample(spec: dict, device: torch.device):
    """A batch of samples, the guided one in a single forward pass; latents are not decoded."""
    codec, batches = open_data(spec, device)
    raw_model, model, process, autocast = open_model(spec, codec.facts, device)
    raw_model.eval()
    sampler = choose_sampler(process, spec["sampler"], spec["sample_steps"])
    labels = next(batches)[1].cpu()
    cond, cfg_scale = ({"y": labels}, spec["cfg_scale"]) if codec.facts["num_classes"] else ({}, 1.0)
    settings = SampleSettings(spec["sample_steps"], sampler, cfg_scale)

    def step():
        with autocast:
            sample_images(model, process, range(len(labels)), cond, codec.shape, settings, len(labels))

    return step, {}, {"sampler": sampler}


def write_noise(spec: dict) -> str:
    """A set of noise of the form spec["set"], `load_mib` in size, in spec["folder"]; the path of it."""
    os.environ["NANODIFF_BASE_DIR"] = spec["folder"]  # of this process alone
    kind, channels, size = SETS[spec["set"]]
    itemsize, rng = 2 if kind == "latents" else 1, np.random.default_rng(0)
    least = spec["batch_size"] * get_dist()[2]
    n = max(least, spec["load_mib"] * 2**20 // (channels * size**2 * itemsize))
    with DatasetWriter("noise", [str(i) for i in range(10)], kind=kind, source="scripts.bench") as writer:
        if kind == "latents":
            stats = {key: [float(key in ("scale", "std"))] * 4 for key in ("offset", "scale", "mean", "std")}
            info = dict(autoencoder="none", sha256="", path="", source="", downsample=8, parts=2, copies=1)
            writer.meta["latents"] = info | stats
            images = rng.standard_normal((n, channels, size, size), np.float32).astype(np.float16)
        else:
            images = rng.integers(256, size=(n, channels, size, size), dtype=np.uint8)
        writer.append("train", images, rng.integers(10, size=n))
    return str(writer.path)


def load(spec: dict, device: torch.device):
    """Passes over a set, warm and cold, beside training steps on one batch of it that stays on the device.

    Cold: the files have left the page cache, but not what the disk or its host keeps; read_mib tells what was read.
    """
    (rank, _, world), n = get_dist(), spec["batch_size"]
    path = spec["data"] or write_noise(spec)

    def open_loader():
        dataset = open_dataset(path, "train")
        return DataLoader(dataset, n, n * world, rank, world, seed=0, device=device)

    codec, loader = open_data(spec | {"data": path, "autoencoder": ""}, device)
    batch = next(loader)
    loader.close()
    nbytes, files = batch[0][0].nbytes, [file for file in loader.dataset.path.iterdir() if file.is_file()]
    num_batches = max(1, min(len(loader.dataset), spec["load_mib"] * 2**20 // nbytes) // (n * world))
    del loader  # and its maps: mapped pages stay in the cache
    step, _, facts = train(spec, device, (codec, itertools.repeat(batch)))
    facts |= {"images_in_pass": num_batches * n * world, "mib": num_batches * n * nbytes / 2**20}

    def read():
        loader = open_loader()
        for _ in range(num_batches):
            next(loader)
        loader.close()

    def drop_cache():
        for file in files:
            with open(file, "rb") as f:
                os.fsync(f.fileno())  # what is not on the disk yet cannot be dropped
                os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def read_cold():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_inblock  # of 512 bytes
        read()
        facts["read_mib"] = (resource.getrusage(resource.RUSAGE_SELF).ru_inblock - before) / 2048

    return step, {"warm": read, "drop_cache": drop_cache, "cold": read_cold}, facts
