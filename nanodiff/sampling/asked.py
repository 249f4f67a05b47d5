"""Which classes and which size samples are asked for."""

from numbers import Real

import numpy as np

from nanodiff.common import UserError, print0
from nanodiff.conditions import IMAGES, row_shapes
from nanodiff.data.dataset import open_dataset


def parse_classes(classes, class_names: list[str]) -> list[int] | None:
    """Class numbers; None for none. In text, "ring,3", what is no name may be a number; elsewhere strings are names."""
    known = {key: number for number, name in enumerate(class_names) for key in (number, name)}
    if classes is None:
        classes = ()
    if isinstance(classes, str):
        texts = classes.split(",") if classes else ()
        classes = [int(text[:9]) if text.isdecimal() and text not in known else text for text in texts]
    chosen = []
    for given in np.array(classes, object).ravel():
        if isinstance(given, bool) or not isinstance(given, str | Real) or given not in known:
            names = ", ".join(class_names)[:200]
            has = f"{len(class_names)} classes; accepted: {names}, or numbers from 0" if names else "no classes"
            raise UserError(f"classes: {str(given)!r} is unknown; this model has {has}")
        chosen.append(known[given])
    return chosen or None


def in_proportion(samples, loaded, name: str, split: str, n: int) -> None:
    """Give n samples of a model the classes that a set, by its name, has in its proportions.

    Not if they follow the rows of an input, nor if the set has about as many of each, as random labels have: their
    counts have a variance like their mean. Samples then take all in turn.
    """
    num_classes = loaded.num_classes
    if samples.inputs or not num_classes:
        return
    try:
        dataset = open_dataset(name, split, loaded.data)
    except UserError:
        print0(f"samples take all classes in turn: there is no set {name!r} here to take proportions from")
        return
    labels = dataset.labels(np.arange(len(dataset)))
    labels = labels[labels < num_classes]
    counts = np.bincount(labels, minlength=num_classes)
    if counts.var() > 4 * counts.mean():
        samples.classes = labels[np.arange(n) * len(labels) // n].tolist()  # evenly, as they may be sorted


def parse_size(size: str, model_config, codec) -> tuple[int, int, int] | None:
    """(C, H, W) of x0 for images of "HEIGHTxWIDTH", "HEIGHT,WIDTH" or "SIDE" pixels; None for ""."""
    if not size:
        return None
    pixels = codec.image_size // codec.shape[1]  # per latent
    unit = model_config.side_unit * pixels
    largest = 4 * codec.image_size
    allowed = range(unit, largest + 1, unit)
    texts = size.replace(",", "x").split("x")
    sides = [int(text) if text.isdecimal() else 0 for text in texts]
    if len(sides) > 2 or any(side not in allowed for side in sides):
        accepted = f"HEIGHTxWIDTH or SIDE in pixels, multiples of {unit} up to {largest:,}"
        raise UserError(f"size={size!r}; accepted: {accepted}")
    shape = (codec.shape[0], sides[0] // pixels, sides[-1] // pixels)
    if shape not in codec.shapes and row_shapes(model_config).keys() & IMAGES:
        accepted = ", ".join(f"{height * pixels}x{width * pixels}" for _, height, width in codec.shapes)
        raise UserError(f"size={size!r}; accepted with a second image: {accepted}, as the data's")
    return shape
