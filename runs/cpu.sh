#!/usr/bin/env bash
# The whole story on a laptop: set up, train on the embedded shapes, look, measure. On two cores with AMX six minutes,
# with AVX2 alone fourteen, the installation excluded.
#   bash runs/cpu.sh                              further arguments go to base_train: --num_iterations=50
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

python -m scripts.base_train runs/shapes_cpu.py "$@"
python -m scripts.base_eval --run=shapes_cpu --metric=class_accuracy --num_images=400 --steps=10 --cfg_scale=3
