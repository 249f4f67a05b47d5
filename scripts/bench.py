"""
Time a training step against the published recipe, side by side in one run.

    python -m scripts.bench --depths=4,6 --dtypes=float32,bfloat16 --compiles=True,False
    python -m scripts.bench --archs=dit --optimizers=muon --profile=/tmp/trace.json

The reference is the same backbone as published (DiT's classic block, or the UNet): eager, fp32 (TF32 on GPUs), torch's
AdamW, EMA in a loop over the parameters. Each arm is a process. They take turns, so that machine noise hits all alike;
the table shows medians. first_step_s includes the setup; it is shorter where torch.compile's cache is filled.
"""

import itertools
import json as json_format
import multiprocessing
import re
import statistics
import sys
import time

import torch
from torch.autograd import DeviceType

from configurator import configure, literal, satisfies
from nanodiff.common import UserError, get_dist, print0
from nanodiff.device import (
    autocast_to,
    choose_dtype,
    device_name,
    init_device,
    peak_flops,
    peak_memory_gb,
    reset_peak_memory,
    synchronize,
    why_not_compiled,
)
from nanodiff.diffusion.flow import FlowMatching
from nanodiff.diffusion.gaussian import GaussianDiffusion
from nanodiff.diffusion.timesteps import make_timesteps
from nanodiff.models.build import build_model, compile_model
from nanodiff.models.dit import DiTConfig
from nanodiff.models.unet import UNetConfig
from nanodiff.training.ema import EMA
from nanodiff.training.optim import LossScaler, make_optimizer

# The arms: all combinations of these lists, comma-separated
archs = "dit_classic,dit"  # dit_classic, dit, unet
depths = "4"  # the dial of model size
dtypes = "auto"  # auto, bfloat16, float16, float32
compiles = "True"  # True, False, max: torch.compile
batch_sizes = "32"  # images per step
optimizers = "adamw"  # adamw, muon
# What they train on: one batch of noise
image_size = 32  # >= 1: pixels
patch_size = 0  # >= 0: patch size of the DiT; 0 = for about 256 tokens
num_classes = 10  # >= 0: classes; 0 = unconditional
# How they are timed
reference = True  # time the published recipe; if False, ratios are to the first arm
rounds = 5  # >= 1: turns of each arm
steps = 4  # >= 1: steps per turn
profile = ""  # path for a chrome trace (.json) of 3 steps of the first arm; also prints their time by kind of kernel
device_type = ""  # ""|cuda|cpu|mps: "" = the best that is present
json = False  # print one JSON object instead of the table

RULES = {
    "arch": "dit_classic|dit|unet",
    "depth": ">= 1",
    "dtype": "auto|bfloat16|float16|float32",
    "compile": "True|False|max",
    "batch_size": ">= 1",
    "optimizer": "adamw|muon",
}
PUBLISHED = {"dtype": "float32", "compile": False, "optimizer": "adamw", "reference": True}


def parse_list(name: str, text: str) -> list:
    items = [literal(item) for item in text.split(",")]
    if any(isinstance(item, float) or not satisfies(item, RULES[name]) for item in items):
        raise UserError(f"{name}s={text!r}; accepted: {RULES[name]}, comma-separated")
    return items


def published(arm: dict) -> dict:
    """The reference that an arm is compared with."""
    arch = "dit_classic" if arm["arch"] == "dit" else arm["arch"]
    return arm | PUBLISHED | {"arch": arch}


def list_arms(config: dict) -> list[dict]:
    """Each arm is a dict: all settings, with one value of each list. A reference stands before what it is for."""
    lists = [parse_list(name, config[f"{name}s"]) for name in RULES]
    arms = []
    for values in itertools.product(*lists):
        arm = config | dict(zip(RULES, values)) | {"reference": False}
        if config["reference"] and published(arm) not in arms:
            arms.append(published(arm))
        arms.append(arm)
    return arms


def describe(arm: dict, device) -> str:
    dtype = str(choose_dtype(arm["dtype"], device)).removeprefix("torch.")
    compiled = {True: "compiled", False: "eager", "max": "compiled (max)"}[arm["compile"]]
    words = f"{arm['arch']} d{arm['depth']}, batch {arm['batch_size']}, {dtype}, {compiled}, {arm['optimizer']}"
    return words + (", reference" if arm["reference"] else "")


