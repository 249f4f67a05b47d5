"""From a file to a model: find it, read it, build the model, load the weights.

find_model, then read_model (or read_meta), then build. A reader returns (meta, tensors): meta has step, ema, arch,
config (the settings), model_config and data (a codec's description); tensors bear our parameter names.
"""

import dataclasses
import inspect
import json
import os
import re
from ast import literal_eval
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from nanodiff.common import UserError, base_dir, in_batches, nearest, print0
from nanodiff.conditions import FIELDS, droppable
from nanodiff.data.codec import load_codec
from nanodiff.device import autocast_to, choose_dtype
from nanodiff.diffusion.guidance import choose_guidance, why_unguided
from nanodiff.diffusion.process import OBJECTIVES, choose_sampler, make_process
from nanodiff.files import load_tensors, reading, sha256_of
from nanodiff.formats.adapters import PREFIX, check_base, fingerprint, identity, merge
from nanodiff.formats.published import MISSING, read_published
from nanodiff.models.build import empty_model
from nanodiff.models.dit import DiTConfig
from nanodiff.models.unet import UNetConfig
from nanodiff.safetensors import load_safetensors
from nanodiff.sampling.draw import ModelSamples, SampleSettings, parse_classes
from nanodiff.sampling.given import GivenImages
from nanodiff.sampling.inputs import READERS, open_inputs
from nanodiff.training.checkpoint import find_checkpoint, list_checkpoints, load_meta, read_best

DIFFUSERS = "diffusion_pytorch_model.safetensors"  # beside a config.json
# What may follow a model's name: RUN,step=500,ema=raw or FILE,heads=6; and the pattern of its values
OPTIONS = {"step": r"newest|best|\d+", "ema": r"raw|[\d.]+"} | MISSING
OPTION = re.compile(f",({'|'.join(OPTIONS)})=([^,]*)$")


