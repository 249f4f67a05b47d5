"""
Measure a training step against the published recipe, side by side in one run.

    python -m scripts.bench                                     # d4, patch 2, 32x32x3, batch 32
    python -m scripts.bench --archs=unet --depth=2 --batch_size=16
    python -m scripts.bench --depth=12 --batch_size=128         # on a GPU
    python -m scripts.bench --autoencoder=taef2_encoder.pth     # encoding on the fly against cached latents

The reference is what users would otherwise run: the same backbone as published (DiT's classic block, or the UNet),
eager, fp32 (TF32 on GPUs), torch's AdamW, EMA in a loop over the parameters. Each candidate is a process of its own, so
that memory is its own too; they take turns, round by round, so that a noisy machine is noisy for all; medians count.
"""

import json
import multiprocessing
import statistics
import time
from contextlib import nullcontext
from dataclasses import replace

import torch

from configurator import configure
from nanodiff.autoencoder import open_autoencoder
from nanodiff.codec import Latents, latent_facts
from nanodiff.common import (
    can_compile,
    choose_dtype,
    device_name,
    init_device,
    peak_flops,
    peak_memory_gb,
    reset_peak_memory,
    synchronize,
)
from nanodiff.dit import DiTConfig
from nanodiff.ema import EMA
from nanodiff.flow import FlowMatching
from nanodiff.gaussian import GaussianDiffusion
from nanodiff.optim import make_optimizer
from nanodiff.recipe import build_model
from nanodiff.unet import UNetConfig

archs = "dit_classic,dit"  # what to measure against the reference, comma-separated: dit_classic, dit, unet
depth = 4  # >= 1: the dial
patch_size = 2  # >= 1: of the DiT
image_size = 32  # >= 1: pixels, also with an autoencoder
channels = 3  # >= 1: of the images
num_classes = 10  # >= 0: 0 = unconditional
num_res_blocks = 3  # >= 1: of the UNet
batch_size = 32  # >= 1: images per step
dtype = "auto"  # auto|bfloat16|float16|float32: of the candidates; the reference is fp32
optimizer = "adamw"  # adamw|muon: of the candidates
compile = True  # torch.compile of the candidates
checkpointing = False  # a further candidate that recomputes activations
autoencoder = ""  # path: instead of the above, a step that encodes images against one on its cached latents
rounds = 5  # >= 1: turns that each candidate takes
steps = 4  # >= 1: steps in a turn
device_type = ""  # ""|cuda|cpu|mps: "" = the best that is present
as_json = False  # one JSON object instead of the table


def make_step(spec, device):
    """A function that does one training step on fixed random data, and the FLOPs of an image."""
    size, channels, g = spec["image_size"], spec["channels"], torch.Generator().manual_seed(1)
    if spec["autoencoder"]:
        encoder = open_autoencoder(spec["autoencoder"]).to(device)
        path, size, channels = spec["autoencoder"], size // encoder.downsample, encoder.latent_channels
        codec = Latents({"latents": latent_facts(encoder, path, "")}, device, encoder)
        if spec["online"]:
            stored = torch.randint(256, (spec["batch_size"], 3, *2 * [spec["image_size"]]), generator=g)
            stored = stored.to(device, torch.uint8)
        else:
            stored = torch.randn(spec["batch_size"], encoder.parts * channels, size, size, generator=g)
            stored = stored.to(device, torch.float16)
    shape = dict(image_size=size, in_channels=channels, num_classes=spec["num_classes"])
    # both recipes of the reference learn the variance: twice the channels
    learned = spec["reference"] or spec["arch"] != "dit"
    shape["out_channels"] = channels * (2 if learned else 1)
    if spec["arch"] == "unet":
        model_config = UNetConfig.from_depth(spec["depth"], num_res_blocks=spec["num_res_blocks"], **shape)
    else:
        block = "modern" if spec["arch"] == "dit" else "classic"
        model_config = DiTConfig.from_depth(spec["depth"], patch_size=spec["patch_size"], block=block, **shape)
    model_config = replace(model_config, checkpointing=spec["checkpointing"])
    process = GaussianDiffusion(variance="learned_range") if learned else FlowMatching()
    model = raw_model = build_model(model_config, device, 0)

    x0 = torch.randn(spec["batch_size"], channels, size, size, generator=g)
    x0, noise = x0.clamp(-1, 1).to(device), torch.randn(x0.shape, generator=g).to(device)
    t = (torch.rand(len(x0), generator=g) * (process.num_timesteps or 1)).to(device)
    t = t.long() if process.num_timesteps else t
    cond = {"y": torch.arange(len(x0), device=device) % spec["num_classes"]} if spec["num_classes"] else {}

    if spec["reference"]:
        optim = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0)
        averages = {name: p.detach().clone() for name, p in model.named_parameters()}

        def step():
            loss = process.losses(model, x0, t, noise, **cond)["loss"].mean()
            optim.zero_grad()
            loss.backward()
            optim.step()
            with torch.no_grad():
                for name, p in model.named_parameters():
                    averages[name].mul_(0.9999).add_(p, alpha=1 - 0.9999)

        return step, raw_model.estimate_flops()

    compute = choose_dtype(spec["dtype"], device)
    autocast = nullcontext() if compute == torch.float32 else torch.autocast(device.type, dtype=compute)
    optim, ema = make_optimizer(model, spec["optimizer"]), EMA(model, "0.9999")
    if spec["compile"] and not can_compile(device):
        model = torch.compile(model, dynamic=False)

    def step():
        images = codec.to_x0(stored, eps=noise) if spec["autoencoder"] else x0
        with autocast:
            loss = process.losses(model, images, t, noise, **cond)["loss"].mean()
        loss.backward()
        norm = float(optim.sync_grads())
        optim.step(grad_scale=min(1.0, 1.0 / (norm + 1e-6)))
        ema.update(1)
        optim.zero_grad()

    return step, raw_model.estimate_flops()


