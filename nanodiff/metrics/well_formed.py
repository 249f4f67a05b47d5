"""Are samples of the embedded shapes well formed? Measured by rendering, without a network.

A sample is compared with renders of the requested shape: colour is fitted in closed form, size and position by search
among those of the set, so a disc smaller than any of them is malformed. A distance of 1 is the error of a perfect shape
shifted by 1/64 of the image's side.
"""

import numpy as np

from nanodiff.data.shapes import CLASS_NAMES, COLOURS, GROUND, draw_masks, draw_poses, draw_split, within

NUM_REAL = 240  # held-out shapes to compare with
LIMIT = 1.0  # well formed up to here: a quarter of a pixel at 16 px, and 99% of held-out shapes
BANK = 2000  # renders of a class to start from
TRIES = 21  # per round of the search: the best pose so far and twenty around it
STEPS = 0.75 ** np.arange(14)[:, None] * [0.02, 0.045, 0.045]  # step per round; the first is the bank's spacing


def distances(images: np.ndarray, label: int) -> np.ndarray:
    """Distance (n,) of images (n, 3, H, H) uint8 to the best render of one class."""
    rows = np.arange(len(images))

    def draw(poses):  # (..., 3) -> (..., P)
        return draw_masks(label, poses.reshape(-1, 3), images.shape[-1]).reshape(*poses.shape[:-1], -1)

    # Project the pixels onto each colour; keep the colour with least residual
    pixels = images.reshape(len(images), 3, -1) - GROUND[:, None]  # (n, 3, P)
    light = COLOURS - GROUND  # (6, 3)
    power = (light**2).sum(1)
    coverage = light @ pixels / power[:, None]  # (n, 6, P)
    off_colour = (pixels**2).sum((1, 2))[:, None] / power - (coverage**2).sum(2)  # (n, 6)
    coverage = coverage[rows, off_colour.argmin(1)]  # (n, P)

    # The nearest of a bank of renders, then a random search around it
    rng = np.random.default_rng(label)  # the same tries for every image: none depends on the others
    poses = draw_poses(BANK, rng)
    bank = draw(poses)  # (BANK, P)
    poses = poses[((bank**2).sum(1) - 2 * coverage @ bank.T).argmin(1)]  # (n, 3)
    for step in STEPS:
        offsets = step * rng.normal(size=(TRIES, 3))
        offsets[0] = 0
        tries = within(poses[:, None] + offsets)  # (n, TRIES, 3)
        error = ((draw(tries) - coverage[:, None]) ** 2).sum(2)
        poses = tries[rows, error.argmin(1)]

    # The unit: the change when the render moves, mean of both axes
    unit = ((draw(poses[:, None] + np.eye(3)[1:] / 64) - draw(poses)[:, None]) ** 2).sum(2).mean(1)
    return np.sqrt((error.min(1) + off_colour.min(1).clip(0)) / unit)


def measure_form(images: np.ndarray, labels: np.ndarray) -> dict:
    """The figures of images (N, 3, H, H) uint8 that should show the classes (N,) of CLASS_NAMES."""
    real, real_labels = next(draw_split("val", seed=0, resolution=images.shape[-1]))
    images = np.concatenate([real[:NUM_REAL], images])
    labels = np.concatenate([real_labels[:NUM_REAL], labels])
    distance = np.full(len(images), np.inf)  # for an unknown class
    for label in np.intersect1d(labels, range(len(CLASS_NAMES))):
        distance[labels == label] = distances(images[labels == label], label)
    real, found = np.split(distance, [NUM_REAL])
    by_class = {name: found[labels[NUM_REAL:] == k] for k, name in enumerate(CLASS_NAMES)}
    return {
        "well_formed": float((found <= LIMIT).mean()),
        "well_formed_of": {name: round(float((x <= LIMIT).mean()), 4) for name, x in by_class.items() if len(x)},
        "well_formed_of_real_images": float((real <= LIMIT).mean()),
        "median_distance": float(np.median(found)),
        "median_distance_ratio": float(np.median(found) / np.median(real)),
    }
