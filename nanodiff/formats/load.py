"""From a file to a model: find it, read it, build the model, load the weights.

Every kind of file yields `meta`, a dict of step, arch, config (the settings), model_config and data (a codec's facts),
and the weights under our names.
"""

import dataclasses
import json
import os
from pathlib import Path

import torch

from nanodiff.common import UserError, base_dir
from nanodiff.diffusion.process import make_process
from nanodiff.files import FAULTS, check_fields, load_tensors, read_small, sha256_of
from nanodiff.formats.adapters import apply_adapters
from nanodiff.formats.published import from_diffusers, from_improved_diffusion, from_meta
from nanodiff.models.build import empty_model
from nanodiff.models.dit import DiTConfig
from nanodiff.models.unet import UNetConfig
from nanodiff.safetensors import load_safetensors
from nanodiff.training.checkpoint import find_checkpoint, load_meta

DIFFUSERS = "diffusion_pytorch_model.safetensors"  # beside a config.json
# Settings of scripts/sample.py missing from published files; 0 and "auto": as in the published models
PUBLISHED = ("num_heads", "image_size", "noise_schedule", "num_timesteps", "rescale_timesteps")
MAX_SIZE = 2**20  # largest number in a model_config
MAX_TABLE = 2**26  # numbers in a DiT's table of positions: 256 x 256 tokens of width 1024


@dataclasses.dataclass
class Loaded:
    """A trained model and everything its use needs."""

    model: torch.nn.Module
    process: object
    config: dict  # the settings
    data: dict  # a codec's facts
    step: int
    source: str  # the checkpoint or file
    weights: str  # a rate, "raw" or "as published"
    weights_path: Path
    run_dir: Path | None = None

    @property
    def num_classes(self) -> int:
        """0 if the model is unconditional."""
        return self.model.config.num_classes

    @property
    def has_null_class(self) -> bool:
        """Can it predict without a label, as classifier-free guidance needs?"""
        return self.num_classes > 0 and self.config["label_drop"] > 0

    def described(self) -> dict:
        """Identifies the weights in a protocol."""
        sha256 = sha256_of(self.weights_path)
        return {"checkpoint": self.source, "step": self.step, "weights": self.weights, "sha256": sha256}


def find_run(run: str) -> Path:
    """The folder of a run, or a file, by its path or tag; "" is the most recently written run."""
    runs = base_dir() / "runs"
    known = sorted((p for p in runs.glob("*") if (p / "checkpoints").is_dir()), key=os.path.getmtime)
    if not run and known:
        return known[-1]
    for path in (os.path.expanduser(run), runs / run) if run else ():
        if os.path.exists(path):  # False, not an exception, for a name that is too long
            return Path(path)
    tags = ", ".join(p.name for p in known) or "none; train one: python -m scripts.base_train"
    raise UserError(f"run={run!r} is no folder, file or tag; known tags: {tags}")


def load_run(run: str, device, step: int = -1, ema: str = "", published: dict | None = None, tuned=()) -> Loaded:
    """Load a model to sample from or to evaluate.

    `run`: a run's folder or tag, a .safetensors of scripts/export.py, a published file or diffusers' folder. Of a run,
    `step` chooses the checkpoint (-1: the newest) and `ema` the weights: a rate, "raw", or "" for the first rate.
    `published`: any of PUBLISHED; `tuned`: the fine-tunes that led to this base.
    """
    path = find_run(run)
    if (path / DIFFUSERS).is_file():
        path = path / DIFFUSERS
    if not path.is_dir():
        is_exported = path.suffix == ".safetensors" and path.name != DIFFUSERS
        meta, tensors = read_exported(path) if is_exported else read_published(path, published)
        return build(meta, tensors, device, path, meta["ema"], path)

    checkpoint = find_checkpoint(path, None if step < 0 else step)
    if checkpoint is None:
        raise UserError(f"{path} holds no checkpoint")
    meta = load_meta(checkpoint)
    rates = [str(rate) for rate in meta["ema_rates"]]
    ema = ema or (rates[0] if rates else "raw")
    if ema not in ("raw", *rates):
        raise UserError(f"ema={ema!r} was not kept by this run; it has: raw, {', '.join(rates)}")
    if "lora" not in meta:
        weights_path = checkpoint / ("model.pt" if ema == "raw" else f"ema_{ema}.pt")
        return build(meta, load_tensors(weights_path), device, checkpoint, ema, weights_path, run_dir=path)

    if checkpoint in tuned:
        raise UserError(f"{checkpoint} is a fine-tune of itself")
    check_fields(meta["lora"], checkpoint, base=dict)
    base = {"step": -1, "ema": ""} | meta["lora"]["base"]
    check_fields(base, checkpoint, run=str, step=int, ema=str)
    loaded = load_run(base["run"], device, base["step"], base["ema"], published, (*tuned, checkpoint))
    adapters = path / "adapters" / f"step_{meta['step']:06d}.safetensors"
    apply_adapters(loaded, str(adapters))
    check_data(meta["data"], checkpoint, loaded.model.config)
    shift = meta["config"].get("timestep_shift")
    if shift:
        shift_timesteps(loaded, shift)
    facts = dict(data=meta["data"], step=meta["step"], source=str(checkpoint), weights="raw")
    return dataclasses.replace(loaded, **facts, weights_path=adapters, run_dir=path)


