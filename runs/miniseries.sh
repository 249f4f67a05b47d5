#!/usr/bin/env bash
# Models of several depths at equal FLOPs, and a page with their curves and a table. By default on the embedded shapes:
# 3e12 FLOPs take a few minutes at each of four depths on two CPU cores.
#   DEPTHS="4 6 8 12" FLOPS=1e17 bash runs/miniseries.sh --data=cifar10 --flip --patch_size=2    arguments go to base_train
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

find_trained "mini_${FLOPS:-3e12}" "$@"
tags=()
for depth in ${DEPTHS:-1 2 3 4}; do
    tags+=("${run}_d$depth")
    python3 -m scripts.base_train --depth="$depth" --target_flops="${FLOPS:-3e12}" --eval_every=100 --sample_every=0 \
        "$@" --model_tag="${run}_d$depth"
done
python3 -m scripts.report "${tags[@]}"
