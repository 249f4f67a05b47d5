#!/usr/bin/env bash
# README's first picture: train on emoji of two styles (3,822 images, licences Apache 2.0 and CC BY 4.0), sample, and count
# near-copies. About 90 minutes on one core with AMX. Needs npm, which downloads 136 MB.
#   bash runs/emoji.sh                            further arguments go to base_train: --num_iterations=1000
needs=PIL
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

base=${NANODIFF_BASE_DIR:-$HOME/.cache/nanodiff}
if ! [ -f "$base/data/emoji64/meta.json" ]; then
    unpacked=$(mktemp -d)
    trap 'rm -rf "$unpacked"' EXIT
    (cd "$unpacked" && npm pack --silent emoji-datasource-google@16.0.0 emoji-datasource-twitter@16.0.0)
    python3 - "$unpacked" << 'EOF'
"""Unpack the images of 64 pixels into one folder per category."""
import json, sys, tarfile
from pathlib import Path

folder = Path(sys.argv[1])
for style in ("google", "twitter"):
    with tarfile.open(folder / f"emoji-datasource-{style}-16.0.0.tgz") as archive:
        files = {member.name: archive.extractfile(member).read() for member in archive if member.isfile()}
    for emoji in json.loads(files["package/emoji.json"]):
        image = files.get(f"package/img/{style}/64/{emoji['image']}")
        category = folder / "images" / emoji["category"].replace("&", "and").replace(" ", "_")
        category.mkdir(parents=True, exist_ok=True)
        if image:
            (category / f"{style}_{emoji['image']}").write_bytes(image)
EOF
    python3 -m scripts.prepare_data --path="$unpacked/images" --name=emoji64 --resolution=64
fi
# 250 epochs. By x0 patches of 8 pixels drew emoji better than by the velocity (one seed: runs/LOG.md, 31). Guided at all
# t emoji score a little better than in the middle of t, the default (runs/LOG.md, 13)
python3 -m scripts.base_train --data=emoji64 --model_tag=emoji64 --depth=4 --objective=flow_x0 --num_iterations=7100 \
    --total_batch_size=128 --flip --cfg_scale=1.5 --cfg_interval=0,1 "$@"
case " $* " in *" --help"* | *" -h "*) exit ;; esac

find_trained emoji64 "$@"
python3 -m scripts.sample --model="$run" --num_images=500 --npz --out="$samples"
python3 -m scripts.base_eval --metric=fd_classifier --samples="$samples" --data=emoji64
# More guidance for README's pictures: clearer and less varied (see the log of 92 minutes)
for class in Flags Smileys_and_Emotion; do
    python3 -m scripts.sample --model="$run" --classes=$class --num_images=24 --cfg_scale=2.5
done
