"""
Time runs of base_train that take turns, so that machine noise hits all alike. By default the published recipe (DiT's
classic block predicts eps and a variance; AdamW, fp32 or on GPUs TF32, not compiled) and ours.

    python3 -m scripts.bench
    python3 -m scripts.bench --arms="--optimizer=muon | --optimizer=adamw" --shared="--depth=6 --total_batch_size=64"

The table shows medians over the steps of all turns. first_step_s is shorter if torch.compile's cache is filled.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from configurator import configure
from nanodiff.common import UserError, base_dir, get_dist, print0
from nanodiff.files import read_json

arms = "published | --optimizer=muon"  # between bars, base_train's arguments for each arm; ratios are to the first
shared = "--depth=4 --total_batch_size=32"  # base_train's arguments for all arms
rounds = 3  # >= 1: turns of each arm
steps = 10  # >= 1: steps per turn, after the warm-up

WARM_UP = 3  # steps
PUBLISHED = (
    "--arch=dit_classic --objective=eps --variance=learned_range --dtype=float32 --compile=False --optimizer=adamw"
)


def take_turn(arguments: str, num_steps: int, ranks: int = 1) -> dict:
    """Run base_train in `ranks` processes, for a warm-up and `num_steps` steps.

    Returns its config.json as `run`; in `lines` the metrics of each step; seconds from its start to its end; and the
    peak memory_gb of rank 0.
    """
    if get_dist()[2] > 1:
        raise UserError("this starts processes itself; accepted: without torchrun (plan: --ranks=N)")
    fixed = (
        f"--num_iterations={WARM_UP + num_steps} --log_every=1 --model_tag=arm "
        "--eval_every=-1 --sample_every=-1 --save_every=-1"
    )
    launcher = f"-m torch.distributed.run --standalone --nproc_per_node={ranks}" if ranks > 1 else ""
    command = shlex.split(f"{launcher} -m scripts.base_train {fixed} {arguments}")
    data = base_dir() / "data"
    os.makedirs(data, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "data").symlink_to(data.absolute())
        environment = os.environ | {"NANODIFF_BASE_DIR": folder}
        start = time.monotonic()
        process = subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)
        seconds = time.monotonic() - start
        if process.returncode:
            raise UserError(f"{' '.join(command)}: {process.stderr.strip()[-2000:]}")
        run_dir = Path(folder, "runs", "arm")
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        run = read_json(run_dir / "config.json")
    memory = re.search(r"([\d.]+) GiB of memory at the peak", process.stdout)
    return {"run": run, "lines": list(map(json.loads, lines)), "seconds": seconds, "memory_gb": float(memory[1])}


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


def table_head(row: dict) -> str:
    return "  ".join(f"{name:>9}" for name in row)


def table_line(row: dict) -> str:
    cells = []
    for name, value in row.items():
        digits = 0 if isinstance(value, int) else 2
        cells.append(f"{value:{max(len(name), 9)},.{digits}f}")
    return "  ".join(cells)


def main():
    configure(globals())
    names = [arm.strip() for arm in arms.split("|")]
    arguments = [f"{shared} {PUBLISHED if name == 'published' else name}" for name in names]
    turns = [[take_turn(arm, steps) for arm in arguments] for _ in range(rounds)]
    rows = [make_row(of_arm) for of_arm in zip(*turns)]
    for row in rows:
        row["ratio"] = row["images_per_sec"] / rows[0]["images_per_sec"]
    print0(f"{table_head(rows[0])}  what")
    for name, row in zip(names, rows):
        print0(f"{table_line(row)}  {shared} {name}")
    return rows


if __name__ == "__main__":
    main()
