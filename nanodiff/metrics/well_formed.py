"""Are samples of the embedded shapes well formed? Measured by rendering, without a network.

A sample is compared with renders of the requested shape. Colour is fitted in closed form; size and position by search
within the set's range, so a disc smaller than the set's is malformed. A distance of 1 is the error of a perfect shape
shifted by 1/64 of the image's side.
"""

import functools

import numpy as np

from nanodiff.data.shapes import CLASS_NAMES, COLOURS, GROUND, RADII, draw_masks, draw_poses, within
from nanodiff.metrics.network import share_by_class

LIMIT = 1.0  # well formed up to here: a quarter of a pixel at 16 px, and 99% of held-out shapes
BANK = 2000  # renders of a class to start from
TRIES = 21  # per round of the search: the best pose so far and twenty around it
STEPS = 0.75 ** np.arange(14)[:, None] * [0.02, 0.045, 0.045]  # step per round, at first the spacing of the bank


def distances(images: np.ndarray, label: int) -> np.ndarray:
    """Distance (n,) from images (n, 3, H, H) uint8 to the best render of one class."""
    draw = functools.partial(render, label, images.shape[-1])
    coverage, off_colour, _ = fit_colours(images)
    rng = np.random.default_rng(label)  # the same tries for every image, so that results do not depend on the others
    poses, error = fit_poses(coverage, draw, rng)

    # The unit: the change when the render moves by 1/64, averaged over both axes
    shifts = np.eye(3)[1:] / 64
    neighbours = draw(poses[:, None] + shifts)  # (n, 2, P)
    change = ((neighbours - draw(poses)[:, None]) ** 2).sum(2)
    return np.sqrt((error + off_colour) / change.mean(1))


def render(label: int, resolution: int, poses: np.ndarray) -> np.ndarray:
    """Masks (..., P) of a shape in poses (..., 3)."""
    return draw_masks(label, poses.reshape(-1, 3), resolution).reshape(*poses.shape[:-1], -1)


def fit_colours(images: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Find the set's colour that fits each of the images (n, 3, H, H) best, by projecting the pixels onto it.

    Returns the coverage of each pixel (n, P), the residual (n,) and the number of the colour (n,).
    """
    pixels = images.reshape(len(images), 3, -1) - GROUND[:, None]  # (n, 3, P)
    light = COLOURS - GROUND  # (6, 3)
    power = (light**2).sum(1)
    coverage = light @ pixels / power[:, None]  # (n, 6, P)
    total = (pixels**2).sum((1, 2))[:, None]  # (n, 1)
    residual = total / power - (coverage**2).sum(2)  # (n, 6)
    best = residual.argmin(1)
    rows = np.arange(len(images))
    return coverage[rows, best], residual[rows, best].clip(0), best


def fit_poses(coverage: np.ndarray, draw, rng, radii=RADII) -> tuple[np.ndarray, np.ndarray]:
    """Fit a pose to each coverage (n, P): the nearest of a bank of renders, then a random search around it.

    Returns poses (n, 3) and squared errors (n,).
    """
    poses = draw_poses(BANK, rng, radii)
    bank = draw(poses)  # (BANK, P)
    errors = (bank**2).sum(1) - 2 * coverage @ bank.T  # (n, BANK), without |coverage|^2, which is equal in a row
    poses = poses[errors.argmin(1)]  # (n, 3)
    rows = np.arange(len(coverage))
    for step in STEPS:
        offsets = step * rng.normal(size=(TRIES, 3))
        offsets[0] = 0
        tries = within(poses[:, None] + offsets, radii)  # (n, TRIES, 3)
        errors = ((draw(tries) - coverage[:, None]) ** 2).sum(2)
        best = errors.argmin(1)
        poses = tries[rows, best]
    return poses, errors[rows, best]


def measure_form(images: np.ndarray, labels: np.ndarray) -> dict:
    """Share of well-formed images and median distance, for images (N, 3, H, H) uint8 that should show the classes
    `labels` (N,), numbers in CLASS_NAMES."""
    distance = np.full(len(images), np.inf)  # for an unknown class
    for label in np.intersect1d(labels, range(len(CLASS_NAMES))):
        is_label = labels == label
        distance[is_label] = distances(images[is_label], label)
    shares = share_by_class(distance <= LIMIT, labels, CLASS_NAMES, "well_formed")
    return shares | {"median_distance": float(np.median(distance))}
