#!/usr/bin/env bash
# The first half hour on a GPU: is it correct, how fast is it, does it train? Each stage has its own time limit; logs
# and a summary go to OUT, by default in $NANODIFF_BASE_DIR. Not yet run on a GPU.
#   bash runs/gpu.sh
#   STAGES="bench12 train" OUT=/tmp/gpu BATCH24=8 bash runs/gpu.sh        some stages; smaller batches for a smaller GPU
if [[ $(nvidia-smi -L 2> /dev/null) != GPU* ]]; then
    echo "error: nvidia-smi finds no GPU here; runs/gpu.sh checks and measures nanodiff on one" >&2
    exit 2
fi
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
set +e  # a stage that fails does not end the others

stages=${STAGES:-tests bench12 bench24 train}
base=${NANODIFF_BASE_DIR:-$HOME/.cache/nanodiff}
out=${OUT:-$base/gpu_$(date +%Y%m%d_%H%M%S)}
data=cifar10
mkdir -p "$out"
summary=$out/summary.txt
failed=0

note() { echo "$*" | tee -a "$summary"; }

# stage NAME SECONDS COMMAND...: run it with its output in OUT/NAME.log. At its limit a stage gets SIGTERM, then SIGKILL
stage() {
    local name=$1 limit=$2 start=$SECONDS code
    shift 2
    echo "+ $*" >> "$out/$name.log"
    timeout --kill-after=60 "$limit" "$@" >> "$out/$name.log" 2>&1
    code=$?
    case $code in
        0) note "$name: done in $((SECONDS - start)) s" ;;
        124) note "$name: stopped at its limit of $limit s" ;;
        *) note "$name: FAILED with exit code $code after $((SECONDS - start)) s, see $out/$name.log" && failed=1 ;;
    esac
}

wanted() {
    [[ " $stages " == *" $1 "* ]] || { note "$1: skipped, not in STAGES=\"$stages\""; return 1; }
}

note "$(nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader)"
note "commit $(git rev-parse HEAD 2> /dev/null || echo unknown)"
note "$(python3 -c 'import torch; print("torch", torch.__version__)')"

# The same numbers as on a CPU, bitwise resume, every collective, no recompiles
if wanted tests; then
    stage tests 900 python3 -m pytest -m cuda -rs tests/test_cuda.py
    note "$(tail -n 1 "$out/tests.log")"
fi

# The published recipe (eager, fp32 with TF32, AdamW) against the same model compiled in bf16, then against ours with
# Muon. Both of a pair are in memory at once
bench() { # bench NAME DEPTH BATCH
    wanted "$1" || return
    local size=(--depth="$2" --batch_size="$3" --dtype=bfloat16)
    stage "$1" 300 python3 -m scripts.bench "${size[@]}" --archs=dit_classic --optimizers=adamw
    stage "$1" 300 python3 -m scripts.bench "${size[@]}" --archs=dit --optimizers=muon
    note "$(grep -A 3 '^training' "$out/$1.log")"
}
bench bench12 12 "${BATCH12:-128}"
bench bench24 24 "${BATCH24:-32}"

# Ten minutes of training. At the limit SIGTERM makes it save and leave; the same command resumes
if wanted train; then
    if ! [ -f "$base/data/cifar10/meta.json" ]; then
        note "train: prepare_data has not made CIFAR-10; using shapes32 instead"
        data=shapes32
    fi
    stage train 600 python3 -m scripts.base_train runs/cifar10.py --data=$data --model_tag="gpu_$data" \
        --eval_every=500 --sample_every=500
    note "$(grep -E '^(attention|peak): |val loss' "$out/train.log" | tail -n 3)"
    note "$(grep '^step .*img/s' "$out/train.log" | tail -n 1)"
fi

note "logs and this summary: $out"
exit $failed
