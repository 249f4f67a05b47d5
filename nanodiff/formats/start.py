"""Start a run from the weights of another model: base_train's init_from and trainable."""

import torch

from nanodiff.common import UserError, print0
from nanodiff.formats.load import Loaded, load_weights
from nanodiff.models.dit import DiTConfig
from nanodiff.models.lora import class_table
from nanodiff.models.unet import NORM_GROUPS

PROCESS = ("noise_schedule", "num_timesteps", "variance", "rescale_timesteps")  # of a Gaussian diffusion


def shape_settings(model_config, image_size: int) -> dict:
    """The settings of base_train that give a backbone of this shape for images of `image_size`."""
    c = model_config
    if isinstance(c, DiTConfig):
        arch = "dit_classic" if c.block == "classic" else "dit"
        found = dict(arch=arch, depth=c.depth, width=c.width, heads=c.heads, patch_size=c.patch_size)
    else:
        found = dict(arch="unet", depth=c.model_channels // NORM_GROUPS, heads=c.num_heads)
        found |= dict(num_res_blocks=c.num_res_blocks, use_scale_shift_norm=c.use_scale_shift_norm)
        resolutions = [res * image_size // c.image_size for res in c.attention_resolutions]
        found["attention_resolutions"] = ",".join(map(str, resolutions))
    return found | dict(low_res_size=c.low_res)


def start_from(model, loaded: Loaded, config: dict, class_names: list[str]) -> None:
    """Copy a loaded model's weights into `model`, of the same shape except image size and classes.

    Rows of the class table are matched by class name or, if no name is known and the counts are equal, by order; other
    rows keep their initial values. `config`: the settings of the new run.
    """
    source = loaded.source
    theirs = shape_settings(loaded.model.config, model.config.image_size)
    mine = shape_settings(model.config, model.config.image_size)
    if loaded.model.config.out_channels != model.config.out_channels:
        theirs["variance"] = loaded.config.get("variance", "fixed_small")
    differing = [f"--{key}={value}" for key, value in theirs.items() if mine.get(key) != value]
    if differing:
        raise UserError(f"init_from: {source} has another shape; to start from it: {' '.join(differing)}")
    keys = ("objective",) if loaded.config["objective"].startswith("flow") else ("objective", *PROCESS)
    differing = [f"{key}={loaded.config[key]}" for key in keys if loaded.config.get(key, config[key]) != config[key]]
    if differing:
        print0(f"warning: {source} was trained with {', '.join(differing)}: it must relearn what it predicts")

    weights = loaded.model.state_dict()
    known = loaded.data["class_names"] if loaded.num_classes else []
    table = weights.pop(class_table(loaded.model)[0] + ".weight") if known else None
    note = ""
    if class_names:
        name, own_table = class_table(model)
        rows = own_table.weight.detach().clone()
        by_order = len(known) == len(class_names) and not set(known) & set(class_names)
        wanted = known if by_order else class_names
        matched = [i for i, class_name in enumerate(wanted) if class_name in known]
        for i in matched:
            rows[i] = table[known.index(wanted[i])]
        if known and len(table) > len(known):
            rows[-1] = table[-1]  # the null class
        weights[name + ".weight"] = rows
        how = "by order" if by_order else "by name"
        note = f"; rows of the class table kept {how}: {len(matched)} of {len(class_names)}, the rest drawn anew"
    load_weights(model, weights, source)
    print0(f"started from {source} ({loaded.weights}){note}")


def train_only(model: torch.nn.Module, patterns: str) -> None:
    """Freeze the parameters whose names contain none of `patterns`, comma-separated."""
    wanted = [pattern.strip() for pattern in patterns.split(",")]
    names = [name for name, _ in model.named_parameters()]
    for pattern in wanted:
        if not pattern or not any(pattern in name for name in names):
            modules = ", ".join(dict.fromkeys(name.split(".")[0] for name in names))
            raise UserError(f"trainable={patterns!r}: no parameter's name contains {pattern!r}; it has {modules}, ...")
    for name, p in model.named_parameters():
        p.requires_grad_(any(pattern in name for pattern in wanted))
    num_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print0(f"trainable: {num_trained:,} parameters")
