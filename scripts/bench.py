"""
Time runs of base_train that take turns, so that machine noise hits all alike. By default the published recipe (DiT's
classic block predicts eps and a variance; AdamW, fp32 or on GPUs TF32, not compiled) and ours.

    python -m scripts.bench
    python -m scripts.bench --arms="--optimizer=muon | --optimizer=adamw" --shared="--depth=6 --total_batch_size=64"

The table shows medians over the steps of all turns. first_step_s is shorter if torch.compile's cache is filled.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from configurator import configure
from nanodiff.common import UserError, base_dir, get_dist, print0

arms = "published | --optimizer=muon"  # between bars, base_train's arguments for each arm; ratios are to the first
shared = "--depth=4 --total_batch_size=32"  # base_train's arguments for all arms
rounds = 3  # >= 1: turns of each arm
steps = 10  # >= 1: steps per turn, after the warm-up

WARM_UP = 3  # steps
PUBLISHED = (
    "--arch=dit_classic --objective=eps --variance=learned_range --dtype=float32 --compile=False --optimizer=adamw"
)


def take_turn(arm: str) -> dict:
    """Run base_train in its own process; return its peak memory_gb, and in `lines` the metrics of each step."""
    fixed = (
        f"--num_iterations={WARM_UP + steps} --log_every=1 --model_tag=arm "
        "--eval_every=-1 --sample_every=-1 --save_every=-1"
    )
    data = base_dir() / "data"
    os.makedirs(data, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "data").symlink_to(data)
        arguments = shlex.split(f"{fixed} {shared} {PUBLISHED if arm == 'published' else arm}")
        command = [sys.executable, "-m", "scripts.base_train", *arguments]
        done = subprocess.run(command, env=os.environ | {"NANODIFF_BASE_DIR": folder}, capture_output=True, text=True)
        if done.returncode:
            raise UserError(f"{' '.join(command)}: {done.stderr.strip()[-2000:]}")
        text = Path(folder, "runs", "arm", "metrics.jsonl").read_text()
    memory = re.search(r"([\d.]+) GiB of memory at the peak", done.stdout)
    return {"lines": [json.loads(line) for line in text.splitlines()], "memory_gb": float(memory[1])}


def make_row(turns: list[dict]) -> dict[str, float]:
    """An arm's figures, except its ratio to the first."""
    lines = []
    for turn in turns:
        lines += turn["lines"][WARM_UP:]
    return {
        "step_ms": median(line["train/dt_ms"] for line in lines),
        "images_per_sec": median(line["train/images_per_sec"] for line in lines),
        "first_step_s": median(turn["lines"][0]["train/dt_ms"] for turn in turns) / 1000,
        "memory_gb": max(turn["memory_gb"] for turn in turns),
    }


def main():
    configure(globals())
    if get_dist()[2] > 1:
        raise UserError("bench times one process; for several, read the log lines of base_train under torchrun")
    names = [arm.strip() for arm in arms.split("|")]
    turns = [[take_turn(arm) for arm in names] for _ in range(rounds)]
    rows = [make_row(of_arm) for of_arm in zip(*turns)]
    for row in rows:
        row["ratio"] = row["images_per_sec"] / rows[0]["images_per_sec"]
    print0("  ".join(f"{name:>9}" for name in rows[0]) + "  what")
    for name, row in zip(names, rows):
        print0("  ".join(f"{x:{max(len(key), 9)},.2f}" for key, x in row.items()) + f"  {shared} {name}")
    return rows


if __name__ == "__main__":
    main()
