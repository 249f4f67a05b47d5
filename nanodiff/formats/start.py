"""Start a run from the weights of another model: base_train's init_from and trainable."""

import torch

from nanodiff.common import UserError, print0
from nanodiff.formats.load import Loaded, load_weights
from nanodiff.models.build import model_settings
from nanodiff.models.lora import class_table

NO_SHAPE = ("dropout", "checkpointing")  # settings of a model that its weights do not depend on
PROCESS = ("noise_schedule", "num_timesteps", "variance")  # of a Gaussian diffusion


def start_from(model, loaded: Loaded, config: dict, class_names: list[str]) -> None:
    """Copy a loaded model's weights into `model`, of the same shape except image size and classes.

    Rows of the class table are matched by class name or, if no name is known and the counts are equal, by order; other
    rows keep their initial values. `config`: the settings of the new run.
    """
    check_shape(model, loaded)
    warn_of_process(loaded, config)
    weights = loaded.model.state_dict()
    note = ""
    table = None
    if loaded.num_classes:
        table = weights.pop(class_table(loaded.model)[0] + ".weight")
    if class_names:
        name, own_table = class_table(model)
        weights[name + ".weight"], note = match_rows(own_table.weight, table, loaded.class_names, class_names)
    if not getattr(loaded.model.config, "flow_map", False):
        fresh = {name: value for name, value in model.state_dict().items() if name.startswith("h_embed")}
        weights |= fresh  # a flow map's, still without effect
    load_weights(model, weights, loaded.source)
    print0(f"started from {loaded.source} ({loaded.weights}){note}")


def check_shape(model, loaded: Loaded) -> None:
    """UserError that names the settings with which `model` would have the loaded one's shape."""
    theirs, ours = model_settings(loaded.model.config), model_settings(model.config)
    if "attention_resolutions" in theirs:  # in pixels, at the image size of the new run
        ratio = model.config.image_size / loaded.model.config.image_size
        resolutions = [round(res * ratio) for res in loaded.model.config.attention_resolutions]
        theirs["attention_resolutions"] = ",".join(map(str, resolutions))
    if loaded.model.config.out_channels != model.config.out_channels:
        theirs["variance"] = loaded.config.get("variance", "fixed_small")
    differing = [key for key in theirs if key not in NO_SHAPE and theirs[key] != ours.get(key)]
    if differing:
        settings = " ".join(f"--{key}={theirs[key]}" for key in differing)
        raise UserError(f"init_from: {loaded.source} has another shape; to start from it: {settings}")


def warn_of_process(loaded: Loaded, config: dict) -> None:
    """Say what the model must relearn, since its process differs from that of the settings `config`."""
    keys = []
    if loaded.config["objective"].replace("_map", "") != config["objective"].replace("_map", ""):
        keys = ["objective"]
    if not loaded.config["objective"].startswith("flow"):
        keys += PROCESS
    differing = []
    if not loaded.config.get("rescale_timesteps", True) and loaded.config["num_timesteps"] != 1000:
        differing = ["rescale_timesteps=False"]
    for key in keys:
        if loaded.config.get(key, config[key]) != config[key]:
            differing.append(f"{key}={loaded.config[key]}")
    if differing:
        print0(f"warning: {loaded.source} was trained with {', '.join(differing)}: it must relearn what it predicts")


def match_rows(own_table, table, known: list[str], class_names: list[str]):
    """The class table of a new run (rows, C), with rows of the loaded `table` for the classes that it knows; a note."""
    rows = own_table.detach().clone()
    by_order = len(known) == len(class_names) and not set(known) & set(class_names)
    wanted = known if by_order else class_names
    matched = [i for i, class_name in enumerate(wanted) if class_name in known]
    for i in matched:
        rows[i] = table[known.index(wanted[i])]
    if known and len(table) > len(known):
        rows[-1] = table[-1]  # the null class
    how = "by order" if by_order else "by name"
    kept = f"{len(matched)} of {len(class_names)}"
    return rows, f"; rows of the class table kept {how}: {kept}, the rest drawn anew"


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
