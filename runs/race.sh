#!/usr/bin/env bash
# A race against other projects' own code, by the rules of runs/RECORDS.md: CIFAR-10, the same cores, the same seconds from
# start to end, 500 samples by each project's own sampler with 25 evaluations, one judge.
#   RACE_PYTHON=VENV/bin/python bash runs/race.sh FOLDER_OF_CLONES [minRF DiT ...]
# FOLDER_OF_CLONES holds git clones: cloneofsimo/minRF, lucidrains/denoising-diffusion-pytorch, huggingface/diffusers,
# openai/improved-diffusion, facebookresearch/DiT. RACE_PYTHON is a Python with their packages: torch torchvision accelerate
# diffusers datasets tensorboard einops ema-pytorch pytorch-fid timm blobfile. runs/race/peers.py says what is changed in
# each, and why. Each peer runs at its published rate times 1, 3 or 10, whichever has the lowest loss after a trial.
#   RACE_SECONDS=1200  RACE_TRIAL_SECONDS=60  RACE_FACTORS="1 3 10"  RACE_SEEDS=0  RACE_BATCH=64  RACE_IMAGES=500  RACE_EVALUATIONS="25 published"  RACE_OUT=FOLDER
# diffusers warms up for 500 steps, longer than a trial: give RACE_FACTORS=3. At factor 10 its loss rises to 1 at step 380.
# A step that has begun is finished, so a long first step overruns. Samples are drawn after the clock has stopped: on one core
# 500 take 4 minutes (DiT, 25 evaluations), 6 hours (diffusers, 1,000) or days (improved-diffusion, 4,000).
# First make the set, as RECORDS.md's rule 1 says
clones=$(realpath "${1:?error: give the folder of the clones}") || exit 2
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
shift
peers=("$@")
[ $# -gt 0 ] || peers=(minRF denoising-diffusion-pytorch diffusers improved-diffusion DiT)
out=${RACE_OUT:-${NANODIFF_BASE_DIR:-$HOME/.cache/nanodiff}/race}
mkdir -p "$out"
declare -A rates=([minRF]=5e-4 [denoising-diffusion-pytorch]=8e-5 [diffusers]=1e-4 [improved-diffusion]=1e-4 [DiT]=1e-4)

# The training images as files that every peer reads (CLASS/CLASS_NUMBER.png), and as one array
[ -f "$out/images/train.npz" ] || python3 - "$out/images" << 'EOP'
import sys
from pathlib import Path
import numpy as np
from nanodiff.data.dataset import open_dataset
from nanodiff.png import encode_png

data, out = open_dataset("cifar10", "train"), Path(sys.argv[1])
images = np.concatenate([data.images(ids) for ids in np.array_split(np.arange(len(data)), 50)])
images = images.transpose(0, 2, 3, 1)  # (N, H, W, C)
labels = np.asarray(data.labels(np.arange(len(data))))
for i, (image, label) in enumerate(zip(images, labels)):
    name = data.class_names[label]
    (out / "folder" / name).mkdir(parents=True, exist_ok=True)
    (out / "folder" / name / f"{name}_{i:05d}.png").write_bytes(encode_png(image))
np.savez(out / "train.npz", images=images, labels=labels)
EOP

for peer in "${peers[@]}"; do
    [ -n "${rates[$peer]:-}" ] || { echo "error: no peer $peer; accepted: ${!rates[*]}" >&2; exit 2; }
    [ -d "$clones/$peer" ] || { echo "error: no clone at $clones/$peer" >&2; exit 2; }
    echo "$peer at commit $(git -C "$clones/$peer" rev-parse --short HEAD)"
    best=""
    for factor in ${RACE_FACTORS:-1 3 10}; do
        rate=$(python3 -c "print(f'{${rates[$peer]} * $factor:g}')")
        arguments=("$peer" "$clones/$peer" "$out/images" "${RACE_TRIAL_SECONDS:-60}" "$rate")
        loss=$("${RACE_PYTHON:-python3}" runs/race/peers.py "${arguments[@]}" 2> "$out/${peer}_trial.log" | tail -n 1)
        echo "trial at rate $rate: loss $loss"
        best=$(printf '%s\n' "$best" "${loss%% *} $rate" | grep -E '^[0-9.]+ ' | sort -g | head -n 1)
    done
    rate=${best#* }
    for seed in ${RACE_SEEDS:-0}; do
        name=$out/${peer}_${rate}_seed$seed
        arguments=("$peer" "$clones/$peer" "$out/images" "${RACE_SECONDS:-1200}" "$rate" "$name")
        RACE_SEED=$seed "${RACE_PYTHON:-python3}" runs/race/peers.py "${arguments[@]}" > "$name.log" 2>&1 ||
            { echo "$peer at rate $rate failed; the end of $name.log:"; tail -n 5 "$name.log"; continue; }
        grep -a "start included" "$name.log"
        for samples in "$name"_*.npz; do
            python3 -m scripts.base_eval --metric=fd_classifier --samples="$samples" --data=cifar10 \
                --judge=runs/records/judge_cifar10.safetensors > "${samples%.npz}.txt"
            echo "$(basename "$samples"): $(grep fd_classifier "${samples%.npz}.txt")"
        done
    done
done
