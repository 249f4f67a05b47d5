"""The embedded data set: eight shapes in six colours on a dark ground, drawn with numpy in a few seconds."""

import numpy as np

# No two look alike at 16 pixels (so no square beside the circle): a classifier can check that a model obeys its labels
CLASS_NAMES = "circle ring target triangle cross bar stripes dots".split()
COLOURS = np.array(
    [
        [235, 64, 52],  # red
        [64, 200, 72],  # green
        [72, 112, 255],  # blue
        [245, 210, 50],  # yellow
        [220, 80, 230],  # magenta
        [60, 215, 225],  # cyan
    ],
    np.float32,
)
GROUND = np.array([18, 18, 24], np.float32)
NUM_IMAGES = {"train": 20_000, "val": 2_000}
RADII = 0.34, 0.46  # smallest and largest radius of the circumscribed circle; the image's side is 1
SUPERSAMPLES = 4  # per pixel and axis


def draw_shapes(num: int, seed, resolution: int = 16) -> tuple[np.ndarray, np.ndarray]:
    """Images (num, 3, resolution, resolution) uint8 and labels (num,) int64, a function of the arguments.

    `seed`: an integer >= 0 or a tuple of them. Label, colour, size and place within the image are uniform.
    """
    rng = np.random.default_rng(seed)
    labels = rng.integers(len(CLASS_NAMES), size=num)
    colours = COLOURS[rng.integers(len(COLOURS), size=num)]  # (num, 3)
    return paint(labels, colours, draw_poses(num, rng), resolution), labels


def paint(labels: np.ndarray, colours: np.ndarray, poses: np.ndarray, resolution: int) -> np.ndarray:
    """(n, 3, resolution, resolution) uint8 of labels (n,), colours (n, 3) and poses (n, 3)."""
    images = np.empty((len(labels), 3, resolution, resolution), np.uint8)
    ground = GROUND[:, None, None]
    contrasts = (colours - GROUND)[:, :, None, None]  # (n, 3, 1, 1)
    for label in range(len(CLASS_NAMES)):
        is_label = labels == label
        coverage = draw_masks(label, poses[is_label], resolution)[:, None]  # (n, 1, resolution, resolution)
        pixels = ground + coverage * contrasts[is_label]
        images[is_label] = np.rint(pixels).astype(np.uint8)
    return images


def inside(shape: str, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Which points (x, y), in units of the circumscribed radius, lie in the shape.

    All stand upright: with shapes at every angle, a small model trains for an hour instead of minutes.
    """
    r2 = x * x + y * y
    dx = abs(x)
    dy = abs(y)
    match shape:
        case "circle":
            return r2 < 0.8
        case "ring":
            return (r2 < 1) & (r2 > 0.36)
        case "target":  # a ring around a disc
            return ((r2 < 1) & (r2 > 0.49)) | (r2 < 0.12)
        case "triangle":
            return (y > -0.5) & (y + 3**0.5 * dx < 1)
        case "cross":
            return (np.maximum(dx, dy) < 0.96) & (np.minimum(dx, dy) < 0.27)
        case "bar":
            return (dx < 0.96) & (dy < 0.28)
        case "stripes":
            return (dx < 0.8) & (dy < 0.6) & (dy > 0.2)
        case "dots":
            return (dx - 0.63) ** 2 + y * y < 0.13


def draw_poses(num: int, rng: np.random.Generator, radii=RADII) -> np.ndarray:
    """Random radius, x and y of the centre of shapes within the image: (num, 3) float64."""
    radius = rng.uniform(*radii, num)
    room = 1 - 2 * radius
    x, y = radius + room * rng.uniform(size=(2, num))
    return np.stack([radius, x, y], 1)


def within(poses: np.ndarray, radii) -> np.ndarray:
    """Clip poses (..., 3) to the radii and places that draw_poses gives."""
    radius = poses[..., :1].clip(*radii)
    place = poses[..., 1:].clip(radius, 1 - radius)
    return np.concatenate([radius, place], axis=-1)


def draw_masks(label: int, poses: np.ndarray, resolution: int) -> np.ndarray:
    """The share of each pixel's 4 x 4 points that a shape in poses (n, 3) covers: (n, resolution, resolution)."""
    side = resolution * SUPERSAMPLES
    grid = (np.arange(side) + 0.5) / side
    grid = grid.astype(np.float32)
    poses = poses.astype(np.float32)[..., None, None]  # (n, 3, 1, 1)
    masks = np.empty((len(poses), resolution, resolution), np.float32)
    per_block = max(1, 2**20 // side**2)  # about a million points at once fit in the cache
    for start in range(0, len(poses), per_block):
        block = slice(start, start + per_block)
        radius, centre_x, centre_y = poses[block].swapaxes(0, 1)  # (n, 1, 1) each
        x = (grid - centre_x) / radius  # (n, 1, side)
        y = (grid[:, None] - centre_y) / radius  # (n, side, 1)
        points = inside(CLASS_NAMES[label], x, y)  # (n, side, side)
        points = points.reshape(-1, resolution, SUPERSAMPLES, resolution, SUPERSAMPLES)
        masks[block] = points.mean((2, 4), dtype=np.float32)
    return masks


def draw_split(split: str, seed: int, resolution: int):
    """Images and labels of a split, in blocks of 1,000 to bound the memory."""
    number = list(NUM_IMAGES).index(split)
    for start in range(0, NUM_IMAGES[split], 1000):
        yield draw_shapes(1000, (seed, number, start), resolution)
