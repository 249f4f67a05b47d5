"""From settings and a data set to a backbone and a process; nanodiff/formats/load.py goes the way back."""

import torch

from nanodiff.common import UserError
from nanodiff.models.dit import DiT, DiTConfig
from nanodiff.models.unet import UNet, UNetConfig


def parse_classes(classes: str, num_classes: int) -> list[int]:
    """Class numbers, comma-separated; "" is all of them, and [0] for a model without. Raises UserError."""
    try:
        chosen = [int(c) for c in classes.split(",")] if classes else list(range(max(num_classes, 1)))
    except ValueError:
        raise UserError(f"classes={classes!r}; accepted: numbers from 0 to {num_classes - 1}, such as 0,3") from None
    if classes and not all(0 <= c < num_classes for c in chosen):
        raise UserError(f"classes={classes!r}: this model has {num_classes or 'no'} classes, numbered from 0")
    return chosen


def make_model_config(config: dict, data: dict, out_channels: int) -> DiTConfig | UNetConfig:
    """Sizes from `depth` and from the data set's facts (`data`: a codec's)."""
    channels, resolution = data["channels"], data["resolution"]
    if config["low_res_size"] >= resolution:
        raise UserError(f"low_res_size={config['low_res_size']}; accepted: less than the images' {resolution} pixels")
    shape = dict(
        image_size=resolution,
        in_channels=channels,
        out_channels=out_channels,
        num_classes=data["num_classes"] if config["class_cond"] else 0,
        low_res=config["low_res_size"],
        checkpointing=config["checkpointing"],
    )
    if config["arch"] == "unet":
        keys = ("num_res_blocks", "use_scale_shift_norm", "dropout")
        try:
            resolutions = tuple(int(r) for r in config["attention_resolutions"].split(",") if r)
        except ValueError:
            given = config["attention_resolutions"]
            raise UserError(f"attention_resolutions={given!r}: accepted are integers, comma-separated") from None
        chosen = {key: config[key] for key in keys} | {"num_heads": config["heads"] or 4}
        return UNetConfig.from_depth(config["depth"], attention_resolutions=resolutions, **chosen, **shape)
    block = "classic" if config["arch"] == "dit_classic" else "modern"
    sizes = {key: config[key] for key in ("patch_size", "width", "heads")}
    return DiTConfig.from_depth(config["depth"], block=block, **sizes, **shape)


def empty_model(model_config: DiTConfig | UNetConfig) -> torch.nn.Module:
    """The backbone with parameters on "meta": shapes without memory."""
    with torch.device("meta"):
        return (UNet if isinstance(model_config, UNetConfig) else DiT)(model_config)


def build_model(model_config: DiTConfig | UNetConfig, device, seed: int):
    """The backbone on `device`, initialised from `seed`."""
    model = empty_model(model_config).to_empty(device=device)
    model.init_weights(torch.Generator().manual_seed(seed))
    return model
