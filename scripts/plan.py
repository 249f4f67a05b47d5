"""
What can I train here in an hour? Time a few steps of some depths, print what each would reach, with advice and the
command for the best. This takes a minute or two.

    python3 -m scripts.plan --data=mine --minutes=60
    python3 -m scripts.plan --data=mine --minutes=600 --ranks=8     # on eight GPUs of one machine

A model is whole at 8 to 12 image tokens per parameter. With fewer it is too large for the time; with many more, a
deeper one draws better.
"""

import math
import shlex

import torch

from configurator import configure
from nanodiff.common import UserError, print0
from nanodiff.data.dataset import open_dataset
from scripts.bench import make_row, table_head, table_line, take_turn

data = "shapes"  # the set, as in base_train
minutes = 60.0  # > 0: of the whole run, from its start to its last grid
ranks = 1  # >= 1: GPUs or, on a CPU, processes

WHOLE = 8  # tokens per parameter; sizes that got as many reached the lowest loss in their time (runs/LOG.md, 7)
MOST_EPOCHS = 400  # 480 icons, depth 3: better than 100; at 600 of 104 icons 7% are copies (runs/LOG.md, 30)
NUM_CHECKS = 4  # validations and grids of a run
IMAGES_PER_CHECK = 4000  # trained on in the time one takes

configure(globals())
num_images = len(open_dataset(data, "train"))
print0(f"{data}: {num_images:,} images, {minutes:g} minutes, --ranks={ranks}; add --flip if mirrored images will do")

# ---------------------------------------------------------------------------------------------------------------------
# A row for each model timed, on the way to the deepest that is whole

timed_batch = ranks * (256 if torch.cuda.is_available() else 32)
rows = {}
depth = 4
while depth not in rows:
    arguments = f"--data={shlex.quote(data)} --depth={depth} --total_batch_size={timed_batch}"
    try:
        turn = take_turn(arguments, 5, ranks)
    except UserError as error:
        if not rows:
            raise
        print0(f"depth {depth} does not run here: {str(error)[-200:]}")
        break
    run = turn["run"]
    model = run["model"]
    tokens = (model["image_size"] // model["patch_size"]) ** 2
    speed = make_row([turn])["images_per_sec"]
    images = speed * (60 * minutes - turn["seconds"]) - NUM_CHECKS * IMAGES_PER_CHECK
    images = min(max(images, 1), MOST_EPOCHS * num_images)
    batch = ranks * 2 ** round(math.log2(max(64 * math.sqrt(images * tokens / 20e6), 16) / ranks))  # base_train's law
    steps = math.ceil(images / batch)
    row = {
        "depth": depth,
        "patch": model["patch_size"],
        "parameters": run["num_params"],
        "GiB": turn["memory_gb"],
        "images/s": speed,
        "batch": batch,
        "steps": steps,
        "epochs": steps * batch / num_images,
        "tokens/parameter": steps * batch * tokens / run["num_params"],
    }
    if not rows:
        print0(table_head(row))
    print0(table_line(row))
    rows[depth] = row
    # Parameters and the time of an image each grow with about the cube of the depth
    depth = min(max(1, int(depth * (row["tokens/parameter"] / WHOLE) ** (1 / 6))), 2 * depth)

# ---------------------------------------------------------------------------------------------------------------------
# Advice, and the command

whole = [row for row in rows.values() if row["tokens/parameter"] >= WHOLE]
best = max(whole, key=lambda row: row["depth"], default=row)
if not whole:
    print0(f"none gets {WHOLE} tokens per parameter: give more minutes or images, or fine-tune (runs/GUIDE.md)")
if best["epochs"] >= MOST_EPOCHS:
    print0(f"few images for {minutes:g} minutes: the run ends after {MOST_EPOCHS} epochs of them")
launcher = f"torchrun --standalone --nproc_per_node={ranks}" if ranks > 1 else "python3"
every = math.ceil(best["steps"] / NUM_CHECKS)
print0(
    f"{launcher} -m scripts.base_train --data={shlex.quote(data)} --depth={best['depth']} "
    f"--num_iterations={best['steps']} --total_batch_size={best['batch']} --eval_every={every} --sample_every={every}"
)
