"""From settings and a data set to a backbone and a process, and back from a checkpoint: what every script shares."""

import dataclasses
import os
from pathlib import Path

import torch

from nanodiff import flow, gaussian
from nanodiff.checkpoint import find_checkpoint, load_meta, load_tensors
from nanodiff.common import UserError, base_dir
from nanodiff.dit import DiT, DiTConfig, from_meta
from nanodiff.flow import FlowMatching
from nanodiff.gaussian import GaussianDiffusion
from nanodiff.unet import UNet, UNetConfig, config_from_state_dict, from_improved_diffusion


def make_process(config: dict):
    """The diffusion process that the settings name: flow matching, or a Gaussian diffusion that predicts eps, x0, v."""
    if config["objective"] == "flow":
        return FlowMatching(prediction=config["flow_prediction"])
    return GaussianDiffusion(
        schedule=config["noise_schedule"],
        num_timesteps=config["num_timesteps"],
        prediction=config["objective"],
        variance=config["variance"],
        loss=config["loss"],
        rescale_timesteps=config["rescale_timesteps"],
    )


def default_sampler(process) -> str:
    """What sampler="auto" stands for."""
    return "heun" if isinstance(process, FlowMatching) else "ddim"


def choose_sampler(process, sampler: str, steps: int) -> str:
    """The sampler, "auto" resolved. UserError where this process cannot take it: told at the start, not at the end."""
    accepted = (flow if isinstance(process, FlowMatching) else gaussian).SAMPLERS
    sampler = default_sampler(process) if sampler == "auto" else sampler
    if sampler not in accepted:
        kind = "flow matching" if isinstance(process, FlowMatching) else "a Gaussian diffusion"
        raise UserError(f"sampler={sampler!r} is not one for {kind}; accepted: auto, {', '.join(accepted)}")
    if process.num_timesteps and steps > process.num_timesteps:
        raise UserError(f"{steps} sampling steps are more than the process has; accepted: 1 to {process.num_timesteps}")
    return sampler


def make_model_config(config: dict, data: dict, process) -> DiTConfig | UNetConfig:
    """Sizes from `depth` and from the data set's facts (`data`: a codec's)."""
    channels, resolution = data["channels"], data["resolution"]
    if config["low_res_size"] >= resolution:
        raise UserError(f"low_res_size={config['low_res_size']}; accepted: less than the images' {resolution} pixels")
    shape = dict(
        image_size=resolution,
        in_channels=channels,
        out_channels=process.out_channels(channels),
        num_classes=data["num_classes"] if config["class_cond"] else 0,
        low_res=config["low_res_size"] > 0,
        checkpointing=config["checkpointing"],
    )
    if config["arch"] == "unet":
        keys = ("num_res_blocks", "num_heads", "num_heads_upsample", "use_scale_shift_norm", "dropout")
        try:
            resolutions = tuple(int(r) for r in config["attention_resolutions"].split(",") if r)
        except ValueError:
            given = config["attention_resolutions"]
            raise UserError(f"attention_resolutions={given!r}: accepted are integers, comma-separated") from None
        chosen = {key: config[key] for key in keys}
        return UNetConfig.from_depth(config["depth"], attention_resolutions=resolutions, **chosen, **shape)
    block = "classic" if config["arch"] == "dit_classic" else "modern"
    return DiTConfig.from_depth(config["depth"], patch_size=config["patch_size"], block=block, **shape)


def build_model(model_config: DiTConfig | UNetConfig, device, seed: int | None = None):
    """The backbone on `device`, initialised from `seed`, or with buffers alone when its weights will be loaded."""
    with torch.device("meta"):
        model = (UNet if isinstance(model_config, UNetConfig) else DiT)(model_config)
    model.to_empty(device=device)
    model.init_weights(torch.Generator().manual_seed(seed or 0))
    return model


# Settings that make the model what it is: a run cannot go on with others. The rest may change between two starts.
FIXED = (
    "seed", "data", "flip", "latent_norm", "class_cond", "low_res_size", "arch", "depth", "patch_size",
    "num_res_blocks", "attention_resolutions", "num_heads", "num_heads_upsample", "use_scale_shift_norm", "dropout",
    "objective", "flow_prediction", "noise_schedule", "num_timesteps", "variance", "loss", "rescale_timesteps",
    "timesteps", "label_drop", "total_batch_size", "optimizer", "ema_rates", "ema_ramp",
)  # fmt: skip


def check_settings(config: dict, old: dict, model_tag: str) -> list[str]:
    """Compare settings with those a checkpoint was made with; UserError on a fixed one, else the changes as text."""
    changed = {key: f"{key}={value!r} (was {old.get(key)!r})" for key, value in config.items() if value != old.get(key)}
    fixed = [changed[key] for key in FIXED if key in changed]
    if fixed:
        raise UserError(f"{model_tag} was trained otherwise: {', '.join(fixed)}; set it back or use another model_tag")
    return list(changed.values())


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
    """A trained model with what is needed to use it. `source` and `weights` say which file and which average."""

    model: torch.nn.Module
    process: object
    config: dict
    data: dict
    step: int
    source: str
    weights: str
    run_dir: Path | None = None

    @property
    def num_classes(self) -> int:
        """0 where the model is unconditional, whatever the data set has."""
        return self.model.config.num_classes

    @property
    def has_null_class(self) -> bool:
        """Whether the model has learned to do without a label, which classifier-free guidance needs."""
        return self.num_classes > 0 and self.config["label_drop"] > 0


