#!/usr/bin/env bash
# Words to shapes: train on captions such as "small green circle, top left", as sequences of one-hot words, without a
# text encoder or a download. Eight pairs of colour and shape, such as "red circle", are in no training image; in the end
# samples of them are requested.
#   bash runs/words.sh                            further arguments go to base_train: --seed=1
needs=PIL
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
work=${NANODIFF_BASE_DIR:-$HOME/.cache/nanodiff}/words
mkdir -p "$work"

python3 -m runs.words.captions make "$work"
python3 -m scripts.prepare_data --path="$work/images.npz" --vectors="$work/captions.npy" --name=words --overwrite
python3 -m scripts.base_train runs/words_cpu.py "$@"
find_trained words_cpu "$@"
rm -f "$work"/drawn_*.npz  # of an earlier model
for pairs in seen unseen; do
    python3 -m scripts.sample --model="$run" --vectors="$work/$pairs.npy" --num_images=400 --npz \
        --out="$work/drawn_$pairs"
done
python3 -m runs.words.captions judge "$work"
