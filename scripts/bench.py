"""
Time training against the published recipe, side by side: runs of base_train that take turns.

    python -m scripts.bench --depths=4,6 --dtypes=float32,bfloat16 --compiles=True,False

The reference is the same backbone as published (DiT's classic block, or the UNet), which predicts eps and a variance:
eager, fp32 (TF32 on GPUs), AdamW. Arms take turns, a run each, so machine noise hits all alike; the table shows medians
over the steps of all turns. first_step_s is shorter where torch.compile's cache is filled.
"""

import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from configurator import configure, literal
from nanodiff.common import UserError, get_dist, print0
from nanodiff.data.dataset import open_dataset
from nanodiff.device import choose_dtype, device_name, init_device, why_not_compiled

# The arms: all combinations of these lists, comma-separated; base_train refuses what it does not take
archs = "dit_classic,dit"  # dit_classic, dit, unet
depths = "4"  # the dial of model size
dtypes = "auto"  # auto, bfloat16, float16, float32
compiles = "True"  # True, False: torch.compile
batch_sizes = "32"  # images per step
optimizers = "adamw"  # adamw, muon
# What they train on
data = "shapes"  # name or folder of a set
patch_size = 0  # >= 0: patch size of the DiT; 0 = for about 256 tokens
# How they are timed
reference = True  # time the published recipe; if False, ratios are to the first arm
rounds = 3  # >= 1: turns of each arm
steps = 10  # >= 1: steps per turn, behind those that warm up
device_type = ""  # ""|cuda|cpu|mps: "" = the best that is present

LISTS = ("arch", "depth", "dtype", "compile", "batch_size", "optimizer")
PUBLISHED = {"dtype": "float32", "compile": False, "optimizer": "adamw", "reference": True}
WARM_UP = 3  # steps


def published(arm: dict) -> dict:
    """The reference that an arm is compared with."""
    return arm | PUBLISHED | {"arch": "unet" if arm["arch"] == "unet" else "dit_classic"}


def list_arms(config: dict) -> list[dict]:
    """All combinations of the lists' values. A reference stands before the first arm that is compared with it."""
    lists = []
    for name in LISTS:
        items = config[f"{name}s"].split(",")
        lists.append([literal(item) for item in items])
    arms = []
    for values in itertools.product(*lists):
        arm = dict(zip(LISTS, values)) | {"reference": False}
        if config["reference"] and published(arm) not in arms:
            arms.append(published(arm))
        arms.append(arm)
    return arms


def arguments(arm: dict, num_iterations: int) -> list[str]:
    """The settings of base_train for an arm."""
    settings = {name: arm[name] for name in LISTS if name != "batch_size"}
    settings |= dict.fromkeys(["total_batch_size", "device_batch_size"], arm["batch_size"])
    settings |= dict.fromkeys(["save_every", "eval_every", "sample_every"], -1)
    settings |= dict(data=open_dataset(data).path, device_type=device_type, model_tag="arm")
    settings |= dict(num_iterations=num_iterations, log_every=1)
    if arm["arch"] != "unet":
        settings["patch_size"] = patch_size
    if arm["arch"] != "dit":  # as published
        settings |= dict(objective="eps", variance="learned_range")
    return [f"--{name}={value}" for name, value in settings.items()]


def take_turn(arm: dict) -> dict:
    """Run base_train in a process of its own; return its peak memory_gb, and the metrics of each step."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "scripts.base_train", *arguments(arm, WARM_UP + steps)]
        done = subprocess.run(command, env=os.environ | {"NANODIFF_BASE_DIR": folder}, capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"{' '.join(command)}: {done.stderr.strip()[-2000:]}")
        text = Path(folder, "runs", "arm", "metrics.jsonl").read_text()
    for verdict in re.findall("compiled .*", done.stdout):  # the check of compiled code
        print(verdict, file=sys.stderr)
    memory = re.search(r"([\d.]+) GiB of memory at the peak", done.stdout)
    lines = [json.loads(line) for line in text.splitlines()]
    return {"lines": lines, "memory_gb": float(memory[1])}


def make_row(arm: dict, turns: list[dict], device) -> dict:
    """An arm's figures, except its ratio to the reference; the floats become table columns."""
    lines = []
    for turn in turns:
        lines += turn["lines"][WARM_UP:]
    step_ms = [line["train/dt_ms"] for line in lines]
    median_ms = statistics.median(step_ms)
    dtype = str(choose_dtype(arm["dtype"], device)).removeprefix("torch.")
    compiled = "compiled" if arm["compile"] else "eager"
    what = f"{arm['arch']} d{arm['depth']}, batch {arm['batch_size']}, {dtype}, {compiled}, {arm['optimizer']}"
    return arm | {
        "what": f"{what}, reference" if arm["reference"] else what,
        "step_ms": median_ms,
        "images_per_sec": 1000 * arm["batch_size"] / median_ms,
        "min_ms": min(step_ms),
        "max_ms": max(step_ms),
        "first_step_s": statistics.median(turn["lines"][0]["train/dt_ms"] for turn in turns) / 1000,
        "memory_gb": max(turn["memory_gb"] for turn in turns),
        "mfu": statistics.median(line["train/mfu"] for line in lines),
    }


def main():
    config = configure(globals())
    if get_dist()[2] > 1:
        raise UserError("bench times one process; for several, read the log lines of base_train under torchrun")
    device = init_device(device_type)
    print(f"{device_name(device)}, torch {torch.__version__}", file=sys.stderr)
    obstacle = why_not_compiled(device)
    if obstacle and compiles != "False":
        print(f"not compiled: {obstacle}", file=sys.stderr)
        config["compiles"] = "False"
    arms = list_arms(config)
    turns = [[take_turn(arm) for arm in arms] for _ in range(rounds)]
    by_arm = zip(*turns)
    rows = [make_row(arm, of_arm, device) for arm, of_arm in zip(arms, by_arm)]
    for arm, row in zip(arms, rows):
        base = rows[arms.index(published(arm))] if reference else rows[0]
        row["ratio"] = row["images_per_sec"] / base["images_per_sec"]
    columns = [name for name, value in rows[0].items() if isinstance(value, float)]
    print0("  ".join(f"{name:>9}" for name in columns) + "  what")
    for row in rows:
        print0("  ".join(f"{row[name]:{max(len(name), 9)},.2f}" for name in columns) + f"  {row['what']}")
    return rows


if __name__ == "__main__":
    main()
