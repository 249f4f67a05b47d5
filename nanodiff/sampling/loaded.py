"""A loaded model's samples: their settings are the run's own unless given. scripts/sample.py, pages, Python."""

import tempfile
from pathlib import Path

import numpy as np

from configurator import check, lookup, read_settings
from nanodiff.common import UserError, in_batches
from nanodiff.conditions import FIELDS
from nanodiff.data.codec import load_codec
from nanodiff.device import autocast_to, choose_dtype
from nanodiff.diffusion.guidance import choose_guidance
from nanodiff.diffusion.process import choose_sampler
from nanodiff.files import reading
from nanodiff.sampling import settings as taken
from nanodiff.sampling.draw import ModelSamples, SampleSettings, parse_classes, parse_size
from nanodiff.sampling.given import GivenImages
from nanodiff.sampling.inputs import READERS, open_inputs


def own_settings(config: dict, process) -> dict:
    """How a run with these settings draws its grids. A published file has no such settings: 50 steps, guidance 2."""
    return {
        "steps": config.get("sample_steps", min(50, getattr(process, "num_timesteps", 50))) or process.default_steps,
        "sampler": config.get("sampler", "auto"),
        "cfg_scale": config.get("cfg_scale", 2.0),
        "cfg_interval": config.get("cfg_interval", "0,1"),
    }


def settings_for(
    loaded,
    steps: int | str = 0,
    sampler: str = "auto",
    cfg_scale: float = -1.0,
    cfg_interval: str = "",
    **others,
) -> SampleSettings:
    """SampleSettings from scripts/sample.py's, by default the run's own. `others`: fields of SampleSettings."""
    own = own_settings(loaded.config, loaded.process)
    steps = steps or own["steps"]
    sampler = own["sampler"] if sampler == "auto" else sampler
    sampler = choose_sampler(loaded.process, sampler, steps, others.get("eta", 0.0))
    fault = loaded.why_unguided
    if others.get("weak_model") is not None:
        fault, own["cfg_scale"] = "", 2.0
    given = {"cfg_scale": cfg_scale} if cfg_scale != -1 else {}
    given |= {"cfg_interval": cfg_interval} if cfg_interval else {}
    own |= given
    guidance = choose_guidance(own["cfg_scale"], own["cfg_interval"], fault, given)
    return SampleSettings(steps, sampler, *guidance, **others)


def samples_of(
    loaded, settings: SampleSettings, seed: int = 0, classes=(), autoencoder="", **inputs: str
) -> ModelSamples:
    """Samples of the model; `classes`, `autoencoder`, `inputs` (READERS): as in scripts/sample.py."""
    codec = load_codec(loaded.data, loaded.device, autoencoder)
    codec.keep_loaded()
    return ModelSamples(
        loaded.model,
        loaded.process,
        codec,
        settings,
        seed,
        parse_classes(classes, loaded.class_names),
        open_inputs(loaded, inputs, autoencoder),
    )


def open_samples(loaded, asked: dict, weak_model=None) -> tuple[ModelSamples, tuple[int, int, int] | None]:
    """The samples that the settings of scripts/sample.py ask for, and (C, H, W) of each; None = as the data's."""
    steps = asked["respacing"] or asked["steps"]
    names = ("sampler", "cfg_scale", "cfg_interval")
    others = {"eta": asked["eta"], "weak_model": weak_model, "cfg_channels": asked["cfg_channels"]}
    settings = settings_for(loaded, steps, *(asked[name] for name in names), **others)
    inputs = {name: asked[name] for name in READERS}
    samples = samples_of(loaded, settings, asked["seed"], asked["classes"], asked["autoencoder"], **inputs)
    codec, size, strength, mask = samples.codec, asked["size"], asked["strength"], asked["mask"]
    shape = parse_size(size, loaded.model.config, codec)
    if asked["from_images"]:
        samples.given = GivenImages(asked["from_images"], strength, mask, codec, loaded.device)
        if size:
            raise UserError(f"size={size!r} with from_images; accepted: the model's own size")
        shape = codec.shape
    elif mask or strength != taken.strength:
        raise UserError(f"mask={mask!r} and strength={strength} would do nothing without from_images")
    return samples, shape


def as_file(value, path: Path) -> str:
    """A name as it is; of an array, or a tuple of images and their classes, a file, so that there is one reader."""
    if isinstance(value, str | Path):
        return str(value)
    with reading(path.name, "is no array"):
        if isinstance(value, tuple):
            np.savez(f"{path}.npz", *value)
            return f"{path}.npz"
        np.save(f"{path}.npy", value)
    return f"{path}.npy"


def sample(loaded, classes=(), **given) -> np.ndarray:
    """The images (N, H, W, C) that scripts/sample.py draws with these settings; uint8, or as the data's arrays.

    `given`: see settings.py. Instead of a file, from_images, mask and the conditions may be arrays of what it would
    hold, (n, H, W, C), (H, W), (n, D): images for a model with classes are a tuple, (images, class numbers). Others may
    be tuples and numbers: cfg_interval=(0.3, 0.7), size=(32, 48) or 48, classes=3.
    """
    settings = read_settings(vars(taken))
    asked = {name: setting.default for name, setting in settings.items()} | {"classes": classes}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name, value in given.items():
                if name in ("from_images", "mask", *READERS):
                    value = as_file(value, Path(folder, name))
                asked[name] = check(name, lookup(settings, name), value)
            samples, shape = open_samples(loaded, asked)
        except ValueError as error:
            raise UserError(str(error).replace(f"{folder}/", "")) from error
    autocast = autocast_to(loaded.device, choose_dtype("auto", loaded.device))
    images = []
    for ids in in_batches(np.arange(asked["num_images"]), asked["batch_size"]):
        with autocast:
            x0 = samples.draw(ids, shape or samples.codec.shape)
        images.append(samples.codec.to_output(x0).transpose(0, 2, 3, 1))
    return np.concatenate(images)


def check_guide(guide, loaded) -> None:
    """Refuse a `guide`, for autoguidance, with another prediction or other inputs."""
    if loaded.config["objective"].startswith("flow_map"):
        raise UserError(f"{loaded.source} is a flow map, which jumps where its guided teacher would have gone")
    keys = ["objective"]
    if loaded.process.is_gaussian:
        keys += ["noise_schedule", "num_timesteps", "rescale_timesteps"]
    inputs = ("image_size", "in_channels", *FIELDS)
    latents = ("sha256", "offset", "scale")

    def facts(model) -> dict:
        found = {key: getattr(model.model.config, key) for key in inputs}
        found |= {key: model.config.get(key) for key in keys}
        found["time_input"] = getattr(model.process, "time_input", "")
        return found | {key: model.data.get("latents", {}).get(key) for key in latents}

    theirs = facts(guide)
    differing = [key for key, value in facts(loaded).items() if theirs[key] != value]
    if differing:
        raise UserError(f"{guide.source} cannot guide {loaded.source}: they differ in {', '.join(differing)}")
