#!/usr/bin/env bash
# Words to shapes: train on captions such as "small green circle, top left", as sequences of one-hot words, without a
# text encoder and without a download. Eight pairs of colour and shape, such as "red circle", are in no training image
# and are asked for in the end.
#   bash runs/words.sh                            further arguments go to base_train: --seed=1
needs=PIL
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
work=${NANODIFF_BASE_DIR:-$HOME/.cache/nanodiff}/words
mkdir -p "$work"

# Images with captions for training; captions alone to ask for
python3 - "$work" << 'END'
import sys
import numpy as np
from nanodiff.data.shapes import draw_captioned, one_hot_words

images, captions = draw_captioned(20_000, seed=0)
np.savez(f"{sys.argv[1]}/images.npz", arr_0=images.transpose(0, 2, 3, 1))
np.save(f"{sys.argv[1]}/captions.npy", one_hot_words(captions))  # (20000, 5, 21)
for pairs in ("seen", "unseen"):
    _, captions = draw_captioned(400, seed=1, unseen=pairs == "unseen")
    np.save(f"{sys.argv[1]}/{pairs}.npy", one_hot_words(captions))
END
python3 -m scripts.prepare_data --path="$work/images.npz" --vectors="$work/captions.npy" --name=words --overwrite
python3 -m scripts.base_train runs/words_cpu.py "$@"
for pairs in seen unseen; do
    python3 -m scripts.sample --run=words_cpu --vectors="$work/$pairs.npy" --num_images=400 --steps=10 --cfg_scale=2 \
        --cfg_interval=0.3,0.85 --npz --out="$work/drawn_$pairs"
done

# What do the samples show? Renders are fitted to each and described in the words of the captions. The picture has the
# first sample of each pair that was not in training
python3 - "$work" << 'END'
import sys
import numpy as np
from PIL import Image, ImageDraw, ImageFont
from nanodiff.data.shapes import CAPTION_RADII, CLASS_NAMES, caption, draw_captioned
from nanodiff.metrics.well_formed import recognise

print("share of 400 samples that obey:   size  colour   shape   place     all")
for pairs in ("seen", "unseen"):
    _, asked = draw_captioned(400, seed=1, unseen=pairs == "unseen")
    images = np.load(f"{sys.argv[1]}/drawn_{pairs}.npz")["arr_0"]
    found = recognise(images.transpose(0, 3, 1, 2), CAPTION_RADII)
    shown = [caption(*one) for one in zip(*found)]
    in_parts = lambda captions: np.array([text.split(maxsplit=3) for text in captions])
    obeys = in_parts(asked) == in_parts(shown)  # (400, 4)
    shares = [*obeys.mean(0), obeys.all(1).mean()]
    print(f"{pairs:>6} pairs of colour and shape: " + "  ".join(f"{share:6.1%}" for share in shares))

picture = Image.new("RGB", (8 * 116 + 4, 182))
draw = ImageDraw.Draw(picture)
font = ImageFont.load_default(size=16)
for column, name in enumerate(CLASS_NAMES):
    i = next(i for i, text in enumerate(asked) if f"{name}," in text)
    left = 116 * column + 4
    draw.multiline_text((left, 2), asked[i].replace(f" {name}, ", f"\n{name},\n"), font=font)
    picture.paste(Image.fromarray(images[i]).resize((112, 112), Image.Resampling.NEAREST), (left, 68))
picture.save(f"{sys.argv[1]}/words.png", optimize=True)
print(f"picture: {sys.argv[1]}/words.png")
END
