"""Start a run from another model: base_train's init_from and trainable."""

import re
from pathlib import Path

import torch

from nanodiff.common import UserError, print0
from nanodiff.data.dataset import same_order
from nanodiff.formats.load import Loaded, load_run, load_weights, make_config, newest_meta, read_meta, split_options
from nanodiff.models.build import model_settings
from nanodiff.models.lora import class_rows, class_table
from nanodiff.training.resume import run_folder

NO_SHAPE = ("dropout", "checkpointing")  # settings of a model that its weights do not depend on
PROCESS = (
    "objective", "timesteps", "timestep_shift", "timestep_std", "label_drop", "loss", "noise_schedule", "num_timesteps",
    "variance", "rescale_timesteps",
)  # fmt: skip


def inherited(config) -> dict:
    """The settings of a run with init_from that come from its source: its name, the model's shape and the process.

    `config`: a configurator.Config. A run that has checkpoints brings them itself, as its source may be gone. Of a
    source with another kind of process than the objective that is given, only the shape is taken.
    """
    if not config["init_from"]:
        return {}
    source, _ = split_options(config["init_from"])
    names = re.sub(r"\.\w+$", "", Path(source).absolute().name), Path(config["data"]).absolute().name
    model_tag = config["model_tag"] or "_".join(names)
    own = newest_meta(run_folder(model_tag))
    meta = own or read_meta(config["init_from"])
    model_config = make_config(meta)
    shape = model_settings(model_config) | {"class_cond": model_config.num_classes > 0}
    theirs = meta["config"] | ({} if own else shape)
    names = [name for name in shape if name not in NO_SHAPE]
    if config.given.get("arch", theirs["arch"]) != theirs["arch"]:
        names = []  # check_shape refuses it
    objective = config.given.get("objective", theirs["objective"])
    if objective.startswith("flow") == theirs["objective"].startswith("flow"):
        names += PROCESS
    if theirs.get("guided_from", 1.0) < 1:
        theirs = theirs | ({} if own else {"guided_from": 0.0})
        names += ["guided_from", "cfg_scale", "cfg_interval"]
    return {"model_tag": model_tag} | {name: theirs[name] for name in names if name in theirs}


def open_source(config: dict, meta: dict, device) -> tuple[Loaded | None, dict | None]:
    """What init_from names, and the description by which the run is to see its data (see Dataset.seen_by).

    A resumed run, of this `meta`, needs its source no more, unless it learns from it (flow maps). Only a teacher is
    put on `device`.
    """
    if not config["init_from"]:
        return None, None
    is_map = config["objective"].startswith("flow_map")
    source = None
    if is_map or not meta:
        source = load_run(config["init_from"], device if is_map else "cpu")
    data = meta["data"] if meta else source.data
    return source, data | {"class_names": []}  # its own classes may go


def start_from(model, loaded: Loaded, config: dict, class_names: list[str]) -> None:
    """Copy a loaded model's weights into `model`, of the same shape except image size and classes.

    Rows of the class table are matched by class name or by order (see same_order); other rows start as the null class
    or, without one, as the mean of all. `config`: the settings of the new run.
    """
    check_shape(model, loaded)
    warn_of_process(loaded, config)
    own = model.state_dict()
    # A flow map's h_embed still has no effect
    weights = {name: x for name, x in own.items() if name.startswith("h_embed")} | loaded.model.state_dict()
    note = ""
    table = None
    if loaded.num_classes:
        table = weights.pop(class_table(loaded.model)[0] + ".weight")
    if class_names:
        name = class_table(model)[0] + ".weight"
        weights[name] = own[name]
        if table is not None:
            known = class_names if same_order(class_names, loaded.class_names) else loaded.class_names
            weights[name] = class_rows(table, known, class_names, len(own[name]))
            note = f"; of its classes: {len({*known} & {*class_names})} of {len(class_names)}"
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
        keys += ["noise_schedule", "num_timesteps", "variance"]
        if loaded.config["num_timesteps"] != 1000:  # else rescaling changes nothing
            keys += ["rescale_timesteps"]
    differing = []
    for key in keys:
        if loaded.config.get(key, config[key]) != config[key]:
            differing.append(f"{key}={loaded.config[key]}")
    if differing:
        print0(f"warning: {loaded.source} was trained with {', '.join(differing)}: it must relearn what it predicts")


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
