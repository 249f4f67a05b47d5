"""Inputs of samples besides classes and noise: conditions, and images to start from."""

import functools
import hashlib
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F

from nanodiff.common import UserError, at, count, print0
from nanodiff.conditions import NUMBERS, made_from, row_shapes
from nanodiff.data.dataset import match_labels, open_dataset
from nanodiff.data.pixels import from_stored, to_model_range
from nanodiff.files import reading
from nanodiff.prepare.containers import is_image
from nanodiff.prepare.decode import Item, center_crop, decode_items, decode_second, open_image, to_rgb
from nanodiff.prepare.sources import Options, Source, open_source, read_numbers
from nanodiff.sampling.draw import Inputs, StartImages, inputs_of


def open_inputs(samples, options: dict[str, str], source: str) -> None:
    """Give ModelSamples the conditions that their model takes besides classes.

    `options`: {name: file, folder or "val"}; "" means the validation split, or the training split if there is none.
    `source`: the model's name in messages.
    """
    config, codec = samples.model.config, samples.codec
    data = codec.data
    for setting, read in READERS.items():
        place = options[setting]
        name = "given" if setting == "pairs" else setting
        if name not in row_shapes(config):
            if place:
                raise UserError(f"{setting}={place!r} would do nothing: {source} was trained without {setting}")
        elif place not in ("", "val"):
            samples.inputs[name] = read(place, samples)
        elif data.name:
            dataset = open_dataset(data.name, "train", data)
            if place or "val" in dataset.meta["splits"]:
                dataset = open_dataset(data.name, "val", data)
            codec.accept(dataset)
            samples.inputs[name] = inputs_of(dataset, codec, config)[name]
        else:
            raise UserError(f"{source} names no data set to take {setting} from; give --{setting}=FILE")


def from_file(read: Callable, place: str, labels: np.ndarray | None, *arrays: np.ndarray) -> Inputs:
    """Inputs from a file with these labels (n,) and rows; several arrays are of the same rows, at different sizes."""
    return Inputs(read, {(1, 1): range(len(arrays[0]))}, labels, with_hash(place, *arrays, labels))


# ---------------------------------------------------------------------------------------------------------------------
# From files: (place, samples) -> Inputs, for the model and codec of ModelSamples


def read_pairs(place: str, samples) -> Inputs:
    """Second images from a folder (sub-folders are classes), an .npy or an .npz (arr_0; classes in labels or arr_1),
    cropped to the samples' size."""
    items, labels = labelled_items("pairs", place, samples)
    codec = samples.codec
    form = (codec.data.given_scaling, samples.model.config.given_channels)

    @functools.cache
    def views(shape):  # all images at the size of samples of this shape: (N, C, H, W) uint8
        sides = [n * codec.downsample for n in shape[1:]]  # in pixels, also for latents
        images = []
        for item in items:
            with reading(item.payload):
                images.append(decode_second(item.payload, *form, *sides))
        if np.max(images) < 64:
            print0(f"note: pairs={place!r} holds no value above 63 of 255 (masks hold 0 and 255, not 0 and 1)")
        return np.stack(images)

    def read(rows, shape):
        return to_model_range(torch.from_numpy(views(shape)[rows]))

    shapes = [samples.size] if samples.size else codec.shapes
    return from_file(read, place, labels, *map(views, shapes))


def read_low_res(place: str, samples) -> Inputs:
    """Small images, from any place that read_pairs accepts; images of the model's size are downsampled."""
    config, codec = samples.model.config, samples.codec
    side = codec.image_size
    items, labels = labelled_items("low_res", place, samples)
    images = decoded_items("low_res", place, items, [])
    shapes = [(config.in_channels, side, side) for side in (config.low_res, config.image_size)]
    if images.shape[1:] not in shapes or codec.data.kind != "images":
        raise UserError(
            f"low_res={place!r} holds images {images.shape[1:]}; "
            f"accepted: (channels, height, width) {shapes[0]} or {shapes[1]}; val for latents"
        )

    def read(rows, shape):
        if shape[1] != shape[2]:
            raise UserError(f"low_res={place!r} holds squares; accepted: --size={side}x{side}")
        x = codec.to_x0(torch.from_numpy(images[rows]).to(codec.device))
        if x.shape[-1] == config.low_res:
            return x
        return made_from(x, config)["low_res"]

    return from_file(read, place, labels, images)


def read_number_file(name: str, place: str, samples) -> Inputs:
    """Rows from an .npy or .npz, as for prepare_data; names in the file are ignored."""
    _, array = read_numbers(name, at(place))
    shape = row_shapes(samples.model.config)[name]
    if array.shape[1:] != shape or not len(array):
        raise UserError(f"{name}={place!r} holds {name} of {array.shape}; accepted: {('n', *shape)}")
    if not np.isfinite(array).all():
        raise UserError(f"{name}={place!r} holds NaN or infinity")
    note_classes(name, place, samples)
    rows = from_stored({name: np.array(array)}, samples.codec.data)[name]
    return from_file(lambda numbers, shape: rows[numbers], place, None, array)


# The reader of each condition that can come from a file
READERS = {"pairs": read_pairs, "low_res": read_low_res}
READERS |= {name: functools.partial(read_number_file, name) for name in NUMBERS}


