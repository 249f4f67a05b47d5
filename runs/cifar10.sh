#!/usr/bin/env bash
# CIFAR-10 on one GPU: download and check, train, look, measure. Meant for about ten minutes; not yet timed.
#   bash runs/cifar10.sh                          further arguments go to base_train: --num_iterations=500 --model_tag=short
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
need_gpu "runs/cifar10_cpu.py is a preset for CPUs"

[ -f "${NANODIFF_BASE_DIR:-$HOME/.cache/nanodiff}/data/cifar10/meta.json" ] ||
    python3 -m scripts.prepare_data --source=cifar10 --name=cifar10
python3 -m scripts.base_train runs/cifar10.py "$@"
find_trained cifar10 "$@"
python3 -m scripts.base_eval --model="$run" --metric=fd_classifier --num_images=10000
python3 -m scripts.sample --model="$run" --num_images=100
