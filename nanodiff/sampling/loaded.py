"""A loaded model's samples: their settings are the run's own unless given. scripts/sample.py, pages, Python."""

import dataclasses
import inspect

import numpy as np

from nanodiff.common import UserError, in_batches
from nanodiff.conditions import FIELDS
from nanodiff.data.codec import load_codec
from nanodiff.device import autocast_to, choose_dtype
from nanodiff.diffusion.guidance import choose_guidance
from nanodiff.diffusion.process import choose_sampler
from nanodiff.sampling.draw import ModelSamples, SampleSettings, parse_classes
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
    fields = [field.name for field in dataclasses.fields(SampleSettings)]
    if unknown := others.keys() - fields:
        accepted = fields + [*inspect.signature(sample).parameters][1:-1] + [*READERS]
        raise UserError(f"there is no setting {', '.join(unknown)}; accepted: {', '.join(accepted)}")
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
    return ModelSamples(
        loaded.model,
        loaded.process,
        load_codec(loaded.data, loaded.device, autoencoder),
        settings,
        seed,
        parse_classes(classes, loaded.class_names),
        open_inputs(loaded, inputs, autoencoder),
    )


def sample(
    loaded,
    classes=(),
    num_images: int = 16,
    seed: int = 0,
    from_images: str = "",
    strength: float = 0.6,
    mask: str = "",
    autoencoder: str = "",
    batch_size: int = 64,
    **settings,
) -> np.ndarray:
    """The images (N, H, W, C) that scripts/sample.py draws with these settings; uint8, or as the data's arrays.

    `settings`: arguments of settings_for, and files of conditions (low_res, vectors).
    """
    inputs = {name: settings.pop(name) for name in READERS if name in settings}
    samples = samples_of(loaded, settings_for(loaded, **settings), seed, classes, autoencoder, **inputs)
    codec = samples.codec
    if from_images:
        samples.given = GivenImages(from_images, strength, mask, codec, loaded.device)
    autocast = autocast_to(loaded.device, choose_dtype("auto", loaded.device))
    images = []
    for ids in in_batches(np.arange(num_images), batch_size):
        with autocast:
            x0 = samples.draw(ids, codec.shape)
        images.append(codec.to_output(x0).transpose(0, 2, 3, 1))
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
