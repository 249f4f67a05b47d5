"""
Time training against the published recipe, side by side in one run; optionally also sampling and data loading.

    python -m scripts.bench --depths=4,6 --dtypes=float32,bfloat16 --compiles=True,False
    python -m scripts.bench --archs=dit --optimizers=muon --data=cifar10 --sampling --loading
    python -m scripts.bench --autoencoder=taef2_encoder.pth        # encoding on the fly against cached latents
    torchrun --standalone --nproc_per_node=2 -m scripts.bench      # on several ranks

The reference is the same backbone as published (DiT's classic block, or the UNet): eager, fp32 (TF32 on GPUs), torch's
AdamW, EMA in a loop over the parameters, DistributedDataParallel; for sampling the same model, eager, in fp32. Each
candidate is a process. They take turns, so that machine noise hits all alike; the tables show medians. first_step_s is
a cold start with an empty compile cache; warm_step_s is a first step with torch.compile's cache filled.

Some steps are timed whole, others in parts: forward, backward (with DDP's all-reduce), optim (exchange, clipping,
update), ema, and data, the remaining wait for the next batch. Under torchrun times and memory are rank 0's.
"""

import collections
import contextlib
import itertools
import json as json_format
import math
import multiprocessing
import os
import re
import socket
import statistics
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from configurator import configure, literal, satisfies
from nanodiff import device as devices
from nanodiff.common import UserError, get_dist, leave_together, print0
from nanodiff.data.codec import Latents, Pixels, describe_latents, make_codec
from nanodiff.data.dataloader import DataLoader
from nanodiff.data.dataset import open_dataset
from nanodiff.diffusion.flow import FlowMatching
from nanodiff.diffusion.gaussian import GaussianDiffusion
from nanodiff.diffusion.timesteps import make_timesteps
from nanodiff.models.autoencoder import open_autoencoder
from nanodiff.models.build import build_model, check_sizes, compile_model
from nanodiff.models.dit import DiTConfig
from nanodiff.models.unet import UNetConfig
from nanodiff.sampling.draw import SampleSettings, sample_images
from nanodiff.training.ema import EMA
from nanodiff.training.optim import LossScaler, make_optimizer

# The candidates: all combinations of these lists, comma-separated; the singular, as in --depth=4, means the same
archs = "dit_classic,dit"  # dit_classic, dit, unet
depths = "4"  # the dial of model size
dtypes = "auto"  # auto, bfloat16, float16, float32
compiles = "True"  # True, False: torch.compile
batch_sizes = "32"  # images per step of each rank
optimizers = "adamw"  # adamw, muon
image_sizes = "32"  # synthetic images, in pixels; list rectangles after the square of the same area: 64,72x56
checkpointing = False  # each candidate also with recomputed activations
# Data
data = ""  # name of a data set, or its folder; "" = synthetic
autoencoder = ""  # path: encode on the fly; with synthetic data, each candidate also with cached latents
num_classes = 10  # >= 0: classes of synthetic images; 0 = unconditional
patch_size = 0  # >= 0: patch size of the DiT; 0 = for about 256 tokens
# What to time
training = True  # training steps
reference = True  # time the published recipe; if False, ratios are to the first candidate
sampling = False  # a batch of samples, guided, by the default sampler; latents are not decoded
sample_steps = 10  # >= 1: steps of the sampler
loading = False  # reading `data`, by default shapes, from the page cache and from the disk
rounds = 5  # >= 1: turns of each candidate
steps = 4  # >= 1: whole steps per turn, plus half as many split into parts
profile = ""  # path of a chrome trace (.json) of 3 steps of the first candidate; prints its 15 costliest operations
device_type = ""  # ""|cuda|cpu|mps: "" = the best that is present
json = False  # print one JSON object instead of the tables

RULES = {
    "arch": "dit_classic|dit|unet", "depth": ">= 1", "dtype": "auto|bfloat16|float16|float32",
    "compile": "True|False", "batch_size": ">= 1", "optimizer": "adamw|muon",
    "image_size": "a side, then sides or HEIGHTxWIDTH",
}  # fmt: skip
PUBLISHED = {"dtype": "float32", "compile": False, "optimizer": "adamw", "checkpointing": False, "online": True}

