"""From a file to a model: find it, read it, build the model, load the weights.

Every kind of file yields the same two things: `meta`, a dict of step, arch, config (the settings), model_config and
data (a codec's facts); and the weights, tensors under our names.
"""

import dataclasses
import json
import os
from pathlib import Path

import torch

from nanodiff.common import UserError, base_dir
from nanodiff.data.dataset import check_latents
from nanodiff.diffusion.process import make_process
from nanodiff.files import check_fields, load_tensors, sha256_of
from nanodiff.formats.adapters import apply_adapters
from nanodiff.formats.published import from_improved_diffusion, from_meta
from nanodiff.models.build import empty_model
from nanodiff.models.dit import DiTConfig
from nanodiff.models.unet import UNetConfig
from nanodiff.safetensors import load_safetensors
from nanodiff.training.checkpoint import find_checkpoint, load_meta

FAULTS = (ValueError, TypeError, LookupError, ArithmeticError, RuntimeError)  # what wrong settings and shapes raise
META = dict(step=int, arch=str, config=dict, model_config=dict, data=dict)  # the fields of meta
MAX_SIZE = 2**20  # of any number in a model_config
MAX_TABLE = 2**26  # numbers in a DiT's table of positions: 256 x 256 tokens of width 1024


@dataclasses.dataclass
class Loaded:
    """A trained model and what it takes to use it."""

    model: torch.nn.Module
    process: object
    config: dict  # the settings it was trained with
    data: dict  # a codec's facts
    step: int
    source: str  # the checkpoint or file
    weights: str  # which average: a rate, "raw" or "as published"
    weights_path: Path
    run_dir: Path | None = None

    @property
    def num_classes(self) -> int:
        """0 if the model is unconditional, whatever classes the data set has."""
        return self.model.config.num_classes

    @property
    def has_null_class(self) -> bool:
        """Whether the model has learned to predict without a label, as classifier-free guidance needs."""
        return self.num_classes > 0 and self.config["label_drop"] > 0

    def described(self) -> dict:
        """Identifies the weights in a protocol."""
        sha256 = sha256_of(self.weights_path)
        return {"checkpoint": self.source, "step": self.step, "weights": self.weights, "sha256": sha256}


@dataclasses.dataclass(frozen=True)
class Published:
    """What a published file, which holds weights alone, does not say; 0 and "auto": as in the published models."""

    num_heads: int = 0
    image_size: int = 0  # of a UNet, in pixels; 0 = attention starts at 16 pixels
    noise_schedule: str = "auto"
    num_timesteps: int = 0
    rescale_timesteps: str = "auto"  # auto|yes|no


def find_run(run: str) -> Path:
    """The path of a run's folder, or of a file; `run` is that path or a tag, "" the run that was written to last."""
    runs = base_dir() / "runs"
    known = sorted((p for p in runs.glob("*") if (p / "checkpoints").is_dir()), key=os.path.getmtime)
    if not run:
        if not known:
            raise UserError(f"no run in {runs}; train one: python -m scripts.base_train")
        return known[-1]
    for path in (os.path.expanduser(run), runs / run):
        if os.path.exists(path):  # False, not an exception, for a name that is too long
            return Path(path)
    raise UserError(f"run={run!r} is no folder, file or tag; known tags: {', '.join(p.name for p in known) or 'none'}")


def load_run(run: str, device, step: int = -1, ema: str = "", published=Published()) -> Loaded:
    """Load a model to sample from or to evaluate.

    `run` is a run of base_train or lora_train (folder or tag), a .safetensors of scripts/export.py, or a file in the
    format of Meta's DiT or OpenAI's improved-diffusion. Of a run, `step` chooses the checkpoint (-1: the newest that
    verifies) and `ema` the weights: a rate, "raw", or "" for the first rate.
    """
    path = find_run(run)
    tuned = {}  # checkpoint -> meta of each run of lora_train on the way to its base
    while path.is_dir():
        checkpoint = find_checkpoint(path, None if step < 0 else step)
        if checkpoint is None:
            raise UserError(f"{path} holds no checkpoint")
        meta = load_meta(checkpoint)
        rates = [str(rate) for rate in meta["ema_rates"]]
        ema = ema or (rates[0] if rates else "raw")
        if ema not in ("raw", *rates):
            raise UserError(f"ema={ema!r} was not kept by this run; it has: raw, {', '.join(rates)}")
        if "lora" not in meta:
            break
        if checkpoint in tuned:
            raise UserError(f"{checkpoint} is a fine-tune of itself")
        tuned[checkpoint] = meta
        check_fields(meta["lora"], checkpoint, base=dict)
        base = {"step": -1, "ema": ""} | meta["lora"]["base"]
        check_fields(base, checkpoint, run=str, step=int, ema=str)
        path, step, ema = find_run(base["run"]), base["step"], base["ema"]

    if path.is_dir():
        source = checkpoint
        weights_path = checkpoint / ("model.pt" if ema == "raw" else f"ema_{ema}.pt")
        tensors = load_tensors(weights_path)
        run_dir = path
    else:
        source = weights_path = path
        if path.suffix == ".safetensors":
            meta, tensors = read_exported(path)
            ema = meta["ema"]
        else:
            meta, tensors = read_published(path, published)
            ema = "as published"
        run_dir = None
    meta = translate(meta, source)
    model, process = build(meta, tensors, source)
    model = model.to(device).eval()
    facts = (meta["config"], meta["data"], meta["step"])
    loaded = Loaded(model, process, *facts, str(source), ema, weights_path, run_dir)
    for checkpoint, meta in reversed(tuned.items()):
        run_dir = checkpoint.parents[1]
        adapters = run_dir / "adapters" / f"step_{meta['step']:06d}.safetensors"
        apply_adapters(loaded, str(adapters))
        check_data(meta["data"], checkpoint, model.config)
        facts = dict(data=meta["data"], step=meta["step"], source=str(checkpoint), weights="raw")
        loaded = dataclasses.replace(loaded, **facts, weights_path=adapters, run_dir=run_dir)
    return loaded