@dataclasses.dataclass
class Loaded:
    """A trained model and everything its use needs."""

    model: torch.nn.Module
    process: object
    config: dict  # the settings
    data: dict  # a codec's description
    step: int
    source: str  # the checkpoint or file
    weights: str  # a rate, "raw" or "as published"
    weights_path: Path
    run_dir: Path | None = None
    adapters: tuple[dict, dict] | None = None  # (meta["lora"], tensors) that a run with lora_rank continues, not merged

    @property
    def num_classes(self) -> int:
        """0 if the model is unconditional."""
        return self.model.config.num_classes

    @property
    def class_names(self) -> list[str]:
        return self.data["class_names"][: self.num_classes]

    @property
    def has_condition(self) -> bool:
        """Does it take labels, vectors or another condition that training drops?"""
        return bool(droppable(self.model.config))

    @property
    def title(self) -> str:
        """Identifies the weights in a sentence."""
        name = self.run_dir.name if self.run_dir else Path(self.source).name
        weights = self.weights if re.match("raw|as", self.weights) else f"average {self.weights}"
        return f"{name}, step {self.step:,}, {weights}"

    @property
    def why_unguided(self) -> str:
        """Why it cannot guide itself away from its null condition; "" if it can."""
        return why_unguided(self.config, self.has_condition, self.step)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def described(self) -> dict:
        """Identifies the weights in a protocol."""
        sha256 = sha256_of(self.weights_path)
        return {"checkpoint": self.source, "step": self.step, "weights": self.weights, "sha256": sha256}

    def settings(
        self,
        steps: int | str = 0,
        sampler: str = "auto",
        cfg_scale: float = -1.0,
        cfg_interval: str = "",
        **others,
    ) -> SampleSettings:
        """SampleSettings from scripts/sample.py's, by default the run's own. `others`: fields of SampleSettings."""
        fields = [field.name for field in dataclasses.fields(SampleSettings)]
        if unknown := others.keys() - fields:
            accepted = fields + [*inspect.signature(self.sample).parameters][:-1] + [*READERS]
            raise UserError(f"there is no setting {', '.join(unknown)}; accepted: {', '.join(accepted)}")
        own = own_settings(self.config, self.process)
        steps = steps or own["steps"]
        sampler = own["sampler"] if sampler == "auto" else sampler
        sampler = choose_sampler(self.process, sampler, steps, others.get("eta", 0.0))
        fault = self.why_unguided
        if others.get("weak_model") is not None:
            fault, own["cfg_scale"] = "", 2.0
        given = {"cfg_scale": cfg_scale} if cfg_scale != -1 else {}
        given |= {"cfg_interval": cfg_interval} if cfg_interval else {}
        own |= given
        guidance = choose_guidance(own["cfg_scale"], own["cfg_interval"], fault, given)
        return SampleSettings(steps, sampler, *guidance, **others)

    def samples(
        self, settings: SampleSettings, seed: int = 0, classes=(), autoencoder="", **inputs: str
    ) -> ModelSamples:
        """Samples of this model; `classes`, `autoencoder`, `inputs` (READERS): as in scripts/sample.py."""
        return ModelSamples(
            self.model,
            self.process,
            load_codec(self.data, self.device, autoencoder),
            settings,
            seed,
            parse_classes(classes, self.class_names),
            open_inputs(self, inputs, autoencoder),
        )

    def sample(
        self,
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

        `settings`: arguments of the method `settings`, and files of conditions (low_res, vectors).
        """
        inputs = {name: settings.pop(name) for name in READERS if name in settings}
        samples = self.samples(self.settings(**settings), seed, classes, autoencoder, **inputs)
        codec = samples.codec
        if from_images:
            samples.given = GivenImages(from_images, strength, mask, codec, self.device)
        autocast = autocast_to(self.device, choose_dtype("auto", self.device))
        images = []
        for ids in in_batches(np.arange(num_images), batch_size):
            with autocast:
                x0 = samples.draw(ids, codec.shape)
            images.append(codec.to_output(x0).transpose(0, 2, 3, 1))
        return np.concatenate(images)


def own_settings(config: dict, process) -> dict:
    """How a run with these settings draws its grids. A published file has no such settings: 50 steps, guidance 2."""
    return {
        "steps": config.get("sample_steps", 50) or process.default_steps,
        "sampler": config.get("sampler", "auto"),
        "cfg_scale": config.get("cfg_scale", 2.0),
        "cfg_interval": config.get("cfg_interval", "0,1"),
    }


def find_run(run: str) -> Path:
    """The folder of a run, or a file, by its path or tag; "" is the most recently written run."""
    runs = base_dir() / "runs"
    known = sorted((p for p in runs.glob("*") if (p / "checkpoints").is_dir()), key=os.path.getmtime)
    if not run and known:
        return known[-1]
    for path in (os.path.expanduser(run), runs / run) if run else ():
        if os.path.exists(path):  # False, not an exception, for a name that is too long
            return Path(path)
    tags = nearest(run, [p.name for p in known])
    raise UserError(f"{run!r} is no folder, file or tag; nearest tags: {tags}; scripts.base_train trains one")


def split_options(run: str) -> tuple[str, dict]:
    """("FILE", {"heads": 6}) from "FILE,heads=6"."""
    options = {}
    while match := OPTION.search(run):
        name, value = match.groups()
        if not re.fullmatch(OPTIONS[name], value):
            accepted = (
                OPTIONS[name].replace(r"[1-9]\d*", "1 or more").replace(r"\d+", "a step").replace(r"[\d.]+", "a rate")
            )
            raise UserError(f"{run!r}: {name}={value}; accepted: {accepted}")
        options[name] = value
        run = run[: match.start()]
    for name in MISSING.keys() & options.keys():
        with suppress(ValueError, SyntaxError):  # a word
            options[name] = literal_eval(options[name])
    return run, options


def find_model(run: str) -> tuple[Path, dict]:
    """A run's folder or a file, and the options that follow its name."""
    run, options = split_options(run)
    path = find_run(run)
    for folder in (path, path / "transformer"):
        if (folder / DIFFUSERS).is_file():
            path = folder / DIFFUSERS
    of_file = path.is_file()
    for name in options:
        if (name in MISSING) != of_file:
            raise UserError(f"{name}={options[name]} is no option of {path}, a {'file' if of_file else 'run'}")
    return path, options


def read_meta(run: str) -> dict:
    """What the newest checkpoint of a run, or a file, says of itself, without its weights or their hashes."""
    path, options = find_model(run)
    meta = read_file(path, options)[0] if path.is_file() else newest_meta(path)
    if not meta:
        raise UserError(f"{path} holds no checkpoint")
    return meta


def newest_meta(run_dir: Path) -> dict:
    """The meta of a run's newest readable checkpoint; {} if there is none."""
    for _, checkpoint in reversed(list_checkpoints(run_dir)):
        with suppress(UserError):
            return load_meta(checkpoint)
    return {}


def load_run(run: str, device, step: int | str = "newest", ema: str = "") -> Loaded:
    """Load a model to sample from or to evaluate.

    `run`: a run's folder or tag, our .safetensors (an export, adapters), a published file, or the folder of a diffusers
    model or pipeline; options may follow it, see OPTIONS. For a run, `step` chooses the checkpoint, "newest", "best" or
    a number, and `ema` the weights: a rate, "raw", or "" for the first rate.
    """
    return build(*read_model(run, step, ema), device)


def read_model(run: str, step: int | str = "newest", ema: str = "") -> tuple[dict, dict, dict]:
    """(meta, tensors, origin); origin holds the fields of Loaded that say where they come from. See load_run."""
    path, options = find_model(run)
    step, ema = options.get("step", step), options.get("ema", ema)
    if path.is_file():
        meta, tensors = read_file(path, options)
        if note := meta.pop("note", ""):
            print0(note)
        source = ",".join([str(path), *(f"{name}={value}" for name, value in sorted(options.items()))])
        return meta, tensors, {"source": source, "weights": meta["ema"], "weights_path": path}
    checkpoint = find_checkpoint(path, step)
    if checkpoint is None:
        raise UserError(f"{path} holds no checkpoint")
    meta = load_meta(checkpoint)
    best = read_best(path)
    others = dict(list_checkpoints(path)).keys() - {meta["step"]}
    if best.get("step") in others:  # it is not there if the run was killed while saving it
        print0(f"the best checkpoint of {path.name}, by {best['metric']}, is that of step {best['step']:,}")
    rates = [str(rate) for rate in meta["ema_rates"]]
    ema = ema or (rates[0] if rates else "raw")
    if ema not in ("raw", *rates):
        raise UserError(f"ema={ema!r} was not kept by this run; it has: raw, {', '.join(rates)}")
    weights_path = checkpoint / ("model.pt" if ema == "raw" else f"ema_{ema}.pt")
    origin = {"source": str(checkpoint), "weights": ema, "weights_path": weights_path, "run_dir": path}
    return meta, load_tensors(weights_path), origin


def read_file(path: Path, told: dict) -> tuple[dict, dict]:
    """(meta, tensors) of a .safetensors of scripts/export.py, of adapters, or of a published file."""
    metadata = {}
    if path.suffix == ".safetensors":
        tensors, metadata = load_safetensors(path)
    else:
        tensors = load_tensors(path)
    if "model_config" not in metadata:
        with reading(path, "holds no published model"):
            return read_published(path, tensors, told)
    if told:
        raise UserError(f"{path} says itself what it is; accepted: no {', '.join(told)}")
    with reading(path):  # our own file: its metadata are meta's fields in JSON
        meta = {key: json.loads(value) for key, value in metadata.items() if key != "format"}
    if "lora" in meta:
        if meta["sha256"] != fingerprint(tensors):
            raise UserError(f"{path} is corrupt: its tensors do not match the SHA-256 in its metadata")
        tensors = {name.removeprefix(PREFIX): x for name, x in tensors.items()}
    return meta, tensors


def build(meta: dict, tensors: dict, origin: dict, device) -> Loaded:
    """The model that `meta` describes, with these tensors; adapters are merged into their base."""
    config, source = meta["config"], origin["source"]
    objective = config.get("objective")
    if objective not in OBJECTIVES:
        raise UserError(f"{source} was trained with objective={objective!r}; known here: {', '.join(OBJECTIVES)}")
    with reading(source, "describes no model of this version"):
        model = empty_model(make_config(meta))
        process = make_process(config, meta["data"])
    if "lora" in meta:
        base = load_run(meta["lora"]["base"], device)
        check_base(meta["lora"], identity(base), source)
        merge(base, meta["lora"], tensors)
        model = base.model
    else:
        load_weights(model, tensors, source, assign=True)
    return Loaded(model.to(device).eval(), process, config, meta["data"], meta["step"], **origin)


def apply_adapters(loaded: Loaded, path: str, scale: float = 1.0) -> None:
    """Merge a file's adapters into a model from load_run, and add its new classes."""
    meta, tensors = read_file(Path(path), {})
    if "lora" not in meta:
        raise UserError(f"{path} holds no adapters of base_train")
    check_base(meta["lora"], identity(loaded), path)
    merge(loaded, meta["lora"], tensors, scale)


def make_config(meta: dict) -> DiTConfig | UNetConfig:
    """The model's config that `meta` describes."""
    fields = {k: tuple(v) if isinstance(v, list) else v for k, v in meta["model_config"].items()}  # JSON has no tuples
    fields["checkpointing"] = False
    return (UNetConfig if meta["arch"] == "unet" else DiTConfig)(**fields)


def load_weights(model: torch.nn.Module, tensors: dict, source, assign: bool = False) -> None:
    """Strict load_state_dict. `assign`: the model takes the tensors, without a copy."""
    try:
        model.load_state_dict(tensors, assign=assign)
    except RuntimeError as error:
        raise UserError(f"{source} does not fit this model: {' '.join(str(error).split())[:300]}") from None
    model.float()  # an assigned tensor keeps its own dtype


def check_guide(guide: Loaded, loaded: Loaded) -> None:
    """Refuse a `guide`, for autoguidance, with another prediction or other inputs."""
    if loaded.config["objective"].startswith("flow_map"):
        raise UserError(f"{loaded.source} is a flow map, which jumps where its guided teacher would have gone")
    keys = ["objective"]
    if loaded.process.is_gaussian:
        keys += ["noise_schedule", "num_timesteps", "rescale_timesteps"]
    inputs = ("image_size", "in_channels", *FIELDS)
    latents = ("sha256", "offset", "scale")

    def facts(model: Loaded) -> dict:
        found = {key: getattr(model.model.config, key) for key in inputs}
        found |= {key: model.config.get(key) for key in keys}
        found["time_input"] = getattr(model.process, "time_input", "")
        return found | {key: model.data.get("latents", {}).get(key) for key in latents}

    theirs = facts(guide)
    differing = [key for key, value in facts(loaded).items() if theirs[key] != value]
    if differing:
        raise UserError(f"{guide.source} cannot guide {loaded.source}: they differ in {', '.join(differing)}")
