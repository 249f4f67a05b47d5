#!/usr/bin/env bash
# Nine minutes on a GPU: is nanodiff correct, how fast is it, does it train? Stages that are not timed run first, side by
# side; the others run alone, the most useful first, each with a time limit. Logs and results.jsonl (a line per stage) go
# to OUT, by default in $NANODIFF_BASE_DIR; the last lines are a table beside an H100's figures. Needs no network if the
# data are there. An H100 took 71 s side by side, 13 s for the ceilings, 20 to 40 s per timing: 71 + 13 + 2 * 40 + 300 of
# training + 70 around it = 534 of 540 s. Other timings run if time is left. On a GPU it has run in parts, not
# yet d24_fp8, d12_tuned, save, exchange and half of the kinds.
#   bash runs/gpu.sh
#   STAGES="d12 d12_fp8" IMAGES=cifar10.tar.gz TOTAL=1200 MINUTES=10 STRETCH=2 bash runs/gpu.sh
#     some stages; images to train on, unless there is a set cifar10; seconds in all; minutes of training; a factor on
#     each stage's limit
#   STRETCH=8 TOTAL=4800 MINUTES=1 bash runs/gpu.sh
#     a rehearsal of everything on a slow host
see='import sys, torch; sys.exit(not torch.cuda.is_available())'
if ! python3 -c "$see" 2> /dev/null && [[ $(nvidia-smi -L 2> /dev/null) != GPU* ]]; then
    echo "error: there is no GPU here; runs/gpu.sh checks and measures nanodiff on one" >&2
    exit 2
fi
needs="pytest"
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
set +e  # a stage that fails does not end the others