def load_run(run: str, device, step: int = -1, ema: str = "", **published) -> Loaded:
    """Load a model to sample from or evaluate.

    `run`: a run folder or tag (checkpoint `step`, -1 = the newest that verifies; `ema` "" = the first rate, "raw" = no
    average, or a rate), or a file in Meta's DiT or OpenAI's improved-diffusion format, which `published` is for: see
    load_published.
    """
    path = find_run(run)
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
    make = UNetConfig if meta["arch"] == "unet" else DiTConfig
    try:
        process, model_config = make_process(meta["config"]), make(**tuples(meta["model_config"]))
        needed = meta["config"]["low_res_size"], meta["config"]["label_drop"]
        needed += tuple(meta["data"][key] for key in ("name", "kind", "channels", "resolution", "class_names"))
    except (KeyError, TypeError) as e:
        raise UserError(f"{checkpoint / 'meta.json'}: settings that this version does not know: {e}") from e
    model = build_model(dataclasses.replace(model_config, checkpointing=False), device)
    load_weights(model, load_tensors(checkpoint / ("model.pt" if ema == "raw" else f"ema_{ema}.pt")), checkpoint)
    return Loaded(model.eval(), process, meta["config"], meta["data"], meta["step"], str(checkpoint), ema, path)


def tuples(fields: dict) -> dict:
    """JSON has no tuples; the model configs have nothing else."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}


def load_weights(model: torch.nn.Module, state_dict: dict, source) -> None:
    """Strict load_state_dict; a mismatch is one line that names the first key and both shapes."""
    own = model.state_dict()
    if not isinstance(state_dict, dict) or not all(isinstance(value, torch.Tensor) for value in state_dict.values()):
        raise UserError(f"{source} holds no dictionary of tensors")
    for name in (*own, *state_dict):
        if name not in state_dict or name not in own:
            where = "lacks" if name not in state_dict else "has an unknown"
            raise UserError(f"{source} {where} tensor {name!r}: it does not fit this model")
        if own[name].shape != state_dict[name].shape:
            given, wanted = tuple(state_dict[name].shape), tuple(own[name].shape)
            raise UserError(f"{source}: {name!r} has shape {given}, the model wants {wanted}")
    model.load_state_dict(state_dict)


def load_published(
    path: Path, device, num_heads=0, image_size=0, noise_schedule="auto", num_timesteps=0, rescale_timesteps="auto"
) -> Loaded:
    """Meta's `DiT-XL-2-256x256.pt` (or a training checkpoint of theirs), or OpenAI's `ema_0.9999_500000.pt`.

    Such files hold weights alone. What these do not show is as in the published models, unless given: attention heads,
    and for OpenAI's UNets the size in pixels and the process (rescale_timesteps: auto, yes or no). Raises UserError for
    any other file.
    """
    weights = load_tensors(path)
    if not isinstance(weights, dict) or not all(isinstance(key, str) for key in weights):
        raise UserError(f"{path} is no dictionary of tensors")
    if isinstance(weights.get("ema"), dict):  # Meta's training checkpoint: model, ema, opt, args
        weights = weights["ema"]
    if not weights or not all(isinstance(value, torch.Tensor) for value in weights.values()):
        raise UserError(f"{path} is no dictionary of tensors")
    if not weights.keys() & {"x_embedder.proj.weight", "time_embed.0.weight"}:
        first = next(iter(weights))
        raise UserError(f"{path}: neither Meta's DiT nor improved-diffusion's UNet; its first tensor is {first!r}")
    known = {"num_heads": num_heads, "image_size": image_size}
    known = {key: value for key, value in known.items() if value}
    try:
        if "x_embedder.proj.weight" in weights:
            model_config, weights = from_meta(weights, **({"heads": num_heads} if num_heads else {}))
            process = GaussianDiffusion(schedule="linear", variance="learned_range", clip_denoised=False)
            kind, label_drop = "latents", 0.1
        else:
            lsun = not (config := config_from_state_dict(weights, **known)).use_scale_shift_norm
            model_config = config_from_state_dict(weights, **({"num_heads": 1} if lsun else {}) | known)
            weights = from_improved_diffusion(weights)
            kind, label_drop = "images", 0.0  # the class table has no null class
            # By improved-diffusion's README: LSUN and the upsampler are linear, and the unconditional models of 32 and
            # 64 pixels alone rescale t
            linear = lsun or config.low_res
            rescale = not (lsun or config.num_classes)
            process = GaussianDiffusion(
                schedule=("linear" if linear else "cosine") if noise_schedule == "auto" else noise_schedule,
                num_timesteps=num_timesteps or (1000 if lsun else 4000),
                variance="learned_range" if config.out_channels == 2 * config.in_channels else "fixed_large",
                rescale_timesteps=rescale if rescale_timesteps == "auto" else rescale_timesteps == "yes",
            )
    except UserError as e:
        raise UserError(f"{path}: {e}") from None
    except (ValueError, TypeError, KeyError, IndexError, ZeroDivisionError) as e:  # shapes that no such model has
        raise UserError(f"{path}: its tensors do not have the shapes of the published models: {e}") from e
    model = build_model(model_config, device)
    load_weights(model, weights, path)
    data = dict(
        name="",
        kind=kind,
        channels=model_config.in_channels,
        resolution=model_config.image_size,
        num_classes=model_config.num_classes,
        class_names=[str(i) for i in range(model_config.num_classes)],
    )
    config = {"low_res_size": model_config.image_size // 4 if model_config.low_res else 0, "label_drop": label_drop}
    return Loaded(model.eval(), process, config, data, 0, str(path), "as published")