# ---------------------------------------------------------------------------------------------------------------------
# An arm, in a process of its own


def make_step(arm: dict, device):
    """(a function that makes one training step, the model)."""
    is_ours = arm["arch"] == "dit"
    process = FlowMatching() if is_ours else GaussianDiffusion(variance="learned_range")  # as published
    shape = dict(image_size=arm["image_size"], in_channels=3, out_channels=process.out_channels(3))
    shape["num_classes"] = arm["num_classes"]
    if arm["arch"] == "unet":
        model_config = UNetConfig.from_depth(arm["depth"], **shape)
    else:
        block = "modern" if is_ours else "classic"
        model_config = DiTConfig.from_depth(arm["depth"], patch_size=arm["patch_size"], block=block, **shape)
    raw_model = build_model(model_config, device, seed=0)
    model = compile_model(raw_model, autotune=arm["compile"] == "max") if arm["compile"] else raw_model
    dtype = choose_dtype(arm["dtype"], device)
    autocast = autocast_to(device, dtype)
    scaler = LossScaler(enabled=dtype == torch.float16)

    n = arm["batch_size"]
    g = torch.Generator().manual_seed(1)
    x0 = torch.randn(n, 3, arm["image_size"], arm["image_size"], generator=g).to(device)
    noise = torch.randn(x0.shape, generator=g).to(device)
    t, _ = make_timesteps("uniform", process).sample(torch.rand(n, generator=g).to(device))
    cond = {}
    if arm["num_classes"]:
        cond["y"] = torch.arange(n, device=device) % arm["num_classes"]

    def backward():
        with autocast:
            loss = process.losses(model, x0, t, noise, **cond)["loss"].mean()
        scaler.scale(loss).backward()

    if arm["reference"]:
        params = list(raw_model.parameters())
        averages = [p.detach().clone() for p in params]
        optim = torch.optim.AdamW(params, lr=1e-4, weight_decay=0)
    else:
        optim = make_optimizer(raw_model, arm["optimizer"], compile=bool(arm["compile"]))
        ema = EMA(raw_model, optim, "0.9999")

    def published_step():
        backward()
        optim.step()
        optim.zero_grad()
        with torch.no_grad():
            for average, p in zip(averages, params):
                average.mul_(0.9999).add_(p, alpha=1 - 0.9999)

    def our_step():  # base_train's
        backward()
        grad_norm, _ = optim.sync_grads()
        clip = min(1.0, 1.0 / (grad_norm * scaler.inv_scale + 1e-6))
        optim.step(grad_scale=clip * scaler.inv_scale)
        ema.update(1)
        optim.zero_grad()

    return published_step if arm["reference"] else our_step, raw_model


def run_arm(arm: dict, pipe, profile: str) -> None:
    """Warm up, send facts, then at each request time some steps and send their seconds."""
    start = time.perf_counter()
    device = init_device(arm["device_type"])
    step, model = make_step(arm, device)

    def timed_step() -> float:
        synchronize(device)
        start = time.perf_counter()
        step()
        synchronize(device)
        return time.perf_counter() - start

    timed_step()
    facts = {"first_step_s": time.perf_counter() - start}
    facts["num_params"] = sum(p.numel() for p in model.parameters())
    facts["flops_per_image"] = model.estimate_flops()
    for _ in range(2):
        timed_step()
    if profile:
        take_profile(profile, step, device)
    reset_peak_memory(device)  # compiling's
    while True:
        if device.type == "cuda":
            torch.cuda.empty_cache()  # for the arms whose turn it is
        pipe.send(facts)
        if not pipe.recv():
            return
        facts["seconds"] = [timed_step() for _ in range(arm["steps"])]
        facts["memory_gb"] = peak_memory_gb(device)


KINDS = {  # the first whose pattern is in the name of a kernel, or of an operation on a CPU
    "attention": r"attention|flash|fmha",
    "matmul": r"gemm|cutlass|nvjet|xmma|cublas|mm\b|linear",
    "exchange": r"nccl",
    "convolution": r"conv",
    "triton": r"triton|cpp_fused",
    "copy": r"memcpy|memset|copy",
    "other": r"",
}


