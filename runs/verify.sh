#!/usr/bin/env bash
# Check the figures of the shipped weights: draw 5,000 samples, measure them by the shipped judge, compare. No network, no data.
#   bash runs/verify.sh                           the flow map, 4 evaluations per sample: a minute on two cores
#   bash runs/verify.sh cifar10                   the flow model, 25 evaluations: three to five minutes
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
name=${1:-cifar10_map}
work=${NANODIFF_BASE_DIR:-$HOME/.cache/nanodiff}/verify_$name
rm -rf "$work"
mkdir -p "$work"

python3 -m scripts.sample --model="runs/weights/$name.safetensors" --num_images=5000 --batch_size=250 --npz --out="$work/samples.npz"
python3 -m scripts.base_eval --metric=fd_classifier --samples="$work/samples.npz" \
    --judge=runs/records/judge_cifar10.safetensors --reference=runs/records/reference_cifar10.npz
python3 - "runs/weights/$name.safetensors" "$work"/eval_*.json <<'PYTHON'
import json
import sys

from nanodiff.safetensors import load_safetensors

_, metadata = load_safetensors(sys.argv[1])
stated = json.loads(metadata["release"])["figures"]
found = json.load(open(sys.argv[2]))
wrong = 0
for key, (value, allowed) in stated.items():
    differs = abs(found[key] - value) > allowed
    wrong += differs
    print(f"{key}: {found[key]:.3f}, stated {value:.3f} +- {allowed:.3f}{': differs' if differs else ''}")
print(f"{wrong} of {len(stated)} differ" if wrong else "all agree")
sys.exit(wrong > 0)
PYTHON
