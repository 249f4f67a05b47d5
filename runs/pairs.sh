#!/usr/bin/env bash
# From an outline to the shape: train on pairs of images, then draw from 400 outlines that training has not seen. An
# outline gives shape, place and size; the model chooses the colour.
#   bash runs/pairs.sh                            further arguments go to base_train: --seed=1
needs=PIL
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
work=${NANODIFF_BASE_DIR:-$HOME/.cache/nanodiff}/pairs
mkdir -p "$work"

python3 -m runs.pairs.outlines make "$work"
python3 -m scripts.prepare_data --path="$work/images.npy" --pairs="$work/outlines.npy" --name=pairs --overwrite
python3 -m scripts.base_train runs/pairs_cpu.py "$@"
find_trained pairs_cpu "$@"
rm -f "$work/drawn.npz"  # of an earlier model
python3 -m scripts.sample --model="$run" --pairs="$work/unseen.npy" --num_images=400 --npz --out="$work/drawn"
python3 -m runs.pairs.outlines judge "$work"