def shift_timesteps(loaded: Loaded, timestep_shift: float) -> None:
    """Give a flow model another timestep_shift than it was trained with."""
    if loaded.process.num_timesteps:
        raise UserError(f"timestep_shift={timestep_shift}: {loaded.source} is no flow model; accepted: 0")
    loaded.config = loaded.config | {"timestep_shift": timestep_shift}
    loaded.process = make_process(loaded.config, loaded.data)


def read_exported(path: Path) -> tuple[dict, dict]:
    """(meta, tensors) of a .safetensors of scripts/export.py; its metadata are meta's fields in JSON."""
    tensors, metadata = load_safetensors(path)
    try:
        meta = {key: json.loads(value) for key, value in metadata.items()}
    except (ValueError, RecursionError):
        meta = {}
    check_fields(meta, path, ema=str)
    return meta, tensors


def read_published(path: Path, published: dict | None) -> tuple[dict, dict]:
    """(meta, tensors) of Meta's DiT (training checkpoints too), diffusers' DiT or improved-diffusion's UNet."""
    tensors = load_safetensors(path)[0] if path.suffix == ".safetensors" else load_tensors(path)
    if isinstance(tensors, dict) and isinstance(tensors.get("ema"), dict):  # Meta's training checkpoint
        tensors = tensors["ema"]
    check_tensors(tensors, path)
    told = {name: value for name, value in (published or {}).items() if value not in (0, "auto")}
    heads, image_size = told.pop("num_heads", 0), told.pop("image_size", 0)
    try:
        arch = "dit_classic"
        config = dict(noise_schedule="linear", num_timesteps=1000, rescale_timesteps=False, label_drop=0.1)
        if "x_embedder.proj.weight" in tensors:
            model_config, tensors = from_meta(tensors, heads)
        elif "pos_embed.proj.weight" in tensors:
            settings = json.loads(read_small(path.with_name("config.json")))
            model_config, tensors = from_diffusers(tensors, settings)
        else:
            arch = "unet"
            model_config, tensors = from_improved_diffusion(tensors, image_size, heads)
            lsun = not model_config.use_scale_shift_norm  # the settings are those of improved-diffusion's README
            schedule = "linear" if lsun or model_config.low_res else "cosine"
            rescale = not lsun and not model_config.num_classes
            config = dict(noise_schedule=schedule, num_timesteps=1000 if lsun else 4000, rescale_timesteps=rescale)
            config["label_drop"] = 0.0  # the class table has no null class
    except FAULTS as error:
        raise UserError(f"{path} holds no published model: {error}") from error
    config |= told
    config["rescale_timesteps"] = config["rescale_timesteps"] in (True, "yes")
    channels, num_classes = model_config.in_channels, model_config.num_classes
    variance = "learned_range" if model_config.out_channels == 2 * channels else "fixed_large"
    config |= dict(objective="eps", loss="mse", variance=variance, low_res_size=model_config.low_res)
    data = dict(name="", kind="images" if channels <= 3 else "latents", channels=channels, num_classes=num_classes)
    data |= dict(resolution=model_config.image_size, class_names=[str(i) for i in range(num_classes)])
    meta = dict(step=0, ema="as published", arch=arch, config=config, data=data)
    return meta | dict(model_config=dataclasses.asdict(model_config)), tensors


def check_meta(meta: dict, source) -> None:
    """Refuse metadata that lacks a field, or that an older version wrote with another meaning."""
    check_fields(meta, source, step=int, arch=str, config=dict, model_config=dict, data=dict)
    low_res_was_bool = isinstance(meta["model_config"].get("low_res"), bool)
    if low_res_was_bool or meta["config"].get("flow_prediction", "v") != "v":
        raise UserError(f"{source} is from an older version: low_res is a bool, or flow_prediction is not v")


def check_data(data: dict, source, model_config) -> None:
    """Refuse a codec's facts that do not fit the model's images or latents."""
    check_fields(data, source, name=str, kind=str, channels=int, resolution=int, num_classes=int, class_names=list)
    shape_differs = (data["channels"], data["resolution"]) != (model_config.in_channels, model_config.image_size)
    num_classes = len(data["class_names"])
    if shape_differs or data["num_classes"] != num_classes or model_config.num_classes not in (0, num_classes):
        raise UserError(f"{source}: channels, resolution or classes of its data are not those of the model")
    check_fields({"sizes": []} | data, source, sizes=list)
    largest = 4 * model_config.image_size
    for size in data.get("sizes", []):
        integers = isinstance(size, list) and [type(n) for n in size] == [int, int, int]
        if not integers or min(size) < 1 or max(size[:2]) > largest:
            raise UserError(f"{source}: its data have size {size}; accepted: [height, width, number], up to {largest}")


