#!/usr/bin/env bash
# ImageNet at 256 px on a node of eight GPUs, from raw images to FID. Not yet run as a whole.
#   bash runs/speedrun.sh IMAGENET_TRAIN_FOLDER SD_VAE_FOLDER [arguments of base_train]
# IMAGENET_TRAIN_FOLDER has a folder of JPEGs per class; SD_VAE_FOLDER is stabilityai/sd-vae-ft-ema in diffusers format.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
[ $# -ge 2 ] || { echo "error: give two folders: ImageNet's training images and the autoencoder" >&2; exit 2; }
need_gpu "ImageNet at 256 pixels takes one"
images=$1 autoencoder=$2
shift 2
# By default torchrun kills its workers 30 s after a signal; saving a large model takes longer. After this time it also kills
# ranks that wait for a dead one in a collective, which no signal interrupts
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=120
data=${NANODIFF_BASE_DIR:-$HOME/.cache/nanodiff}/data
ranks=(python3 -m torch.distributed.run --standalone --nproc_per_node="${GPUS:-8}" -m)

[ -f "$data/imagenet256/meta.json" ] ||
    python3 -m scripts.prepare_data --path="$images" --resolution=256 --name=imagenet256 --val_fraction=0.01
[ -f "$data/imagenet256_latents/meta.json" ] ||
    "${ranks[@]}" scripts.cache_latents -- --data=imagenet256 --autoencoder="$autoencoder" --name=imagenet256_latents --flip
"${ranks[@]}" scripts.base_train -- runs/imagenet256.py "$@"
find_trained imagenet256 "$@"
"${ranks[@]}" scripts.sample --model="$run" --num_images=50000 --npz --sampler=heun --steps=50 --cfg_scale=1.5 --cfg_interval=0,1 \
    --out="$samples"
"${ranks[@]}" scripts.base_eval --metric=fid --samples="$samples"