stages=${STAGES:-tests kinds data ceilings d12 d12_fp8 d24 d24_fp8 d12_tuned save exchange cifar10}
total=${TOTAL:-540} minutes=${MINUTES:-5}
base=${NANODIFF_BASE_DIR:-$HOME/.cache/nanodiff}
export NANODIFF_BASE_DIR=$base
out=${OUT:-$base/gpu_$(date +%Y%m%d_%H%M%S)}
gpus=$(python3 -c 'import torch; print(torch.cuda.device_count())')
reserve=0  # seconds that a stage must leave
fp8=--fp8
if ! python3 -c 'import sys, torch; sys.exit(torch.cuda.get_device_capability() < (9, 0))'; then
    echo "no fp8: it needs a Hopper GPU or a newer one"
    fp8= stages=${stages//d??_fp8/}
fi
mkdir -p "$out"
: > "$out/results.jsonl"
for name in $stages warm warm6 kinds_map kinds_lora cifar10_step; do
    rm -rf "$base/runs/gpu_$name"  # an earlier call's, whose checkpoints would be refused
done

# skip NAME SECONDS: note that too few seconds are left
skip() { python3 runs/gpu/figures.py skip "$out" "$1" "$2"; }

# stage NAME SECONDS COMMAND...: run COMMAND with its output in OUT/NAME.log, then note its figures. At the limit it gets
# SIGTERM, at which a training run saves and leaves, then SIGKILL
stage() {
    local name=$1 limit=$(($2 * ${STRETCH:-1})) start=$SECONDS left=$((total - SECONDS - reserve)) code
    shift 2
    [[ " $stages " == *" $name "* ]] || return
    [ $((2 * left)) -ge "$limit" ] || { skip "$name" $left; return; }
    [ "$left" -ge "$limit" ] || limit=$left
    echo "+ $*" >> "$out/$name.log"
    timeout --kill-after=20 "$limit" "$@" >> "$out/$name.log" 2>&1
    code=$?
    python3 runs/gpu/figures.py note "$out" "$name" $code $((SECONDS - start)) "$base/runs/gpu_$name"
}

# trial NAME ARGUMENTS...: a stage's training run; `within`, if set, is the command that limits it
trial() {
    local name=$1
    shift
    $within python3 -m scripts.base_train --device_type=cuda --data=shapes32 --eval_every=-1 --sample_every=-1 --save_every=-1 \
        --resume=never --log_every=5 --model_tag="gpu_$name" "$@"
}
d6=(--flip --depth=6 --total_batch_size=512 --device_batch_size=512 --lr=0.00566 --muon_lr=0.0566 --ema_rates=0.9995)
d12=(--depth=12 --total_batch_size=512 --device_batch_size=256 --lr=0.0028 --muon_lr=0.057)
d24=(--depth=24 --total_batch_size=256 --device_batch_size=128 --lr=0.001 --muon_lr=0.03)

# Tiny runs of every kind: does each reach its end?
kinds() {
    local small=(--depth=2 --num_iterations=4 --total_batch_size=32) failures=0
    for kind in "" "--objective=eps --timesteps=loss-second-moment" "--dtype=float16" "--dtype=float32 --guided_from=0" \
        "--arch=unet --depth=1" "--arch=dit_classic --objective=eps --variance=learned_range" "--low_res_size=8 --checkpointing" \
        "--deterministic" "--device_batch_size=0" "--optimizer=adamw" $fp8 "--save_every=0"; do
        trial kinds "${small[@]}" --compile=False $kind || { echo "FAILED: $kind"; failures=1; }
    done
    trial kinds_map "${small[@]}" --compile=False --objective=flow_map --init_from=gpu_kinds || failures=1
    trial kinds_lora "${small[@]}" --compile=False --lora_rank=2 --init_from=gpu_kinds || failures=1
    return $failures
}

# Save every 20 steps, stop by a signal, which takes one more save, resume: figures.py compares the steps after a save with
# the others. --foreground: else timeout makes a process group of its own, which outlives the stage's limit
save() {
    local run=("${d12[@]}" --save_every=20 --log_every=1 --num_iterations=1000 --resume=auto) seconds within
    for seconds in 25 20; do
        within="timeout --foreground $((seconds * ${STRETCH:-1}))"
        trial save "${run[@]}" || [ $? = 124 ]
    done
    grep -q "^resumed from" "$out/save.log"
}

# The set cifar10: already there, from IMAGES, or downloaded
data() {
    [ ! -d "$base/data/cifar10" ] || return 0
    local from=(--source=cifar10)
    [ -z "${IMAGES:-}" ] || from=(--path="$IMAGES" --resolution=32)
    python3 -m scripts.prepare_data "${from[@]}" --name=cifar10
}

# Train for SECONDS, whose number of steps follows from 60 timed steps; then draw samples and judge them
cifar10() {
    local seconds=$1 set=cifar10 steps cfg
    [ -d "$base/data/cifar10" ] || set=shapes32
    trial cifar10_step --data=$set "${d6[@]}" --num_iterations=60
    steps=$(python3 runs/gpu/figures.py steps "$base/runs/gpu_cifar10_step" "$seconds")
    trial cifar10 --data=$set "${d6[@]}" --num_iterations="$steps" --save_every=0
    cp "$base/runs/gpu_cifar10/metrics.jsonl" "$out/cifar10_metrics.jsonl"
    for cfg in 1 1.5; do
        python3 -m scripts.sample --model=gpu_cifar10 --num_images=5000 --sampler=heun --steps=13 --cfg_scale=$cfg \
            --cfg_interval=0.3,0.7 --batch_size=500 --npz --out="$out/cifar10_$cfg.npz"
        python3 -m scripts.base_eval --metric=fd_classifier --samples="$out/cifar10_$cfg.npz" --data=$set \
            --judge=runs/records/judge_cifar10.safetensors
        echo "judged: guided by $cfg"
    done
}
# A stage's command may be one of these functions. -e: a function fails at its first error. The trap keeps bash alive after
# SIGTERM until its command has ended, so that timeout can still kill the command
shell=(bash -ec 'trap "exit 143" TERM; eval "$(cat "$0")"; "$@"' "$out/functions")
{ declare -f trial kinds save data cifar10; declare -p base out stages shell fp8 d6 d12 d24; } > "$out/functions"

python3 -c 'import torch; print(torch.cuda.get_device_name(), "torch", torch.__version__)'
echo "commit $(git rev-parse HEAD 2> /dev/null || echo unknown), $gpus GPU(s), at most $total s; logs: $out"

# Side by side: stages that are not timed, and compilation for the timings below
python3 -c 'import xdist' 2> /dev/null && workers=(-n 6) || workers=()
# -vv, against the -q of pyproject.toml: the number that passed, and the names until then if the limit ends them
stage tests 110 python3 -m pytest -m cuda -rs -vv "${workers[@]}" tests/test_cuda.py &
stage kinds 110 "${shell[@]}" kinds &
stage data 80 "${shell[@]}" data &
if [[ " $stages " == *" d12 "* ]]; then
    stages="$stages warm" stage warm 60 "${shell[@]}" trial warm "${d12[@]}" --num_iterations=3 > /dev/null &
fi
if [[ " $stages " == *" cifar10 "* ]]; then
    stages="$stages warm6" stage warm6 60 "${shell[@]}" trial warm6 "${d6[@]}" --num_iterations=3 > /dev/null &
fi
wait

# Alone
stage ceilings 40 python3 runs/gpu/ceilings.py
stage d12 60 "${shell[@]}" trial d12 "${d12[@]}" --num_iterations=60
stage d12_fp8 80 "${shell[@]}" trial d12_fp8 "${d12[@]}" --num_iterations=60 --fp8=True
# The stages below leave time for the training, and for measuring, sampling and judging it
[[ " $stages " != *" cifar10 "* ]] || reserve=$((minutes * 60 + 70))
stage d24 80 "${shell[@]}" trial d24 "${d24[@]}" --num_iterations=25
stage d24_fp8 80 "${shell[@]}" trial d24_fp8 "${d24[@]}" --num_iterations=25 --fp8=True
stage d12_tuned 90 env TORCHINDUCTOR_COORDINATE_DESCENT_TUNING=1 "${shell[@]}" trial d12_tuned "${d12[@]}" --num_iterations=60
stage save 60 "${shell[@]}" save
if [ "$gpus" = 1 ]; then
    stage exchange 40 python3 -m pytest -m cuda -rs -vv tests/test_cuda.py -k collective
else
    stage exchange 80 python3 -m torch.distributed.run --standalone --nproc_per_node="$gpus" -m scripts.base_train -- \
        --data=shapes32 --eval_every=-1 --sample_every=-1 --save_every=-1 --resume=never --log_every=5 \
        --model_tag=gpu_exchange --depth=12 --total_batch_size=512 --num_iterations=100
fi
reserve=0
seconds=$((total - SECONDS - 70)) # 70: two starts, 60 steps, samples, judge
[ $seconds -lt $((minutes * 60)) ] || seconds=$((minutes * 60))
if [ $seconds -ge 30 ]; then
    stage cifar10 $((seconds + 140)) "${shell[@]}" cifar10 $seconds
elif [[ " $stages " == *" cifar10 "* ]]; then
    skip cifar10 $((seconds + 70))
fi

echo
python3 runs/gpu/figures.py table "$out"