def build(meta: dict, tensors: dict, device, source, weights: str, weights_path: Path, run_dir=None) -> Loaded:
    """The model that `meta` describes, with these tensors."""
    check_meta(meta, source)
    config, data = meta["config"], meta["data"]
    check_fields(config, source, label_drop=float)
    try:
        model_config = make_config(meta, len(tensors))
        process = make_process(config, data)
        model = empty_model(model_config)
    except FAULTS as error:
        raise UserError(f"{source} describes no model of this version: {error}") from error
    check_data(data, source, model_config)
    if process.out_channels(model_config.in_channels) != model_config.out_channels:
        raise UserError(f"{source}: out_channels={model_config.out_channels} does not fit the variance or objective")
    load_weights(model, tensors, source, assign=True)
    model = model.to(device).eval()
    return Loaded(model, process, config, data, meta["step"], str(source), weights, weights_path, run_dir)


def make_config(meta: dict, num_tensors: int) -> DiTConfig | UNetConfig:
    """The backbone's config, with sizes bounded before anything is allocated."""
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
    """Accept only tensors with full storage: an expanded one (stride 0) could claim any size."""
    for x in tensors.values() if isinstance(tensors, dict) else [None]:
        strided = isinstance(x, torch.Tensor) and x.layout == torch.strided and x.device.type != "meta"
        if not strided or not x.is_floating_point() or x.numel() * x.itemsize > x.untyped_storage().nbytes():
            raise UserError(f"{source} holds no dictionary of tensors")


def load_weights(model: torch.nn.Module, tensors: dict, source, assign: bool = False) -> None:
    """Strict load_state_dict. `assign`: the model takes the tensors, without a copy."""
    check_tensors(tensors, source)
    try:
        model.load_state_dict(tensors, assign=assign)
    except RuntimeError as error:
        raise UserError(f"{source} does not fit this model: {' '.join(str(error).split())[:300]}") from None
    model.float()  # an assigned tensor keeps its own dtype


def check_guide(guide: Loaded, loaded: Loaded) -> None:
    """Refuse a `guide`, for autoguidance, with another prediction or other inputs."""
    its, mine = inputs_of(guide), inputs_of(loaded)
    differing = ", ".join(name for name in mine if its[name] != mine[name])
    if differing:
        raise UserError(f"{guide.source} cannot guide {loaded.source}: they differ in {differing}")


def inputs_of(loaded: Loaded) -> dict:
    """A model's inputs and prediction target."""
    config, process, latents = loaded.model.config, loaded.process, loaded.data.get("latents", {})
    return {
        "image size": (config.image_size, config.in_channels),
        "classes": config.num_classes,
        "low_res": config.low_res,
        "process": type(process),
        "noise schedule": [list(getattr(process, table, ())) for table in ("betas", "model_t")],
        "prediction": process.prediction,
        "latents": [latents.get(key) for key in ("sha256", "offset", "scale")],
    }


def parse_size(size: str, loaded: Loaded, codec) -> tuple[int, int, int] | None:
    """(C, H, W) of x0 for images of "HEIGHTxWIDTH" pixels; None for ""."""
    if not size:
        return None
    config, pixels = loaded.model.config, codec.image_size // codec.shape[1]  # per latent
    unit, largest = config.side_unit * pixels, 4 * codec.image_size
    if config.low_res or loaded.weights == "as published":  # square only
        unit = largest = codec.image_size
    sides = [int(side) if side.isdecimal() else 0 for side in size.split("x")]
    if len(sides) != 2 or any(side % unit or not 0 < side <= largest for side in sides):
        raise UserError(f"size={size!r}; accepted: HEIGHTxWIDTH in pixels, multiples of {unit} up to {largest:,}")
    return (codec.shape[0], sides[0] // pixels, sides[1] // pixels)


def parse_classes(classes: str, class_names: list[str]) -> list[int]:
    """Classes by number or name, comma-separated; "" is all of them, or [0] for a model without classes."""
    if not classes:
        return list(range(max(len(class_names), 1)))
    chosen = []
    for text in classes.split(","):
        number = class_names.index(text) if text in class_names and not text.isdecimal() else text
        if not str(number).isdecimal() or int(number) >= len(class_names):
            known = f"{len(class_names) or 'no'} classes; accepted: 0,3 or names: {', '.join(class_names)[:200]}"
            raise UserError(f"classes={classes!r}: {text!r} is unknown, this model has {known}")
        chosen.append(int(number))
    return chosen
