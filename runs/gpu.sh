#!/usr/bin/env bash
# The first quarter of an hour on a GPU: is it correct, how fast is it, does it train? Stages of at most 90 s, the last
# of 5 minutes. Each prints one line; its log goes to OUT, by default in $NANODIFF_BASE_DIR.
#   bash runs/gpu.sh
#   STAGES="step whole" OUT=/tmp/gpu IMAGES=cifar10.tar.gz bash runs/gpu.sh     some stages; IMAGES: what to train on last
if [[ $(nvidia-smi -L 2> /dev/null) != GPU* ]]; then
    echo "error: nvidia-smi finds no GPU here; runs/gpu.sh checks and measures nanodiff on one" >&2
    exit 2
fi
needs="pytest"
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
set +e  # a stage that fails does not end the others

stages=${STAGES:-values step whole d24 save exchange small determinism prepare train}
base=${NANODIFF_BASE_DIR:-$HOME/.cache/nanodiff}
out=${OUT:-$base/gpu_$(date +%Y%m%d_%H%M%S)}
gpus=$(nvidia-smi -L | grep -c ^GPU)
table=()
failed=0
mkdir -p "$out"

# stage NAME SECONDS PATTERN COMMAND...: run it with its output in OUT/NAME.log; its verdict is the last line there that
# matches PATTERN. At its limit it gets SIGTERM, which makes a training run save and leave, then SIGKILL
stage() {
    local name=$1 limit=$2 pattern=$3 start=$SECONDS code end
    shift 3
    [[ " $stages " == *" $name "* ]] || return
    echo "+ $*" >> "$out/$name.log"
    timeout --kill-after=30 "$limit" "$@" >> "$out/$name.log" 2>&1
    code=$?
    case $code in
        0) end=done ;;
        124) end="stopped at its limit" ;;
        *) end="FAILED with exit code $code, see $out/$name.log" failed=1 ;;
    esac
    table+=("$(printf '%-12s %4d s  %s: %s' "$name" $((SECONDS - start)) "$end" "$(grep -E "$pattern" "$out/$name.log" | tail -n 1)")")
    echo "${table[-1]}"
}

tests=(python3 -m pytest -m cuda -rs -x tests/test_cuda.py -k)
train=(python3 -m scripts.base_train --device_type=cuda --data=shapes32 --eval_every=-1 --sample_every=-1 --save_every=-1 --resume=never)
d12=(--depth=12 --total_batch_size=512 --device_batch_size=256)
line='^step .*img/s'

nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader
echo "commit $(git rev-parse HEAD 2> /dev/null || echo unknown), $(python3 -c 'import torch; print("torch", torch.__version__)')"

# Values first: the same numbers as on a CPU; the compiled optimizer too
stage values 90 'passed|failed|error|skipped' "${tests[@]}" "gradients or optimizer or rows or waits"
# One step of DiT-B, compiled by blocks; recompiles and graph breaks are in the log
stage step 90 "$line" env TORCH_LOGS=recompiles,graph_breaks "${train[@]}" "${d12[@]}" --num_iterations=60 --model_tag=gpu_step
# The same step, compiled as a whole: a run of 3,000 steps, stopped at its limit
stage whole 90 "$line" "${train[@]}" "${d12[@]}" --num_iterations=3000 --model_tag=gpu_whole
stage d24 90 "$line" "${train[@]}" --depth=24 --total_batch_size=128 --device_batch_size=128 --num_iterations=20 --model_tag=gpu_d24
# Save every 20 steps, stop by a signal, resume: the steps after a save are no slower
stage save 90 'steps after a save|Error' bash -c '
    run=("$@" --save_every=20 --log_every=1 --num_iterations=1000 --resume=auto --model_tag=gpu_save)
    timeout 50 "${run[@]}"
    timeout 20 "${run[@]}"
    python3 - "$0/runs/gpu_save/metrics.jsonl" << "END"
import json, pathlib, statistics, sys
path = pathlib.Path(sys.argv[1])
lines = [json.loads(line) for line in path.open()] if path.exists() else []
ms = {after: [x["train/dt_ms"] for x in lines[20:] if (x["step"] % 20 in (1, 2)) == after] for after in (False, True)}
if not all(ms.values()):
    sys.exit(f"Error: only {len(lines)} steps were logged in 70 s, too few to compare: the first compiles, see above")
print(f"steps after a save {statistics.median(ms[True]):.1f} ms, others {statistics.median(ms[False]):.1f} ms")
END' "$base" "${train[@]}" "${d12[@]}"
# NCCL: every collective on one rank, or training on all GPUs
if [ "$gpus" = 1 ]; then
    stage exchange 90 'passed|failed|error|skipped' "${tests[@]}" collective
else
    stage exchange 90 "$line" python3 -m torch.distributed.run --standalone --nproc_per_node="$gpus" \
        -m "${train[@]:2:1}" -- "${train[@]:3}" --depth=12 --total_batch_size=512 --num_iterations=100 --model_tag=gpu_exchange
fi
# Steps so small that the host may be the limit
stage small 90 "$line" "${train[@]}" --depth=4 --total_batch_size=64 --num_iterations=400 --model_tag=gpu_small
stage determinism 90 'passed|failed|error|skipped' "${tests[@]}" "deterministic or save"

# Five minutes of training
data=shapes32
if [ -n "${IMAGES:-}" ]; then
    stage prepare 90 made python3 -m scripts.prepare_data --path="$IMAGES" --resolution=32 --name=gpu_images --overwrite
    data=gpu_images
fi
stage train 300 'val loss' python3 -m scripts.base_train --device_type=cuda --data=$data --depth=8 --num_epochs=100 --model_tag=gpu_train

echo
{
    printf '%s\n' "${table[@]}"
    grep -H "^compiled " "$out"/*.log # compiled code against eager
} | tee "$out/summary.txt"
exit $failed
