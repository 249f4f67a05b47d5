"""Aspect buckets: a few sizes of about one area, so that images keep their shape."""

import itertools

import numpy as np

from nanodiff.common import print0
from nanodiff.prepare.decode import kept_area

ASPECTS = (9 / 16, 2 / 3, 3 / 4, 1, 4 / 3, 3 / 2, 16 / 9)  # width / height


def choose_sizes(ratios: np.ndarray, resolution: int, unit: int) -> list[tuple[int, int]]:
    """Buckets (H, W) of about resolution^2 pixels, tall to wide, for images of these ratios (n,), width / height.

    Sides are multiples of `unit`. Each image goes to the bucket nearest in shape. The choice crops away least among
    those in which each bucket gets 64 images, or a tenth of all if that is fewer.
    """
    widths = [unit * round(resolution * ratio**0.5 / unit) for ratio in ASPECTS]
    sizes = list(dict.fromkeys(zip(reversed(widths), widths)))
    minimum = max(1, min(64, len(ratios) // 10))
    shares = kept_area(ratios, sizes)  # (n, len(sizes))

    def share(choice):  # that stays of the images on average; -1 if a bucket has too few
        part = shares[:, choice]
        counts = np.bincount(part.argmax(1), minlength=len(choice))
        return part.max(1).mean() if counts.min() >= minimum else -1

    numbers = range(len(sizes))
    choices = [choice for n in numbers for choice in itertools.combinations(numbers, n + 1)]
    best = max(choices, key=share)
    print0(f"{len(best)} buckets of {minimum:,} images or more; cropped away on average: {1 - share(best):.1%}")
    return [sizes[i] for i in best]
