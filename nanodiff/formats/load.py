"""From a run, an export or a published file back to a model, with all that is told of it."""

import dataclasses
import hashlib
import json
import os
from pathlib import Path

import torch

from nanodiff.common import UserError, base_dir
from nanodiff.diffusion.process import make_process
from nanodiff.files import load_tensors
from nanodiff.formats.adapters import apply_adapters
from nanodiff.formats.model_meta import check_data, read_model_config
from nanodiff.formats.published import from_improved_diffusion, from_meta
from nanodiff.models.build import empty_model
from nanodiff.safetensors import load_safetensors
from nanodiff.training.checkpoint import find_checkpoint, load_meta


def find_run(run: str) -> Path:
    """A run folder from its path or tag; "" is the run written to last. Raises UserError, naming those known."""
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


@dataclasses.dataclass
class Loaded:
    """A trained model with what is needed to use it. `source` and `weights` say which checkpoint and which average."""

    model: torch.nn.Module
    process: object
    config: dict
    data: dict
    step: int
    source: str
    weights: str
    weights_path: Path
    run_dir: Path | None = None

    @property
    def num_classes(self) -> int:
        """0 where the model is unconditional, whatever the data set has."""
        return self.model.config.num_classes

    @property
    def has_null_class(self) -> bool:
        """Whether the model has learned to do without a label, which classifier-free guidance needs."""
        return self.num_classes > 0 and self.config["label_drop"] > 0

    def described(self) -> dict:
        """Which weights these are, for a protocol; the SHA-256 is that of their file."""
        with open(self.weights_path, "rb") as f:
            sha256 = hashlib.file_digest(f, "sha256").hexdigest()
        return {"checkpoint": self.source, "step": self.step, "weights": self.weights, "sha256": sha256}


def load_run(run: str, device, step: int = -1, ema: str = "", within: tuple = (), **published) -> Loaded:
    """Load a model to sample from or evaluate.

    `run`: a run folder or tag (checkpoint `step`, -1 = the newest that verifies; `ema` "" = the first rate, "raw" = no
    average, or a rate) of base_train or lora_train, a .safetensors of scripts/export.py, or a file in Meta's DiT or
    OpenAI's improved-diffusion format, which `published` is for: see load_published. `within`: checkpoints of adapters
    whose base it is.
    """
    path = find_run(run)
    if path.suffix == ".safetensors":
        return load_exported(path, device)
    if path.is_file():
        return load_published(path, device, **published)
    checkpoint = find_checkpoint(path, None if step < 0 else step)
    if checkpoint is None:
        raise UserError(f"{path} holds no checkpoint")
    meta = load_meta(checkpoint)
    rates = [str(rate) for rate in meta["ema_rates"]]
    ema = ema or (rates[0] if rates else "raw")
    if ema not in ("raw", *rates):
        raise UserError(f"ema={ema!r} was not kept by this run; it has: raw, {', '.join(rates)}")
    if "lora" in meta:  # a run of scripts/lora_train.py: adapters, to be merged into the weights of another
        base = meta["lora"].get("base") if isinstance(meta["lora"], dict) else None
        kinds = dict(run=str, step=int, ema=str)
        named = isinstance(base, dict) and "run" in base and all(type(x) is kinds.get(key) for key, x in base.items())
        if not named or checkpoint in within:
            raise UserError(f"{checkpoint} does not say which weights its adapters are for")
        base = load_run(device=device, within=(*within, checkpoint), **base)
        adapters = path / "adapters" / f"step_{meta['step']:06d}.safetensors"
        apply_adapters(base, str(adapters))
        check_data(meta["data"], checkpoint, base.model.config)
        facts = dict(data=meta["data"], step=meta["step"], source=str(checkpoint), weights=ema)
        return dataclasses.replace(base, **facts, weights_path=adapters, run_dir=path)
    weights_path = checkpoint / ("model.pt" if ema == "raw" else f"ema_{ema}.pt")
    facts = dict(source=str(checkpoint), weights=ema, weights_path=weights_path, run_dir=path)
    return restore(meta, load_tensors(weights_path), device, **facts)


