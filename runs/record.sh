#!/usr/bin/env bash
# An attempt at a record, by the rules of runs/RECORDS.md: train on CIFAR-10 within a time limit, then measure samples.
#   bash runs/record.sh cpu 1                        two CPU cores, 20 minutes; a record needs seeds 1, 2 and 3
#   bash runs/record.sh gpu 1                        one GPU, 5 minutes. Not yet run
# The GPU track's number of steps is for an H100; runs/gpu.sh finds another GPU's. Further arguments go to base_train.
# First make the set, as RECORDS.md's rule 1 says
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
track=${1:-} seed=${2:-}
[[ $track =~ ^(cpu|gpu)$ && $seed =~ ^[0-9]+$ ]] || { echo "error: give a track, cpu or gpu, and a seed" >&2; exit 2; }
[ "$track" = cpu ] || need_gpu "accepted: bash runs/record.sh cpu $seed"
case $track in
    cpu)
        limit=1200 num_images=5000
        settings=(--depth=3 --patch_size=4 --num_iterations=8000 --total_batch_size=64 --lr=0.004 --muon_lr=0.01)
        settings+=(--guided_from=0.4 --cfg_scale=3 --cfg_interval=0.3,0.7 --time_input=1000t)
        ;;
    gpu)
        limit=300 num_images=5000
        settings=(--depth=6 --num_iterations=5800 --total_batch_size=512 --device_batch_size=512)
        settings+=(--lr=0.00566 --muon_lr=0.0566 --ema_rates=0.9995)
        ;;
esac
tag=record_${track}_$seed
TORCHINDUCTOR_CACHE_DIR=$(mktemp -d) # empty, as compilation counts
export TORCHINDUCTOR_CACHE_DIR
trap 'rm -rf "$TORCHINDUCTOR_CACHE_DIR"' EXIT

find_trained "$tag" "${@:3}"
if [ -d "$folder" ] && [[ " $* " != *" --help"* ]]; then
    mv "$folder" "$folder.$(date +%Y%m%d_%H%M%S)"
    echo "an earlier attempt is now in $folder.*"
fi

start=$SECONDS
python3 -m scripts.base_train --data=cifar10 --flip --model_tag="$tag" --seed="$seed" "${settings[@]}" \
    --resume=never --eval_every=-1 --sample_every=-1 --save_every=0 "${@:3}"
seconds=$((SECONDS - start))
find_trained "$tag" "${@:3}"
rm -f "$samples"  # of an earlier attempt

python3 -m scripts.sample --model="$run" --num_images=$num_images --sampler=ralston --steps=9 --cfg_scale=1 --batch_size=250 \
    --npz --out="$samples"
python3 -m scripts.base_eval --metric=fd_classifier --samples="$samples" --data=cifar10 \
    --judge=runs/records/judge_cifar10.safetensors
echo "$run: $seconds s of at most $limit, process start and compilation included"
[ "$seconds" -le $limit ]