# ---------------------------------------------------------------------------------------------------------------------
# Read


def read_exported(path: Path) -> tuple[dict, dict]:
    """(meta, tensors) of a .safetensors that scripts/export.py wrote; its metadata hold meta, each field in JSON."""
    tensors, metadata = load_safetensors(path)
    try:
        meta = {key: json.loads(value) for key, value in metadata.items()}
    except (ValueError, RecursionError):
        meta = {}
    check_fields(meta, path, ema=str)
    return meta, tensors


def read_published(path: Path, told: Published) -> tuple[dict, dict]:
    """(meta, tensors) of Meta's `DiT-XL-2-256x256.pt` or training checkpoints, or OpenAI's `ema_0.9999_500000.pt`."""
    tensors = load_tensors(path)
    if isinstance(tensors, dict) and isinstance(tensors.get("ema"), dict):  # Meta's training checkpoint
        tensors = tensors["ema"]
    check_tensors(tensors, path)
    try:
        if "x_embedder.proj.weight" in tensors:
            model_config, tensors = from_meta(tensors, told.num_heads)
            arch = "dit_classic"
            config = dict(noise_schedule="linear", num_timesteps=1000, rescale_timesteps=False, label_drop=0.1)
        else:
            model_config, tensors = from_improved_diffusion(tensors, told.image_size, told.num_heads)
            arch = "unet"
            # By the commands in improved-diffusion's README
            lsun = not model_config.use_scale_shift_norm
            config = dict(
                noise_schedule="linear" if lsun or model_config.low_res else "cosine",
                num_timesteps=1000 if lsun else 4000,
                rescale_timesteps=not lsun and not model_config.num_classes,
                label_drop=0.0,  # the class table has no null class
            )
    except FAULTS as error:
        raise UserError(f"{path} holds no published model: {error}") from error
    if told.noise_schedule != "auto":
        config["noise_schedule"] = told.noise_schedule
    if told.num_timesteps:
        config["num_timesteps"] = told.num_timesteps
    if told.rescale_timesteps != "auto":
        config["rescale_timesteps"] = told.rescale_timesteps == "yes"
    learned = model_config.out_channels == 2 * model_config.in_channels
    config |= dict(objective="eps", variance="learned_range" if learned else "fixed_large", loss="mse")
    config |= dict(low_res_size=model_config.low_res)
    data = dict(
        name="",
        kind="images" if model_config.in_channels <= 3 else "latents",
        channels=model_config.in_channels,
        resolution=model_config.image_size,
        num_classes=model_config.num_classes,
        class_names=[str(i) for i in range(model_config.num_classes)],
    )
    meta = dict(step=0, arch=arch, config=config, model_config=dataclasses.asdict(model_config), data=data)
    return meta, tensors


def translate(meta: dict, source) -> dict:
    """Put what older versions stored into today's words."""
    check_fields(meta, source, **META)
    config = dict(meta["config"])
    model_config = dict(meta["model_config"])
    if config.get("objective") == "flow" and config.get("flow_prediction") == "x0":
        config["objective"] = "flow_x0"
    if isinstance(model_config.get("low_res"), bool):  # now the side of the low-resolution image, 0 without one
        model_config["low_res"] = config.get("low_res_size") if model_config["low_res"] else 0
    for option in ("conv_resample", "num_heads_upsample"):  # no run ever changed these of the UNet
        model_config.pop(option, None)
    return meta | {"config": config, "model_config": model_config}


def check_data(data: dict, source, model_config) -> None:
    """Refuse the facts of a codec whose images or latents are not the model's."""
    check_fields(data, source, name=str, kind=str, channels=int, resolution=int, num_classes=int, class_names=list)
    num_classes = len(data["class_names"])
    given = (data["channels"], data["resolution"], data["num_classes"])
    wanted = (model_config.in_channels, model_config.image_size, num_classes)
    if given != wanted or model_config.num_classes not in (0, num_classes):
        raise UserError(f"{source}: channels, resolution or classes of its data are not those of the model")
    if "latents" in data:
        check_latents(data["latents"], source, "offset", "scale")