def restore(meta: dict, state_dict: dict, device, source: str, **facts) -> Loaded:
    """The model that `meta` describes (step, arch, config, model_config, data), with the weights of `state_dict`.

    On the CPU it takes the tensors over, without a copy. Raises UserError where they do not fit.
    """
    check_tensors(state_dict, source)
    model_config = read_model_config(meta, source, len(state_dict))
    try:
        process = make_process(meta["config"], meta["data"])
        model = empty_model(dataclasses.replace(model_config, checkpointing=False))
    except (KeyError, TypeError) as e:
        raise UserError(f"{source}: settings that this version does not know: {e}") from e
    except UserError as e:
        raise UserError(f"{source}: {e}") from None
    except (ValueError, RuntimeError, OverflowError) as e:  # torch's, of sizes that fit no layer
        raise UserError(f"{source}: its model_config describes no model: {e}") from e
    if process.out_channels(model_config.in_channels) != model_config.out_channels:
        raise UserError(f"{source}: out_channels={model_config.out_channels} does not fit the variance or objective")
    load_weights(model, state_dict, source, assign=True)
    return Loaded(model.to(device).eval(), process, meta["config"], meta["data"], meta["step"], source, **facts)


def check_guide(guide: Loaded, loaded: Loaded) -> None:
    """UserError where `guide`, for autoguidance, does not predict the same of the same x_t, t and labels."""

    def facts(of: Loaded) -> dict:
        model, process, latents = of.model.config, of.process, of.data.get("latents", {})
        return {
            "image size": (model.image_size, model.in_channels),
            "classes": model.num_classes,
            "low_res": model.low_res,
            "process": type(process),
            "noise schedule": [list(getattr(process, table, ())) for table in ("betas", "model_t")],
            "prediction": process.prediction,
            "latents": [latents.get(key) for key in ("sha256", "offset", "scale")],
        }

    ours = facts(loaded)
    differing = [key for key, value in facts(guide).items() if value != ours[key]]
    if differing:
        raise UserError(f"{guide.source} cannot guide {loaded.source}: they differ in {', '.join(differing)}")


def check_tensors(state_dict, source) -> None:
    """UserError unless it is a dictionary of tensors with names, each with all of its numbers in memory: one of a
    stride of 0 may be of any size, until it is copied."""
    whole = isinstance(state_dict, dict) and all(
        isinstance(name, str) and isinstance(x, torch.Tensor) and x.layout == torch.strided and x.device.type != "meta"
        and not (x.is_complex() or x.is_quantized) and x.numel() * x.itemsize <= x.untyped_storage().nbytes()
        for name, x in state_dict.items()
    )  # fmt: skip
    if not whole:
        raise UserError(f"{source} holds no dictionary of tensors")


def load_weights(model: torch.nn.Module, state_dict: dict, source, assign: bool = False) -> None:
    """Strict load_state_dict; a mismatch is one line that names the first key and both shapes.

    `assign`: the model takes the tensors themselves, so that there are not two of each; else it copies them.
    """
    own = model.state_dict()
    check_tensors(state_dict, source)
    for name in (*own, *state_dict):
        if name not in state_dict or name not in own:
            where = "lacks" if name not in state_dict else "has an unknown"
            raise UserError(f"{source} {where} tensor {name!r}: it does not fit this model")
        if own[name].shape != state_dict[name].shape:
            given, wanted = tuple(state_dict[name].shape), tuple(own[name].shape)
            raise UserError(f"{source}: {name!r} has shape {given}, the model wants {wanted}")
    if assign:  # as a copy would be: of the model's dtype, in one piece
        state_dict = {name: value.to(own[name].dtype).contiguous() for name, value in state_dict.items()}
    model.load_state_dict(state_dict, assign=assign)


