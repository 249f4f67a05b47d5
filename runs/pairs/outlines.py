"""Shapes and their outlines, for runs/pairs.sh.

python3 -m runs.pairs.outlines make FOLDER        images with outlines for training; outlines alone to ask for
python3 -m runs.pairs.outlines judge FOLDER       do the samples fill their outlines? A table, and a picture
"""

import sys

import numpy as np

from nanodiff.data.shapes import COLOURS, RADII, draw_masks, draw_poses, paint
from runs.words.captions import recognise

NUM_CLASSES = 8
SIZE_LIMIT = 0.02  # of the radius, in sides of the image: a third of a pixel
PLACE_LIMIT = 1 / 32  # of the centre, across and down: half a pixel


def draw_outlined(num: int, seed) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Images (num, 3, 16, 16) and outlines (num, 1, 16, 16), uint8; labels (num,) and poses (num, 3)."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(NUM_CLASSES, size=num)
    poses = draw_poses(num, rng)
    images = paint(labels, COLOURS[rng.integers(len(COLOURS), size=num)], poses, 16)
    outlines = np.zeros((num, 1, 16, 16), np.uint8)
    for label in range(NUM_CLASSES):
        rows = np.flatnonzero(labels == label)
        inside = np.pad(draw_masks(label, poses[rows], 16), ((0, 0), (1, 1), (1, 1)))
        around = [np.roll(inside, shift, axis) for axis in (1, 2) for shift in (-1, 1)]
        edge = inside - np.minimum.reduce([inside, *around])  # 0 where all neighbours are inside
        outlines[rows, 0] = np.rint(255 * edge[:, 1:-1, 1:-1])
    return images, outlines, labels, poses


def make(folder: str) -> None:
    images, outlines, _, _ = draw_outlined(20_000, seed=0)
    np.save(f"{folder}/images.npy", images.transpose(0, 2, 3, 1))
    np.save(f"{folder}/outlines.npy", outlines.transpose(0, 2, 3, 1))
    np.save(f"{folder}/unseen.npy", draw_outlined(400, seed=1)[1].transpose(0, 2, 3, 1))


def judge(folder: str) -> None:
    """Renders are fitted to each sample. The picture: rows of outline, sample, truth, whose colour is not told."""
    from PIL import Image

    truth, outlines, labels, poses = draw_outlined(400, seed=1)
    samples = np.load(f"{folder}/drawn.npz")["arr_0"].transpose(0, 3, 1, 2)
    found, colours, places = recognise(samples, RADII)
    difference = np.abs(places - poses)
    obeys = [found == labels, difference[:, 0] < SIZE_LIMIT, (difference[:, 1:] < PLACE_LIMIT).all(1)]
    shares = [*np.mean(obeys, axis=1), np.all(obeys, axis=0).mean()]
    print("share of 400 samples that fill their outline:  shape    size   place     all")
    print(" " * 45 + "  ".join(f"{share:6.1%}" for share in shares))
    counts = np.bincount(colours, minlength=len(COLOURS))
    print(f"colours of the samples, which no outline tells: {counts.min()} to {counts.max()} of each")

    one_each = [np.flatnonzero(labels == label)[:2] for label in range(NUM_CLASSES)]
    shown = np.concatenate(one_each)
    rows = [images[shown].transpose(0, 2, 3, 1) for images in (outlines.repeat(3, axis=1), samples, truth)]
    grid = np.full((3 * 68 - 4, len(shown) * 68 - 4, 3), 255, np.uint8)
    for row, images in enumerate(rows):
        for column, image in enumerate(images):
            large = image.repeat(4, axis=0).repeat(4, axis=1)
            grid[68 * row : 68 * row + 64, 68 * column : 68 * column + 64] = large
    Image.fromarray(grid).save(f"{folder}/pairs.png", optimize=True)
    print(f"picture: {folder}/pairs.png")


if __name__ == "__main__":
    _, command, folder = sys.argv
    {"make": make, "judge": judge}[command](folder)