def worker(connection, spec):
    """A candidate: warm up, then take turns whenever the parent says how many steps."""
    device = init_device(spec["device_type"])
    start = time.perf_counter()
    step, flops = make_step(spec, device)
    step()
    synchronize(device)
    connection.send((time.perf_counter() - start, flops))
    for _ in range(2):
        step()
    reset_peak_memory(device)  # that of compiling
    while count := connection.recv():
        times = []
        for _ in range(count):
            synchronize(device)
            start = time.perf_counter()
            step()
            synchronize(device)
            times.append(time.perf_counter() - start)
        connection.send((times, peak_memory_gb(device)))


def main():
    config = configure(globals())
    device = init_device(device_type)
    names = [arch.strip() for arch in archs.split(",")]
    specs = []
    for arch in names:
        specs.append(config | {"arch": arch, "reference": False, "checkpointing": False, "online": False})
        if checkpointing:
            specs.append(specs[-1] | {"checkpointing": True})
    if autoencoder:  # of each, first the one that encodes
        specs = [spec | {"online": online} for spec in specs for online in (True, False)]
    else:
        reference = "unet" if "unet" in names else "dit_classic"
        specs.insert(0, config | {"arch": reference, "reference": True, "checkpointing": False})

    # one process each, started one after the other; then in turns
    spawn, workers = multiprocessing.get_context("spawn"), []
    for spec in specs:
        mine, theirs = spawn.Pipe()
        process = spawn.Process(target=worker, args=(theirs, spec), daemon=True)
        process.start()
        first_step_s, flops = mine.recv()
        workers.append({"pipe": mine, "process": process, "times": [], "first_step_s": first_step_s, "flops": flops})
    for _ in range(rounds):
        for w in workers:
            w["pipe"].send(steps)
            times, w["memory_gb"] = w["pipe"].recv()
            w["times"] += times

    rows, peak = [], peak_flops(device)
    for spec, w in zip(specs, workers):
        w["pipe"].send(0)
        w["process"].join()
        median = statistics.median(w["times"])
        label = f"{spec['arch']}, as published: eager, fp32, AdamW" if spec["reference"] else (
            f"{spec['arch']}, {str(choose_dtype(dtype, device))[6:]}, {optimizer}"
            + ", compiled" * compile + ", checkpointing" * spec["checkpointing"]
            + (", encoding on the fly" if spec["online"] else ", cached latents") * bool(autoencoder)
        )  # fmt: skip
        step_ms = 1000 * median
        rows.append({
            "what": label, "images_per_sec": batch_size / median,
            "ratio": rows[0]["step_ms"] / step_ms if rows else 1.0,
            "step_ms": step_ms, "min_ms": 1000 * min(w["times"]), "max_ms": 1000 * max(w["times"]),
            "memory_gb": w["memory_gb"], "first_step_s": w["first_step_s"],
            "mfu": 100 * w["flops"] * batch_size / median / peak if peak else 0.0,
        })  # fmt: skip
    if as_json:
        print(json.dumps({"device": device_name(device), "torch": torch.__version__, "config": config, "rows": rows}))
        return
    print(f"{device_name(device)}, torch {torch.__version__}, batch {batch_size}, {image_size} px, depth {depth}")
    print(f"{'img/s':>8} {'ratio':>6} {'step ms':>8} {'min - max':>17} {'GiB':>6} {'first s':>8} {'mfu':>5}  what")
    for r in rows:
        spread = f"{r['min_ms']:.1f} - {r['max_ms']:.1f}"
        print(
            f"{r['images_per_sec']:8.1f} {r['ratio']:6.2f} {r['step_ms']:8.1f} {spread:>17} {r['memory_gb']:6.2f} "
            f"{r['first_step_s']:8.1f} {r['mfu']:5.1f}  {r['what']}"
        )


if __name__ == "__main__":
    main()