def take_profile(path: str, step, device) -> None:
    """Write a chrome trace of 3 steps; print their time and launches by kind of kernel."""
    on_gpu = device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU]
    if on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(3):
            step()
        synchronize(device)
    profiler.export_chrome_trace(path)
    ms = dict.fromkeys(KINDS, 0.0)
    launches = dict.fromkeys(KINDS, 0)
    for event in profiler.key_averages():
        if on_gpu and event.device_type != DeviceType.CUDA:
            continue
        kind = next(kind for kind, pattern in KINDS.items() if re.search(pattern, event.key, re.IGNORECASE))
        ms[kind] += (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 3000
        launches[kind] += event.count // 3
    print(f"profile of a step: {sum(ms.values()):.1f} ms in {sum(launches.values()):,} launches", file=sys.stderr)
    for kind in KINDS:
        print(f"{kind:>12} {ms[kind]:9.2f} ms {launches[kind]:7,} launches", file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------------------------------------------
# The main process


def measure(arms: list[dict]) -> list[dict]:
    """Each arm's facts, with the seconds of all its steps."""
    context = multiprocessing.get_context("spawn")
    pipes = []
    processes = []
    try:
        for i, arm in enumerate(arms):
            is_first = i == int(reference)
            pipe, other_end = context.Pipe()
            pipes.append(pipe)
            processes.append(context.Process(target=run_arm, args=(arm, other_end, profile if is_first else "")))
            processes[-1].start()
            other_end.close()
            pipe.recv()  # warm; one after another, as compiling takes all cores
        seconds = [[] for _ in arms]
        for _ in range(rounds):
            found = []
            for pipe, known in zip(pipes, seconds):
                pipe.send(True)
                facts = pipe.recv()
                known += facts["seconds"]
                found.append(facts | {"seconds": known})
        for pipe in pipes:
            pipe.send(False)
        return found
    except EOFError:
        raise UserError("an arm's process died; its error is above") from None
    finally:
        for process in processes:
            process.terminate()


def make_row(arm: dict, facts: dict, device) -> dict:
    """An arm's figures, except its ratio to the reference; the floats become table columns."""
    step_s = statistics.median(facts["seconds"])
    peak, _ = peak_flops(device, choose_dtype("auto", device))
    row = {name: arm[name] for name in (*RULES, "reference")}
    row["what"] = describe(arm, device)
    row["num_params"] = facts["num_params"]
    row["images_per_sec"] = arm["batch_size"] / step_s
    row["step_ms"] = 1000 * step_s
    row["min_ms"] = 1000 * min(facts["seconds"])
    row["max_ms"] = 1000 * max(facts["seconds"])
    row["first_step_s"] = facts["first_step_s"]
    row["memory_gb"] = facts["memory_gb"]
    row["mfu"] = 100 * facts["flops_per_image"] * row["images_per_sec"] / peak
    return row


def show(rows: list[dict]) -> None:
    columns = [name for name, value in rows[0].items() if isinstance(value, float)]
    print0("  ".join(f"{name:>9}" for name in columns) + "  what")
    for row in rows:
        print0("  ".join(f"{row[name]:{max(len(name), 9)},.2f}" for name in columns) + f"  {row['what']}")


def main():
    config = configure(globals())
    if get_dist()[2] > 1:
        raise UserError("bench times one process; for several, read the log lines of base_train under torchrun")
    device = init_device(device_type)
    print0(f"{device_name(device)}, torch {torch.__version__}", file=sys.stderr)
    arms = list_arms(config)
    obstacle = why_not_compiled(device) if any(arm["compile"] for arm in arms) else ""
    if obstacle:
        print0(f"not compiled: {obstacle}", file=sys.stderr)
        arms = list_arms(config | {"compiles": "False"})
    rows = [make_row(arm, facts, device) for arm, facts in zip(arms, measure(arms))]
    for arm, row in zip(arms, rows):
        base = rows[arms.index(published(arm))] if config["reference"] else rows[0]
        row["ratio"] = row["images_per_sec"] / base["images_per_sec"]
    if json:
        head = {"device": device_name(device), "torch": torch.__version__, "config": config}
        print0(json_format.dumps(head | {"rows": rows}))
    else:
        show(rows)


if __name__ == "__main__":
    main()
