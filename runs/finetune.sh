#!/usr/bin/env bash
# Fine-tuning on a laptop: a model that has never seen the class `dots`, then adapters and one new row of its class table
# that teach it. Further arguments go to lora_train: --rank=8 --targets=qkv,proj
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

known=circle,ring,target,triangle,cross,bar,stripes
python -m scripts.prepare_data --source=shapes --classes=$known --name=shapes_without_dots --overwrite
python -m scripts.base_train runs/shapes_cpu.py --data=shapes_without_dots --model_tag=shapes_without_dots
python -m scripts.lora_train --base=shapes_without_dots --data=shapes --model_tag=shapes_dots --rank=4 "$@"

judge="--metric=class_accuracy --data=shapes --num_images=400 --steps=10 --cfg_scale=3"
python -m scripts.base_eval --run=shapes_without_dots ${judge/data=shapes/data=shapes_without_dots}
python -m scripts.base_eval --run=shapes_dots $judge
