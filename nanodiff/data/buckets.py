"""Aspect buckets: a few sizes of about the same area, so that images of any shape lose little to the crop."""

import numpy as np

RATIOS = (9 / 16, 2 / 3, 3 / 4, 1, 4 / 3, 3 / 2, 16 / 9)  # width / height


def bucket_sizes(resolution: int, unit: int) -> list[list[int]]:
    """[H, W] of about resolution^2 pixels for each of RATIOS; sides are multiples of `unit`."""
    sizes = []
    for ratio in RATIOS:
        height = unit * max(1, round(resolution / ratio**0.5 / unit))
        width = unit * max(1, round(resolution * ratio**0.5 / unit))
        if [height, width] not in sizes:
            sizes.append([height, width])
    return sizes


def stretch(sizes: list, ratios) -> np.ndarray:
    """(n, len(sizes)): the log of the factor by which images of these ratios (n,) miss the shape of each size."""
    return np.abs(np.log(ratios)[:, None] - np.log([width / height for height, width in sizes]))


def nearest(sizes: list, ratios) -> np.ndarray:
    """(n,) the number of the size whose shape is nearest."""
    return stretch(sizes, ratios).argmin(1)


def choose_sizes(resolution: int, unit: int, ratios, least: int) -> list[list[int]]:
    """Sizes of which each is the nearest of at least `least` images: a bucket with fewer goes to its neighbours."""
    sizes = bucket_sizes(resolution, unit)
    while len(sizes) > 1:
        counts = np.bincount(nearest(sizes, ratios), minlength=len(sizes))
        if counts.min() >= least:
            break
        del sizes[counts.argmin()]
    return sizes


def mean_crop(sizes: list, ratios) -> float:
    """The fraction of an image that lies outside the size that it covers, on average."""
    return 1 - np.exp(-stretch(sizes, ratios).min(1)).mean()