def open_images(setting: str, place: str, range: tuple | None = None) -> Source:
    """Images of an .npz, an .npy, a folder or an image file: uint8, or fp16 in [-1, 1] from arrays beyond 8 bits."""
    path = at(place)
    if is_image(path.name) and path.is_file():
        return Source(1, [], [Item(path.name, str(path), 0, False)])
    kind = "folder" if path.is_dir() else path.suffix[1:]
    if kind not in ("folder", "npz", "npy") or not path.exists():
        raise UserError(
            f"{setting}={place!r} is missing, or none of these: "
            "an .npz file, a folder of images, an .npy, an image file"
        )
    labels = "none" if setting == "from_images" else "auto"
    source = open_source(kind, str(path), Options(range=range, labels=labels))
    if "range" in source.meta and not range:
        raise UserError(f"{setting}={place!r} holds {source.meta['dtype']}; accepted: uint8")
    return source


def note_classes(setting: str, place: str, samples) -> None:
    if samples.num_classes and not samples.classes:
        print0(f"note: classes are not taken from {setting}={place!r}: samples take all in turn")


def labelled_items(setting: str, place: str, samples):
    """Images, and their classes (n,) by the model's numbers, or None."""
    path = at(place)
    source = open_images(setting, place)
    classes = samples.codec.data.class_names[: samples.num_classes]
    items = list(source.items)
    names = source.class_names
    if not (classes and names):
        note_classes(setting, place, samples)
        return items, None
    labels = np.array([item.label for item in items])
    is_drawn = path.suffix == ".npz" and "protocol" in np.load(path)  # by a model, whose numbers it has
    if path.is_dir() or ({*names} <= {*classes} and not is_drawn):  # by name, as prepare_data calls a file's classes
        numbers = match_labels(names, classes, f"{setting}={place!r}")
    else:
        numbers = [*map(int, names)]
        if numbers[-1] >= len(classes):
            raise UserError(f"{setting}={place!r} has class {numbers[-1]}, the model {len(classes)} classes; see arr_1")
    return items, np.array(numbers)[labels]


def decoded_items(setting: str, place: str, items: list[Item], sizes: list, *look) -> np.ndarray:
    """Decode items -> (n, C, H, W), at the one size in `sizes`; at their own size if `sizes` is empty. `look`: see
    decode_items."""
    images, faults, losses = decode_items(items, sizes, *look)
    if faults:
        raise UserError(f"{setting}={place!r}: {faults[0]}")
    for loss, number in losses.items():
        print0(f"{place}: {loss}: {count(number, 'image', 'images')}")
    return np.stack([item.payload for item in images])


def with_hash(place: str, *arrays: np.ndarray | None) -> str:
    """Describe a file in a protocol by its path and its content, which may change."""
    digest = hashlib.sha256()
    for array in arrays:
        if array is not None:
            digest.update(array.tobytes())
    return f"{place}, SHA-256 {digest.hexdigest()}"


# ---------------------------------------------------------------------------------------------------------------------
# Images to start from (SDEdit), perhaps kept in part (inpainting)


def read_from_images(place: str, samples) -> np.ndarray:
    """The images of an .npz (arr_0), .npy, folder or file, scaled and cropped."""
    side = samples.codec.image_size
    source = open_images("from_images", place, samples.codec.data.range)
    note_classes("from_images", place, samples)
    return decoded_items("from_images", place, source.items, [(side, side)], source.meta.get("range"))


def start_from(samples, images: np.ndarray, place: str, strength: float, mask: str = "") -> None:
    """Let ModelSamples start from images, read from `place`, keeping white parts of the file `mask`: StartImages."""
    codec = samples.codec
    if images.shape[1:] != samples.shape:
        raise UserError(
            f"from_images={place!r}: (channels, height, width) {images.shape[1:]}; accepted: {samples.shape}"
        )
    description = {"from_images": with_hash(place, images), "strength": strength}
    x0_levels = torch.zeros(1, 1, *codec.shape[1:])
    if mask:
        levels = read_mask(mask, codec.image_size)
        description["mask"] = with_hash(mask, levels)
        # A latent is kept as its darkest pixel is
        x0_levels = -F.adaptive_max_pool2d(-torch.from_numpy(levels)[None, None], codec.shape[1:])
        if not x0_levels.any():
            raise UserError(f"mask={mask!r} keeps nothing: scaled to {codec.image_size}, no pixel or latent is white")
    samples.start_images = StartImages(torch.tensor(images), strength, x0_levels, description)
    samples.size = codec.shape


def read_mask(path: str, side: int) -> np.ndarray:
    """(side, side) float32 from 0, black, to 1, white, which is kept. From an image file, cropped and scaled like the
    images, or an .npy of bools or numbers, up to 1 or 255."""
    file = at(path)
    with reading(file, "is no image"):
        if file.suffix == ".npy":
            levels = np.load(file)
        else:
            image = to_rgb(open_image(str(file)), "black")
            if image.size != (side, side):
                print0(f"mask={path!r} is of {image.width}x{image.height}: cropped and scaled to {side}x{side}")
            levels = np.asarray(center_crop(image, side, side).convert("L"))
        if levels.shape != (side, side):
            raise UserError(f"mask={path!r} is of shape {levels.shape}; accepted: {(side, side)}")
        if not (levels >= 0).all() or levels.max() > 255:  # also NaN
            raise UserError(f"mask={path!r} holds values below 0 or above 255; accepted: 0 to 1, or 0 to 255")
        levels = np.float32(levels / (255 if levels.max() > 1 else 1))
    if levels.max() < 0.99:
        print0(f"mask={path!r}: its lightest part, {levels.max():.2f} of white, is kept for that share of the steps")
    return levels