# ---------------------------------------------------------------------------------------------------------------------
# The candidates: each is a `spec`, a dict of all settings with one value of each list


def parse_list(name: str, text: str) -> list:
    items = [literal(item) for item in text.split(",")]
    if name == "image_size":
        refused = not re.fullmatch(r"[1-9]\d{0,3}(,[1-9]\d{0,3}(x[1-9]\d{0,3})?)*", text)
    else:
        refused = any(isinstance(item, float) or not satisfies(item, RULES[name]) for item in items)
    if refused:
        raise UserError(f"{name}s={text!r}; accepted: {RULES[name]}, comma-separated")
    return items


def height_width(spec: dict) -> tuple[int, int]:
    height, _, width = str(spec["image_size"]).partition("x")
    return int(height), int(width or height)


def candidates(config: dict, table: str) -> list[dict]:
    """The specs of a table, each reference before the candidates that are compared with it."""
    is_training = table == "training"
    values = {name: parse_list(name, config[f"{name}s"]) for name in RULES}
    if not is_training:
        values["optimizer"] = ["adamw"]
    values["online"] = [True, False] if is_training and autoencoder and not data else [True]
    values["checkpointing"] = [False, True] if is_training and checkpointing else [False]
    groups = {}  # by reference, in the order of their first candidates
    for point in itertools.product(*values.values()):
        spec = config | dict(zip(values, point)) | {"table": table, "reference": False, "profile": ""}
        published = spec | PUBLISHED | {"reference": True}
        if is_training and spec["arch"] == "dit":
            published["arch"] = "dit_classic"
        groups.setdefault(str(published), [published] if config["reference"] else []).append(spec)
    specs = list(itertools.chain(*groups.values()))
    first = next(spec for spec in specs if not spec["reference"])
    first["profile"] = config["profile"] if is_training else ""
    return specs


def describe(spec: dict, device) -> str:
    is_training = spec["table"] == "training"
    words = [
        f"{spec['arch']} d{spec['depth']}, batch {spec['batch_size']}",
        len(parse_list("image_size", spec["image_sizes"])) > 1 and f"{spec['image_size']} px",
        str(devices.choose_dtype(spec["dtype"], device)).removeprefix("torch."),
        "compiled" if spec["compile"] else "eager",
        spec["optimizer"] if is_training else f"{spec['sample_steps']} steps",
        spec["checkpointing"] and "checkpointing",
        is_training and spec["autoencoder"] and ("encoding on the fly" if spec["online"] else "cached latents"),
        spec["reference"] and "reference",
    ]
    return ", ".join(filter(None, words))


# ---------------------------------------------------------------------------------------------------------------------
# What is timed, in a candidate's process


