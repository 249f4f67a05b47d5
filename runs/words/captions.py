"""Shapes with captions, for runs/words.sh.

python3 -m runs.words.captions make FOLDER        images with captions for training; captions alone to ask for
python3 -m runs.words.captions judge FOLDER       what do the samples show? A table, and a picture
"""

import functools
import sys

import numpy as np

from nanodiff.data.shapes import CLASS_NAMES, COLOURS, paint
from nanodiff.metrics.well_formed import fit_colours, fit_poses, render

RADII = 0.24, 0.4
COLOUR_NAMES = ["red", "green", "blue", "yellow", "magenta", "cyan"]  # of COLOURS
ROWS = ["top", "", "bottom"]
COLUMNS = ["left", "", "right"]
WORDS = ["small", "large", *COLOUR_NAMES, *CLASS_NAMES, "top", "bottom", "left", "right", "centre"]
CAPTION_WORDS = 5  # at most: "small red circle, top left"


def draw_captioned(num: int, seed, unseen: bool = False) -> tuple[np.ndarray, list[str]]:
    """Images (num, 3, 16, 16) uint8 and a caption for each. Class k never has colour k % 6; if `unseen`, always."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(len(CLASS_NAMES), size=num)
    shift = 0 if unseen else rng.integers(1, len(COLOURS), size=num)
    colours = (labels + shift) % len(COLOURS)
    is_large = rng.integers(2, size=num)
    radius = 0.24 + 0.12 * is_large + 0.04 * rng.uniform(size=num)  # up to 0.28, or from 0.36 on
    cells = rng.integers(3, size=(2, num))
    in_room = 0.425 * cells + 0.15 * rng.uniform(size=(2, num))  # [0, 0.15], [0.425, 0.575] or [0.85, 1]
    left, top = radius + (1 - 2 * radius) * in_room
    poses = np.stack([radius, left, top], axis=1)
    images = paint(labels, COLOURS[colours], poses, 16)
    return images, [caption(*one) for one in zip(labels, colours, poses)]


def caption(label: int, colour: int, pose: np.ndarray) -> str:
    """Size, colour, shape and, in the room that the size leaves, place."""
    radius, left, top = pose
    size = "large" if radius > 0.32 else "small"
    half_room = 0.5 - radius
    row = ROWS[round((top - radius) / half_room)]
    column = COLUMNS[round((left - radius) / half_room)]
    place = f"{row} {column}".strip() or "centre"
    return f"{size} {COLOUR_NAMES[colour]} {CLASS_NAMES[label]}, {place}"


def one_hot_words(captions: list[str]) -> np.ndarray:
    """(n, CAPTION_WORDS, len(WORDS)) float32, zeros behind a caption's end."""
    vectors = np.zeros((len(captions), CAPTION_WORDS, len(WORDS)), np.float32)
    for vector, text in zip(vectors, captions):
        for i, word in enumerate(text.replace(",", "").split()):
            vector[i, WORDS.index(word)] = 1
    return vectors


def make(folder: str) -> None:
    images, captions = draw_captioned(20_000, seed=0)
    np.savez(f"{folder}/images.npz", arr_0=images.transpose(0, 2, 3, 1))
    np.save(f"{folder}/captions.npy", one_hot_words(captions))  # (20000, 5, 21)
    for pairs in ("seen", "unseen"):
        _, captions = draw_captioned(400, seed=1, unseen=pairs == "unseen")
        np.save(f"{folder}/{pairs}.npy", one_hot_words(captions))


def recognise(images: np.ndarray, radii=RADII) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What images (n, 3, H, H) uint8 show: class (n,), colour (n,) and pose (n, 3) of the nearest render of any."""
    coverage, _, colours = fit_colours(images)
    poses, errors = [], []
    for label in range(len(CLASS_NAMES)):
        draw = functools.partial(render, label, images.shape[-1])
        found, error = fit_poses(coverage, draw, np.random.default_rng(label), radii)
        poses.append(found)
        errors.append(error)
    labels = np.argmin(errors, axis=0)
    return labels, colours, np.stack(poses)[labels, np.arange(len(images))]


def judge(folder: str) -> None:
    """Renders are fitted to each sample and described in the words of the captions. The picture has the first sample
    of each pair that was not in training."""
    from PIL import Image, ImageDraw, ImageFont

    print("share of 400 samples that obey:   size  colour   shape   place     all")
    for pairs in ("seen", "unseen"):
        _, asked = draw_captioned(400, seed=1, unseen=pairs == "unseen")
        images = np.load(f"{folder}/drawn_{pairs}.npz")["arr_0"]
        found = recognise(images.transpose(0, 3, 1, 2))
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
    picture.save(f"{folder}/words.png", optimize=True)
    print(f"picture: {folder}/words.png")


if __name__ == "__main__":
    _, command, folder = sys.argv
    {"make": make, "judge": judge}[command](folder)
