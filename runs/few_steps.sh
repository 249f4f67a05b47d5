#!/usr/bin/env bash
# One to four evaluations per image instead of 21 or more: train the model of runs/cpu.sh for twice as many steps, tune it
# into a flow map in as much time, then compare. Six to eleven minutes on two cores.
#   bash runs/few_steps.sh                        further arguments go to base_train: --num_iterations=50
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

python3 -m scripts.base_train runs/shapes_cpu.py --model_tag=shapes_long --num_iterations=1400
python3 -m scripts.base_train runs/few_steps_cpu.py "$@"
find_trained few_steps_cpu "$@"

python3 -m scripts.base_eval --model="$run" --metric=well_formed --steps=1,2,4
python3 -m scripts.base_eval --model=shapes_long --metric=well_formed --sampler=heun --steps=7  # 21 evaluations

# A picture: rows of 1, 2 and 4 evaluations from the same noise, and a row of the flow model's 21
python3 - "$run" "$folder/few_steps.png" <<'PYTHON'
import sys

import numpy as np

import nanodiff
from nanodiff.png import encode_png, make_grid

tuned = nanodiff.load(sys.argv[1])
rows = [tuned.sample(num_images=16, steps=steps) for steps in (1, 2, 4)]
flow = nanodiff.load("shapes_long")
rows.append(flow.sample(num_images=16, steps=7))
images = np.concatenate(rows).transpose(0, 3, 1, 2)
with open(sys.argv[2], "wb") as file:
    file.write(encode_png(make_grid(images, columns=16)))
print(f"rows of 1, 2, 4 and 21 evaluations: {sys.argv[2]}")
PYTHON
