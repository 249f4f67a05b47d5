"""A loaded model's samples: by default with the run's own settings; for scripts/sample.py, pages and Python."""

import csv
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from configurator import check, read_settings
from nanodiff.common import UserError, in_batches, print0
from nanodiff.data.codec import load_codec
from nanodiff.device import autocast_to, choose_dtype
from nanodiff.files import reading
from nanodiff.sampling import settings as defaults
from nanodiff.sampling.draw import ModelSamples, SampleSettings, Shape, choose_guidance, choose_sampler
from nanodiff.sampling.inputs import READERS, open_inputs, read_from_images, start_from


def parse_classes(classes: str, class_names: list[str]) -> list[int] | None:
    """Class numbers of comma-separated names or numbers, such as "ring,3"; None for "". A name wins over a number; of
    classes called 1, 2, ..., numbers are names alone."""
    numbers = {name: number for number, name in enumerate(class_names)}
    if not all(map(str.isdecimal, class_names)):
        for number in range(len(class_names)):
            numbers.setdefault(str(number), number)
    result = []
    for text in next(csv.reader([classes.replace("\n", " ")], skipinitialspace=True), ()):
        if text not in numbers:
            has = f"{len(class_names)} classes; accepted: {', '.join(numbers)[:200]}" if numbers else "no classes"
            raise UserError(f"classes: {text!r} is unknown; there are {has}")
        result.append(numbers[text])
    return result or None


def parse_size(size: str, config, codec) -> Shape | None:
    """(C, H, W) of x0 for images of "HEIGHTxWIDTH", "HEIGHT,WIDTH" or "SIDE" pixels; None for "". `config`: the
    model's."""
    if not size:
        return None
    pixels = codec.downsample
    unit = config.side_unit * pixels
    largest = 4 * codec.image_size
    choices = range(unit, largest + 1, unit)
    texts = size.replace(",", "x").split("x")
    sides = [int(text) if text.isdecimal() else 0 for text in texts]
    if len(sides) > 2 or any(side not in choices for side in sides):
        raise UserError(
            f"size={size!r}; accepted: HEIGHTxWIDTH or SIDE in pixels, multiples of {unit} up to {largest:,}"
        )
    shape = (codec.shape[0], sides[0] // pixels, sides[-1] // pixels)
    if shape not in codec.shapes and config.second_channels:
        sizes = ", ".join(f"{height * pixels}x{width * pixels}" for _, height, width in codec.shapes)
        raise UserError(f"size={size!r}; accepted with a second image: {sizes}, as the data's")
    return shape


def settings_for(loaded, **overrides) -> SampleSettings:
    """SampleSettings from settings of scripts/sample.py; the others are the run's own."""
    options = SimpleNamespace(**vars(defaults) | overrides)
    changes = {name: value for name, value in overrides.items() if value != getattr(defaults, name, value)}
    process = loaded.process
    run = {  # a published file has no such settings: 50 steps (33 of ralston), guidance 1.5
        "sample_steps": min(50, getattr(process, "num_timesteps", 33)),
        "sampler": "auto",
        "cfg_scale": 1.5,
        "cfg_interval": "0,1",
    }
    run |= loaded.config | changes
    if options.respacing and options.steps:
        raise UserError("steps and respacing both choose the timesteps; accepted: one of them")
    steps = options.respacing or options.steps or run["sample_steps"] or process.default_steps
    sampler = choose_sampler(process, run["sampler"], steps, options.eta)
    guidance = choose_guidance(run["cfg_scale"], run["cfg_interval"], loaded.why_unguided, changes)
    num_channels = loaded.model.config.out_channels
    if options.cfg_channels > num_channels:
        raise UserError(f"cfg_channels={options.cfg_channels}; accepted: up to the model's {num_channels}")
    return SampleSettings(steps, sampler, *guidance, options.eta, options.cfg_channels)


def open_samples(loaded, **overrides) -> ModelSamples:
    """The samples that settings of scripts/sample.py ask for."""
    options = SimpleNamespace(**vars(defaults) | overrides)
    classes = parse_classes(options.classes, loaded.class_names)
    settings = settings_for(loaded, **overrides)
    codec = load_codec(loaded.data, loaded.device, options.autoencoder)
    codec.keep_loaded()
    size = parse_size(options.size, loaded.model.config, codec)
    samples = ModelSamples(loaded.model, loaded.process, codec, settings, options.seed, classes, size=size)
    open_inputs(samples, vars(options), loaded.source)
    if options.from_images:
        images = read_from_images(options.from_images, samples)
        start_from(samples, images, options.from_images, options.strength, options.mask)
        if size:
            raise UserError(f"size={options.size!r} with from_images; accepted: the model's own size")
    elif options.mask or options.strength != defaults.strength:
        raise UserError(f"mask={options.mask!r} and strength={options.strength} would do nothing without from_images")
    return samples


def as_file(value, path: Path) -> str:
    """Return a file name as it is. Save an array or a tuple (images, classes), so that one reader does for all."""
    if isinstance(value, str | Path):
        return str(value)
    with reading(path.name, "is no array"):
        if isinstance(value, tuple):
            path = path.with_suffix(".npz")
            np.savez(path, *value)
        else:
            path = path.with_suffix(".npy")
            np.save(path, value)
    return str(path)


def sample(loaded, classes=(), num_images: int = 16, **overrides) -> np.ndarray:
    """Images (N, H, W, C) as scripts/sample.py draws them, but square without `size`; uint8, or as the data's arrays.

    `overrides`: see settings.py. Instead of files, from_images, mask and the conditions may be arrays: (n, H, W, C),
    (H, W), (n, D). Images may be a tuple (images, class numbers). Other settings may be tuples and numbers:
    cfg_interval=(0.3, 0.7), size=(32, 48) or 48, classes=3.
    """
    settings = read_settings(vars(defaults))
    options = {"classes": classes, "num_images": num_images} | overrides
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name, value in options.items():
                if name in ("from_images", "mask", *READERS):
                    value = as_file(value, Path(folder, name))
                options[name] = check(settings, name, value)
            samples = open_samples(loaded, **options)
        except ValueError as error:
            raise UserError(str(error).replace(f"{folder}/", "")) from error
        options = vars(defaults) | options
        samples.size = samples.size or samples.codec.shape
        autocast = autocast_to(loaded.device, choose_dtype(options["dtype"], loaded.device))
        images = []
        numbers = options["first"] + np.arange(options["num_images"])
        for ids in in_batches(numbers, options["batch_size"]):
            with autocast:
                x0 = samples.draw(ids)
            images.append(samples.codec.to_output(x0).transpose(0, 2, 3, 1))
    if samples.not_finite:
        print0(f"warning: {samples.not_finite} of the images are not finite (NaN)")
    return np.concatenate(images)
