#!/usr/bin/env bash
# How the weights in runs/weights were made: a flow model of CIFAR-10, its flow map, their figures. Takes hours on two cores:
# see the model card, runs/weights/README.md. First make the set: runs/RECORDS.md, rule 1
#   bash runs/release.sh                          further arguments go to all trainings: --num_iterations=50
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
work=${NANODIFF_BASE_DIR:-$HOME/.cache/nanodiff}/release
mkdir -p "$work"

python3 -m scripts.base_train runs/cifar10_release.py "$@"
python3 -m scripts.base_train runs/cifar10_plain.py "$@"
python3 -m scripts.base_train runs/cifar10_final.py "$@"

# Once more, longer, and with more of the t near 0 and 1
python3 -m scripts.base_train runs/cifar10_plain.py --model_tag=cifar10_plain2 --init_from=cifar10_final --seed=4 \
    --timestep_std=1.4 --num_iterations=7000 --warmup_ratio=0.0289 "$@"
python3 -m scripts.base_train runs/cifar10_final.py --model_tag=cifar10_final2 --init_from=cifar10_plain2 --seed=5 \
    --timestep_std=1.4 "$@"
python3 -m scripts.base_train runs/cifar10_map.py "$@"

for tag in cifar10_final2 cifar10_map; do
    rm -f "$work/$tag"*
    python3 -m scripts.export --model=$tag --out="$work/$tag.safetensors"
    for seed in 0 1 2; do  # the figures' tolerance: three deviations over seeds, and 1% for rounding
        python3 -m scripts.sample --model="$work/$tag.safetensors" --seed=$seed --num_images=5000 --batch_size=250 \
            --npz --out="$work/${tag}_$seed.npz"
        python3 -m scripts.base_eval --metric=fd_classifier --samples="$work/${tag}_$seed.npz" --data=cifar10 \
            --judge=runs/records/judge_cifar10.safetensors
    done
done

# Half precision, and the release's facts in the file's metadata
python3 - "$work" <<'PYTHON'
import glob
import hashlib
import json
import subprocess
import sys

import numpy as np
import torch

from nanodiff.safetensors import fingerprint, load_safetensors, save_safetensors

commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
for tag, name in (("cifar10_final2", "cifar10"), ("cifar10_map", "cifar10_map")):
    tensors, metadata = load_safetensors(f"{sys.argv[1]}/{tag}.safetensors")
    found = [json.load(open(path)) for path in sorted(glob.glob(f"{sys.argv[1]}/eval_fd_classifier_{tag}_?.npz_*.json"))]
    figures = {}
    for key in ("fd_classifier", "precision", "recall"):
        values = [figure[key] for figure in found]
        figures[key] = (round(np.mean(values), 4), round(3 * np.std(values, ddof=1) + 0.01 * np.mean(values), 4))
    tensors = {key: value.to(torch.float16) for key, value in tensors.items()}
    digest = hashlib.sha256()
    for key in sorted(tensors):
        digest.update(key.encode() + tensors[key].numpy().tobytes())
    release = {"commit": commit, "samples": 5000, "seeds": len(found), "figures": figures}
    release |= {"sha256_of_tensors": digest.hexdigest()}
    metadata["release"] = json.dumps(release)
    metadata["sha256"] = json.dumps(fingerprint({key: value.float() for key, value in tensors.items()}))  # as read
    save_safetensors(tensors, f"runs/weights/{name}.safetensors", metadata)
    print(name, json.dumps(release))
PYTHON
