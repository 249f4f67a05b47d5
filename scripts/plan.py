"""
What can I train here in an hour? Time a few steps of each depth that fits, and print what it would reach, with the
command for the best. This takes a minute or two.

    python -m scripts.plan --data=mine --minutes=60
    python -m scripts.plan --data=mine --minutes=600 --ranks=8     # on eight GPUs of one machine

A model is whole at 8 to 12 image tokens per parameter. With fewer it is too large for the time; with many more, a
deeper one draws better.
"""

import math
import shlex

import torch

from configurator import configure
from nanodiff.common import UserError, get_dist, print0
from nanodiff.data.dataset import open_dataset
from nanodiff.device import device_name, init_device
from scripts.bench import WARM_UP, table_head, table_line, take_turn

data = "shapes"  # the set, as in base_train
minutes = 60.0  # > 0: of the whole run, from its start to its last grid
ranks = 1  # >= 1: GPUs or, on a CPU, processes

DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32)
WHOLE = 8  # tokens per parameter; sizes that got as many reached the lowest loss in their time (runs/LOG.md, 7)
SHALLOW = 4  # a shallower model gets larger patches, as in runs/cifar10_cpu.py: fewer tokens, so more blocks
MOST_EPOCHS = 100  # with more, a small set is memorised
NUM_CHECKS = 4  # validations and grids of a run
IMAGES_PER_CHECK = 4000  # that are trained on in the time of one


def make_row(turn: dict, num_images: int) -> dict:
    """What the timed model would reach in `minutes` on a set of `num_images`."""
    run = turn["run"]
    model = run["model"]
    tokens = (model["image_size"] // model["patch_size"]) ** 2
    steady = [line["train/dt_ms"] / 1000 for line in turn["lines"][WARM_UP:]]
    speed = len(steady) * run["config"]["total_batch_size"] / sum(steady)
    images = speed * (60 * minutes - turn["seconds"] + sum(steady)) - NUM_CHECKS * IMAGES_PER_CHECK
    images = min(max(images, 0), MOST_EPOCHS * num_images)
    batch = ranks * 2 ** round(math.log2(max(64 * math.sqrt(images * tokens / 20e6), 16) / ranks))  # base_train's law
    steps = int(images / batch)
    return {
        "depth": model["depth"],
        "patch": model["patch_size"],
        "tokens": tokens,
        "parameters": run["num_params"],
        "GiB": turn["memory_gb"],
        "images/s": speed,
        "batch": batch,
        "steps": steps,
        "epochs": steps * batch / num_images,
        "tokens/parameter": steps * batch * tokens / run["num_params"],
    }


def time_depths(num_images: int, patch_size: int = 0) -> list[dict]:
    """Print and return a row for each depth that is not far too small or large for the time."""
    batch = ranks * (256 if torch.cuda.is_available() else 32)
    rows = []
    estimate = 1.0  # of the depth's tokens per parameter
    for depth in DEPTHS:
        if rows:  # parameters and the time of an image each grow with about the cube of the depth
            estimate = rows[-1]["tokens/parameter"] * (rows[-1]["depth"] / depth) ** 6
        if estimate < 1:
            break
        if estimate > 100:
            continue
        arguments = f"--data={data} --depth={depth} --patch_size={patch_size} --total_batch_size={batch}"
        try:
            row = make_row(take_turn(arguments, 5, ranks), num_images)
        except UserError as error:
            if not rows:
                raise
            print0(f"depth {depth} does not run here: {str(error)[-200:]}")
            break
        if not rows:
            print0(table_head(row))
        rows.append(row)
        print0(table_line(row))
    return rows


def choose_row(rows: list[dict]) -> dict:
    """The deepest whole model; if none is whole, the shallowest."""
    whole = [row for row in rows if row["tokens/parameter"] >= WHOLE]
    return max(whole, key=lambda row: row["depth"], default=rows[0])


def main():
    configure(globals())
    if get_dist()[2] > 1:
        raise UserError("plan starts its own processes; without torchrun, give --ranks=N")
    num_images = len(open_dataset(data, "train"))
    print0(f"{data}: {num_images:,} images; {minutes:g} minutes on {ranks} x {device_name(init_device(''))}")
    rows = time_depths(num_images)
    if choose_row(rows)["depth"] < SHALLOW and rows[0]["tokens"] % 4 == 0:
        rows += time_depths(num_images, 2 * rows[0]["patch"])
    row = choose_row(rows)
    if not row["steps"]:
        raise UserError(f"minutes={minutes:g} end before the first step; accepted: more")
    if row["tokens/parameter"] < WHOLE:
        print0(f"none gets {WHOLE} tokens per parameter: give more minutes or images, or fine-tune (runs/GUIDE.md)")
    if row["epochs"] > 0.99 * MOST_EPOCHS:
        print0(f"few images for {minutes:g} minutes: the run ends after {MOST_EPOCHS} epochs of them")
    launcher = f"torchrun --standalone --nproc_per_node={ranks}" if ranks > 1 else "python"
    every = math.ceil(row["steps"] / NUM_CHECKS)
    print0(
        f"{launcher} -m scripts.base_train --data={shlex.quote(data)} --depth={row['depth']} "
        f"--patch_size={row['patch']} --num_iterations={row['steps']} --total_batch_size={row['batch']} "
        f"--eval_every={every} --sample_every={every}"
    )
    return rows


if __name__ == "__main__":
    main()