def load_exported(path: Path, device) -> Loaded:
    """A .safetensors of scripts/export.py: weights, with what they need in the metadata, as JSON."""
    state_dict, metadata = load_safetensors(path)
    wanted = dict(step=int, arch=str, config=dict, model_config=dict, data=dict, ema=str)
    try:
        meta = {key: json.loads(metadata[key]) for key in wanted}
    except (KeyError, ValueError, RecursionError) as e:
        raise UserError(f"{path}: its metadata lack {e}; accepted: what scripts/export.py writes") from None
    for key, kind in wanted.items():
        if not isinstance(meta[key], kind):
            raise UserError(f"{path}: {key!r} in its metadata is not a {kind.__name__}")
    return restore(meta, state_dict, device, source=str(path), weights=meta["ema"], weights_path=path)


def load_published(
    path: Path, device, num_heads=0, image_size=0, noise_schedule="auto", num_timesteps=0, rescale_timesteps="auto"
) -> Loaded:
    """Meta's `DiT-XL-2-256x256.pt` (or a training checkpoint of theirs), or OpenAI's `ema_0.9999_500000.pt`.

    Such files hold weights alone. What these do not show is as in the published models, unless given: attention heads,
    and for OpenAI's UNets the size in pixels and the process (rescale_timesteps: auto, yes or no). Raises UserError for
    any other file.
    """
    weights = load_tensors(path)
    if isinstance(weights, dict) and isinstance(weights.get("ema"), dict):  # Meta's training checkpoint, with opt, args
        weights = weights["ema"]
    check_tensors(weights, path)
    if not weights.keys() & {"x_embedder.proj.weight", "time_embed.0.weight"}:
        first = next(iter(weights), "none")
        raise UserError(f"{path}: neither Meta's DiT nor improved-diffusion's UNet; its first tensor is {first!r}")
    try:
        if "x_embedder.proj.weight" in weights:
            model_config, weights = from_meta(weights, num_heads)
            process = dict(noise_schedule="linear", num_timesteps=1000, rescale_timesteps=False)
            arch, label_drop = "dit_classic", 0.1
        else:
            model_config, weights = from_improved_diffusion(weights, image_size, num_heads)
            lsun = not model_config.use_scale_shift_norm
            arch, label_drop = "unet", 0.0  # the class table has no null class
            # By improved-diffusion's README: LSUN and the upsampler are linear, and the unconditional models of 32 and
            # 64 pixels alone rescale t
            linear = lsun or model_config.low_res
            rescale = not (lsun or model_config.num_classes)
            process = dict(
                noise_schedule=("linear" if linear else "cosine") if noise_schedule == "auto" else noise_schedule,
                num_timesteps=num_timesteps or (1000 if lsun else 4000),
                rescale_timesteps=rescale if rescale_timesteps == "auto" else rescale_timesteps == "yes",
            )
    except UserError as e:
        raise UserError(f"{path}: {e}") from None
    except (ValueError, TypeError, LookupError, ArithmeticError, RuntimeError) as e:  # shapes that no such model has
        raise UserError(f"{path}: its tensors do not have the shapes of the published models: {e}") from e
    data = dict(
        name="",
        kind="images" if model_config.in_channels <= 3 else "latents",
        channels=model_config.in_channels,
        resolution=model_config.image_size,
        num_classes=model_config.num_classes,
        class_names=[str(i) for i in range(model_config.num_classes)],
    )
    config = process | dict(
        objective="eps",
        variance="learned_range" if model_config.out_channels == 2 * model_config.in_channels else "fixed_large",
        loss="mse",
        label_drop=label_drop,
        low_res_size=model_config.low_res,
    )
    meta = dict(step=0, arch=arch, config=config, model_config=dataclasses.asdict(model_config), data=data)
    return restore(meta, weights, device, source=str(path), weights="as published", weights_path=path)