# ---------------------------------------------------------------------------------------------------------------------
# Build and load


def build(meta: dict, tensors: dict, source) -> tuple[torch.nn.Module, object]:
    """(model, process) that `meta` describes, on the CPU. The model takes the tensors over, without a copy."""
    check_tensors(tensors, source)
    check_fields(meta["config"], source, label_drop=float)
    try:
        model_config = make_config(meta, len(tensors))
        process = make_process(meta["config"], meta["data"])
        model = empty_model(model_config)
    except FAULTS as error:
        raise UserError(f"{source} describes no model of this version: {error}") from error
    check_data(meta["data"], source, model_config)
    if process.out_channels(model_config.in_channels) != model_config.out_channels:
        raise UserError(f"{source}: out_channels={model_config.out_channels} does not fit the variance or objective")
    load_weights(model, tensors, source, assign=True)
    return model, process


def make_config(meta: dict, num_tensors: int) -> DiTConfig | UNetConfig:
    """The backbone's config, with its sizes bounded before anything is made of them."""
    fields = {}
    for key, value in meta["model_config"].items():
        fields[key] = tuple(value) if isinstance(value, list) else value  # JSON has no tuples
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int | float) and not 0 <= number <= MAX_SIZE:  # also NaN
                raise UserError(f"it has {key}={number}; accepted: 0 to {MAX_SIZE:,}")
    fields["checkpointing"] = False
    if meta["arch"] == "unet":
        config = UNetConfig(**fields)
        layers = config.num_res_blocks * len(config.channel_mult)
    else:
        config = DiTConfig(**fields)
        layers = config.depth
        if config.num_tokens * config.width > MAX_TABLE:
            raise UserError(f"it has {config.num_tokens:,} tokens of width {config.width:,}")
    if layers > num_tensors:
        raise UserError(f"it has {layers:,} layers and {num_tensors:,} tensors")
    return config


def check_tensors(tensors, source) -> None:
    """Refuse anything but named tensors with all of their numbers: an expanded one (stride 0) could claim any size."""
    dense = isinstance(tensors, dict)
    for name, x in tensors.items() if dense else ():
        dense = dense and isinstance(name, str) and isinstance(x, torch.Tensor) and x.is_floating_point()
        dense = dense and x.layout == torch.strided and x.device.type != "meta"
        dense = dense and x.numel() * x.itemsize <= x.untyped_storage().nbytes()
    if not dense:
        raise UserError(f"{source} holds no dictionary of tensors")


def load_weights(model: torch.nn.Module, tensors: dict, source, assign: bool = False) -> None:
    """Strict load_state_dict, with one line for a mismatch. `assign`: the model takes the tensors, without a copy."""
    check_tensors(tensors, source)
    shapes = {name: tuple(x.shape) for name, x in tensors.items()}
    wanted = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    for name in wanted | shapes:
        if name not in shapes:
            raise UserError(f"{source} lacks tensor {name!r}: it does not fit this model")
        if name not in wanted:
            raise UserError(f"{source} has an unknown tensor {name!r}: it does not fit this model")
        if shapes[name] != wanted[name]:
            raise UserError(f"{source}: {name!r} has shape {shapes[name]}, the model wants {wanted[name]}")
    if assign:  # what a copy would make of them
        tensors = {name: x.float().contiguous() for name, x in tensors.items()}
    model.load_state_dict(tensors, assign=assign)


def check_guide(guide: Loaded, loaded: Loaded) -> None:
    """Refuse a `guide`, for autoguidance, that predicts something else or from other inputs than `loaded`."""
    differing = [name for name, value in inputs_of(guide).items() if value != inputs_of(loaded)[name]]
    if differing:
        raise UserError(f"{guide.source} cannot guide {loaded.source}: they differ in {', '.join(differing)}")


def inputs_of(loaded: Loaded) -> dict:
    """What a model predicts, and from what."""
    config, process = loaded.model.config, loaded.process
    latents = loaded.data.get("latents", {})
    return {
        "image size": (config.image_size, config.in_channels),
        "classes": config.num_classes,
        "low_res": config.low_res,
        "process": type(process),
        "noise schedule": [list(getattr(process, table, ())) for table in ("betas", "model_t")],
        "prediction": process.prediction,
        "latents": [latents.get(key) for key in ("sha256", "offset", "scale")],
    }


def parse_classes(classes: str, num_classes: int) -> list[int]:
    """Class numbers, comma-separated; "" is all of them, or [0] for a model without classes."""
    if not classes:
        return list(range(max(num_classes, 1)))
    try:
        chosen = [int(c) for c in classes.split(",")]
    except ValueError:
        raise UserError(f"classes={classes!r}; accepted: numbers from 0 to {num_classes - 1}, such as 0,3") from None
    if min(chosen) < 0 or max(chosen) >= num_classes:
        raise UserError(f"classes={classes!r}: this model has {num_classes or 'no'} classes, numbered from 0")
    return chosen