def open_data(spec: dict, device):
    """The codec and endless batches: stored images (N, C, H, W), labels (N,). Synthetic data repeat one batch."""
    n, (rank, _, world) = spec["batch_size"], get_dist()
    if spec["data"]:
        dataset = open_dataset(spec["data"], "train")
        codec = make_codec(dataset, device, spec["autoencoder"])
        return codec, DataLoader(dataset, n, n * world, rank, world, seed=0, device=device)
    side = parse_list("image_size", spec["image_sizes"])[0]
    size = height_width(spec)
    facts = dict(kind="images", channels=3, resolution=side, sizes=[[*size, n]], num_classes=spec["num_classes"])
    codec, g = Pixels(facts), torch.Generator().manual_seed(1)
    stored = torch.randint(256, (n, 3, *size), dtype=torch.uint8, generator=g)
    if spec["autoencoder"]:
        encoder = open_autoencoder(spec["autoencoder"]).to(device)
        facts |= dict(kind="latents", channels=encoder.latent_channels, resolution=side // encoder.downsample)
        facts["sizes"] = [[size[0] // encoder.downsample, size[1] // encoder.downsample, n]]
        codec = Latents(facts | {"latents": describe_latents(encoder, spec["autoencoder"], "")}, device, encoder)
        if not spec["online"]:
            stored = torch.randn(n, encoder.parts * codec.shape[0], *codec.shapes[0][1:], generator=g).half()
    labels = torch.arange(n) % max(spec["num_classes"], 1)
    return codec, itertools.repeat((stored.to(device), labels.to(device), None))


def open_model(spec: dict, facts: dict, device):
    """The backbone, compiled if the spec says so; process; autocast."""
    # As published, all but ours learn the variance
    process = FlowMatching() if spec["arch"] == "dit" else GaussianDiffusion(variance="learned_range")
    shape = dict(image_size=facts["resolution"], in_channels=facts["channels"], num_classes=facts["num_classes"])
    shape["out_channels"] = process.out_channels(facts["channels"])
    if spec["arch"] == "unet":
        model_config = UNetConfig.from_depth(spec["depth"], **shape)
    else:
        block = "modern" if spec["arch"] == "dit" else "classic"
        model_config = DiTConfig.from_depth(spec["depth"], patch_size=spec["patch_size"], block=block, **shape)
    check_sizes(model_config, facts)
    model = build_model(replace(model_config, checkpointing=spec["checkpointing"]), device, seed=0)
    autocast = devices.autocast_to(device, devices.choose_dtype(spec["dtype"], device))
    return compile_model(model) if spec["compile"] else model, process, autocast


def train(spec: dict, device):
    """Yields facts, then the name of each part of base_train's or the published step, once done."""
    codec, batches = open_data(spec, device)
    model, process, autocast = open_model(spec, codec.description, device)
    n, world, g = spec["batch_size"], get_dist()[2], torch.Generator().manual_seed(1)
    noise = {shape: torch.randn(n, *shape, generator=g).to(device) for shape in codec.shapes}
    t, _ = make_timesteps("uniform", process).sample(torch.rand(n, generator=g).to(device))
    scaler = LossScaler(enabled=devices.choose_dtype(spec["dtype"], device) == torch.float16)
    params = list(model.parameters())
    num_params = sum(p.numel() for p in params)
    facts = dict(num_params=num_params, flops_per_image=model.estimate_flops())
    if spec["reference"]:
        optim = torch.optim.AdamW(params, lr=1e-4, weight_decay=0)
        averages = [p.detach().clone() for p in params]
        model = torch.nn.parallel.DistributedDataParallel(model) if world > 1 else model
        facts["bytes_per_step"] = 2 * (world - 1) * 4 * num_params // world  # an all-reduce on a ring
    else:
        optim = make_optimizer(model, spec["optimizer"], compile=spec["compile"])
        ema = EMA(model, optim, "0.9999")
        facts["bytes_per_step"] = optim.bytes_per_step
    yield facts

    images, labels, _ = next(batches)
    while True:
        cond = {"y": labels} if codec.description["num_classes"] else {}
        x0 = codec.to_x0(images, randn_like=lambda mean: noise[mean.shape[1:]])
        eps = noise[x0.shape[1:]]
        with autocast:
            loss = process.losses(model, x0, t, eps, **cond)["loss"].mean()
        yield "forward"
        if not spec["reference"]:
            optim.last_micro_step = True
        scaler.scale(loss).backward()
        yield "backward"
        images, labels, _ = next(batches)
        yield "data"
        if spec["reference"]:
            optim.step()
        else:
            grad_norm, _ = optim.sync_grads()
            optim.step(grad_scale=min(1.0, 1.0 / (grad_norm * scaler.inv_scale + 1e-6)) * scaler.inv_scale)
        optim.zero_grad()
        yield "optim"
        if spec["reference"]:
            with torch.no_grad():
                for average, p in zip(averages, params):
                    average.mul_(0.9999).add_(p, alpha=1 - 0.9999)
        else:
            ema.update(1)
        yield "ema"


def sample(spec: dict, device):
    """Yields facts, then "sample" after each batch, forever."""
    codec, batches = open_data(spec, device)
    model, process, autocast = open_model(spec, codec.description, device)
    model.eval()
    labels = next(batches)[1].cpu()
    cond = {"y": labels} if codec.description["num_classes"] else {}
    settings = SampleSettings(spec["sample_steps"], process.default_sampler, 2.0 if cond else 1.0)
    yield {}
    while True:
        with autocast:
            sample_images(model, process, range(len(labels)), cond, codec.shapes[0], settings, len(labels))
        yield "sample"


def candidate(spec: dict):
    """Yields when warm, then after each turn: ({"step" or part: seconds}, facts)."""
    device = devices.init_device(spec["device_type"])
    times = collections.defaultdict(list)
    opened = time.perf_counter()
    parts = train(spec, device) if spec["table"] == "training" else sample(spec, device)
    facts = next(parts)

    def run_step(split: bool = False) -> None:  # timed as a whole or in parts, from an idle device to an idle device
        devices.synchronize(device)
        start = time.perf_counter()
        for part in parts:
            is_last = part in ("ema", "sample")
            if split or is_last:
                devices.synchronize(device)
                end = time.perf_counter()
                times[part if split else "step"].append(end - start)
                start = end
            if is_last:
                return

    cache = contextlib.nullcontext()
    if spec["compile"]:
        from torch._inductor.utils import fresh_cache  # importing takes seconds

        cache = fresh_cache()
    with cache:
        run_step()
        facts["first_step_s"] = time.perf_counter() - opened
        if spec["compile"]:
            torch._dynamo.reset()  # the next compile comes from the cache
        warm_start = time.perf_counter()
        run_step()
        facts["warm_step_s"] = time.perf_counter() - warm_start
    run_step()
    run_step(split=True)
    times.clear()
    devices.reset_peak_memory(device)  # compiling's
    yield
    for turn in range(spec["rounds"]):
        if dist.is_initialized():
            dist.barrier()
        for i in range(spec["steps"]):
            run_step()
            if spec["table"] == "training" and i % 2 == 0:
                run_step(split=True)
        facts["memory_gb"] = devices.peak_memory_gb(device)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # for the waiting processes
        if turn == spec["rounds"] - 1:
            if spec["profile"]:
                take_profile(spec["profile"], run_step, device)
            leave_together()
        yield dict(times), facts


def take_profile(path: str, run_step, device) -> None:
    """Write a chrome trace of 3 steps; print the 15 costliest operations."""
    on_gpu = device.type == "cuda"
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA] if on_gpu else [kinds.CPU]) as profiler:
        for _ in range(3):
            run_step()
    if get_dist()[0] == 0:
        profiler.export_chrome_trace(path)
    key = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    print0(profiler.key_averages().table(sort_by=key, row_limit=15, max_name_column_width=50), file=sys.stderr)


mine = threading.local()  # the process's candidate; in tests it is a thread


def advance(*spec: dict):
    """Start the candidate `spec`, or run its next turn."""
    if spec:
        mine.candidate = candidate(*spec)
    return next(mine.candidate)


# ---------------------------------------------------------------------------------------------------------------------
# The main process


def new_process(world: int):
    """A one-process executor; those of all ranks meet at a port of their own."""
    if world > 1:
        with socket.socket() as free:
            free.bind(("", 0))
            port = [free.getsockname()[1]]
        dist.broadcast_object_list(port)
        os.environ |= {"MASTER_PORT": str(port[0]), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


def measure(specs: list[dict], world: int) -> list[tuple[dict, dict]]:
    """Each candidate's (times, facts)."""
    processes = []
    try:
        for spec in specs:  # one after another, as compiling takes all cores
            processes.append(new_process(world))
            processes[-1].submit(advance, spec).result()
        for _ in range(rounds):
            measured = [process.submit(advance).result() for process in processes]
        return measured
    except BrokenProcessPool:
        raise UserError("a candidate's process died; its error is above") from None


def make_row(spec: dict, times: dict, facts: dict, world: int, device) -> dict:
    """A candidate's figures, except its ratio to the reference; the floats become table columns."""
    row = {name: spec[name] for name in ("table", *RULES, "reference", "checkpointing")}
    row |= {"what": describe(spec, device), "world": world}
    step = statistics.median(times["step"])
    row["images_per_sec"] = spec["batch_size"] * world / step
    row |= {"min_ms": 1000 * min(times["step"]), "max_ms": 1000 * max(times["step"])}
    row |= {f"{name}_ms": 1000 * statistics.median(seconds) for name, seconds in times.items()} | facts
    if spec["table"] == "training":
        peak, _ = devices.peak_flops(device, devices.choose_dtype("auto", device))
        row["mfu"] = 100 * facts["flops_per_image"] * spec["batch_size"] / step / peak
        row["sent_mb"] = facts["bytes_per_step"] / 1e6
    return row


def time_loading(batch_size: int, world: int, device) -> dict:
    """Time passes of at most 64 MiB: warm from the page cache, cold after dropping the files from it."""
    name, total = data or "shapes", batch_size * world
    dataset = open_dataset(name, "train")
    num_images = min(len(dataset), 2**26 // dataset.images(np.array([0])).nbytes)
    num_batches, folder = max(1, num_images // total), dataset.path
    del dataset  # and its memory map: mapped pages stay in the cache

    def read() -> float:
        start = time.perf_counter()
        loader = DataLoader(open_dataset(name, "train"), batch_size, total, get_dist()[0], world, seed=0, device=device)
        for _ in range(num_batches):
            next(loader)
        loader.close()
        devices.synchronize(device)
        return time.perf_counter() - start

    warm, cold = [], []
    read()
    for _ in range(rounds):
        warm.append(read())
        for path in filter(Path.is_file, folder.iterdir()):
            with open(path, "rb") as file:
                os.fsync(file.fileno())  # only what is on the disk can be dropped
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        cold.append(read())
    images = num_batches * total
    row = {"table": "loading", "what": f"{name}, batch {batch_size}", "images_in_pass": images}
    row["warm_images_per_sec"] = images / statistics.median(warm)
    row["cold_images_per_sec"] = images / statistics.median(cold)
    return row


def show(rows: list[dict]) -> None:
    columns = [name for name, value in rows[0].items() if isinstance(value, float)]
    print0(f"\n{rows[0]['table']}")
    print0("  ".join(f"{name:>9}" for name in columns) + "  what")
    for row in rows:
        print0("  ".join(f"{row[name]:{max(len(name), 9)},.2f}" for name in columns) + f"  {row['what']}")


def main():
    plural = [re.sub(rf"^--({'|'.join(RULES)})=", r"--\1s=", arg) for arg in sys.argv[1:]]  # --depth=4 is --depths=4
    config = configure(globals(), plural)
    if profile and (not training or not Path(profile).absolute().parent.is_dir()):
        raise UserError(f"profile={profile!r}; accepted: a file in a folder that exists, with training=True")
    if loading and not hasattr(os, "posix_fadvise"):
        raise UserError("loading=True needs Linux, where files can be dropped from the page cache")
    device, world = devices.init_device(device_type), get_dist()[2]
    obstacle = devices.why_not_compiled(device) if True in parse_list("compile", compiles) else ""
    print0(f"{world} x {devices.device_name(device)}, torch {torch.__version__}", file=sys.stderr)
    if obstacle:
        print0(f"not compiled: {obstacle}", file=sys.stderr)
    tables = {}
    for table in ("training", "sampling"):
        if not config[table]:
            continue
        specs = [spec | {"compile": spec["compile"] and not obstacle} for spec in candidates(config, table)]
        rows = [make_row(spec, *of, world, device) for spec, of in zip(specs, measure(specs, world))]
        base = rows[0]
        for row in rows:
            base = row if row["reference"] else base
            row["ratio"] = row["images_per_sec"] / base["images_per_sec"]  # of pixels per second, hence of tokens
            row["ratio"] *= math.prod(height_width(row)) / math.prod(height_width(base))
        tables[table] = rows
    if loading:
        row = time_loading(parse_list("batch_size", batch_sizes)[0], world, device)
        if training:  # against the fastest
            fastest = max(other["images_per_sec"] for other in tables["training"])
            row["warm_ratio"] = row["warm_images_per_sec"] / fastest
            row["cold_ratio"] = row["cold_images_per_sec"] / fastest
        tables["loading"] = [row]
    if json:
        head = {"device": devices.device_name(device), "torch": torch.__version__, "config": config}
        print0(json_format.dumps(head | {"rows": list(itertools.chain(*tables.values()))}))
    else:
        for rows in tables.values():
            show(rows)
    leave_together()


if __name__ == "__main__":
    main()
