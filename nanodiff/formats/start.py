"""Start a run from another model: base_train's init_from, trainable and lora_rank."""

from dataclasses import replace
from pathlib import Path

import torch

from nanodiff.common import Settings, UserError, print0
from nanodiff.conditions import row_shapes
from nanodiff.data.dataset import Dataset, match_labels, open_dataset, same_order
from nanodiff.diffusion.process import OBJECTIVES, learns_guidance
from nanodiff.formats.adapters import class_rows, identity, save_adapters  # noqa: F401 (base_train)
from nanodiff.formats.load import Loaded, find, load_run, read_file, split_options
from nanodiff.models.build import load_weights, model_settings
from nanodiff.models.lora import add_lora, class_table
from nanodiff.training.checkpoint import find_checkpoint, run_folder

NO_SHAPE = ("dropout", "checkpointing")  # settings of a model that its weights do not depend on
TARGET = "objective time_input noise_schedule num_timesteps variance rescale_timesteps".split()
PROCESS = """
    objective time_input timesteps timestep_shift timestep_std label_drop gaussian_loss noise_schedule num_timesteps
    variance rescale_timesteps
    """.split()


def inherited(config) -> dict:
    """The settings of a run with init_from that come from its source: its name, the model's shape and the process.

    `config`: a configurator.Config. A run with checkpoints takes them from its newest, as the source may be gone. If
    the new objective needs another kind of process than the source's, only the shape is taken.
    """
    if not config["init_from"]:
        raise UserError(f"lora_rank={config['lora_rank']} needs --init_from=..., the model to tune")
    source, _ = split_options(config["init_from"])
    base = Path(source).absolute().name.removesuffix(".safetensors").removesuffix(".pt")
    data = Path(config["data"]).absolute().name
    suffix = "_lora" if config["lora_rank"] else ""
    model_tag = config["model_tag"] or f"{base}_{data}{suffix}"
    checkpoint = find_checkpoint(run_folder(model_tag))  # verified, as it may be damaged
    file = (checkpoint / "model.safetensors", {}) if checkpoint else find(config["init_from"])
    meta, _ = read_file(*file)
    model_config = meta["model_config"]
    shape = model_settings(model_config) | {"class_cond": model_config.num_classes > 0}
    settings = dict(meta["config"])
    if not checkpoint:
        settings |= shape
    names = [name for name in shape if name not in NO_SHAPE]
    if config.overrides.get("arch", settings["arch"]) != settings["arch"]:
        names = []  # check_shape refuses it
    objective = config.overrides.get("objective", settings["objective"])
    kind, _ = OBJECTIVES[objective]
    source_kind, _ = OBJECTIVES[settings["objective"]]
    if kind.is_gaussian == source_kind.is_gaussian:
        names += PROCESS
        if kind.is_map and not checkpoint:
            names.remove("timesteps")  # its weights would not belong to the t that a map draws
    if objective == settings["objective"]:
        names += ["sample_steps", "sampler"]
        if shape["class_cond"] or settings.get("cfg_scale", 1) != 1:  # a model without classes may support only 1
            names += ["cfg_scale", "cfg_interval"]
    has_labels = open_dataset(config["data"]).num_classes
    if has_labels and not shape["class_cond"] and "class_cond" not in config.overrides:
        print0("note: labels are ignored, as the source has no classes; --class_cond learns them (not adapters)")
    is_guidable = not shape["class_cond"] or has_labels
    if is_guidable and settings.get("guided_from", 1.0) < 1 and (checkpoint or learns_guidance(settings, meta["step"])):
        if not checkpoint:
            settings["guided_from"] = 0.0
        names += ["guided_from", "cfg_scale", "cfg_interval"]
    if checkpoint:  # other adapters are merged into their base
        names += ["lora_rank", "lora_alpha", "lora_targets"]
    return {"model_tag": model_tag} | {name: settings[name] for name in names if name in settings}


def open_source(config: Settings, meta: dict, device):
    """Load the model that init_from names; also return the data that the run's own are matched with.

    A resumed run (`meta` is its checkpoint's) needs its source only as a teacher (flow maps) or as the base of its
    adapters. Only a teacher is put on `device`.
    """
    kind, _ = OBJECTIVES[config["objective"]]
    source = None
    if kind.is_map or "lora" in meta or not meta:
        teacher = {"base": meta.get("teacher", config["init_from"]), "sha256": meta.get("teacher_sha256")}
        identifier = meta.get("lora", teacher)
        base = identifier["base"]
        if meta and config["init_from"] != meta["config"].get("init_from"):  # it has moved
            base = config["init_from"]
        source = load_run(base, device if kind.is_map else "cpu")
        if identifier["sha256"] and identifier["sha256"] != identity(source)["sha256"]:
            raise UserError(f"{source.source} has other weights than when this run began")
    data = meta["data"] if meta else source.data
    if not config["lora_rank"]:
        data = replace(data, class_names=[], num_classes=0)  # a whole model may lose the old classes
    return source, data


def start_from(model, base: Loaded, config: Settings, class_names: list[str]) -> list[str]:
    """Copy a loaded model's weights into `model`, of the same shape except image size and classes -> the parameters
    of new classes, second images or a map's h, which must learn.

    Rows of the class table are matched by class name or by order (same_order); for other rows see class_rows.
    `config`: the settings of the new run.
    """
    check_shape(model, base)
    state = model.state_dict()
    # A flow map's h_embed stays new: it has no effect before it is trained
    weights = {name: x for name, x in state.items() if name.startswith("h_embed")}
    base_state = base.model.state_dict()
    for name, x in base_state.items():
        if not x.isfinite().all():
            raise UserError(f"init_from: {base.source} has NaN or infinity in {name}")
    if any(name.startswith("h_embed") for name in base_state.keys() - state):
        raise UserError(f"init_from: {base.source} is a flow map; accepted: the objective of a map, or its teacher")
    new = [*(weights.keys() - base_state)]
    weights |= base_state
    for name in ("patch_embed.weight", "input_blocks.0.0.weight"):  # a new second image has no effect at first, either
        if name in weights:
            x = weights[name]
            extra = state[name][:, x.shape[1] :]  # none, if both have a second image or neither
            if extra.numel():
                new.append(name)
                weights[name] = torch.cat([x, x.new_zeros(extra.shape)], dim=1)
    note = ""
    base_names = base.class_names
    if base_names:
        table = weights.pop(f"{class_table(base.model)}.weight")
        if not class_names:
            note = "; its classes are dropped"
            # All images are of the null class, or the mean one, which adds a constant to t's embedding
            bias = next(name for name in weights if name.endswith(("t_embed.2.bias", "time_embed.2.bias")))
            weights[bias] = weights[bias] + class_rows(table, base_names, [], 1)[0]
    if class_names:
        name = f"{class_table(model)}.weight"
        weights[name] = state[name]
        if base_names:
            if same_order(class_names, base_names):
                base_names = class_names
            weights[name] = class_rows(table, base_names, class_names, len(state[name]))
            note = f"; it knows {len({*base_names} & {*class_names})} of {len(class_names)} classes"
        if {*class_names} - {*base_names}:
            new.append(name)
    load_weights(model, weights, base.source)
    for key in TARGET:
        value = base.config.get(key, config[key])
        if value != config[key]:
            note += f"; it was trained with {key}={value}"
    print0(f"started from {base.source} ({base.weights}){note}")
    return new


def with_adapters(
    model,
    base: Loaded,
    config: Settings,
    class_names: list[str],
    train_set: Dataset,
) -> dict:
    """Freeze `model`, filled by start_from, except adapters and the rows of classes that `base` lacks.

    Returns a checkpoint's meta["lora"]: which base the adapters belong to, and how they were made.
    """
    base_names = base.class_names
    same = {
        "objective": base.config["objective"],
        "trainable": "",
        "class_cond": bool(base_names),
    }
    if base_names and not getattr(base.model.config, "null_class", True):  # a published UNet
        same["label_drop"] = 0
    for name, value in same.items():
        if config[name] != value:
            raise UserError(f"{name}={config[name]!r} with lora_rank, on {base.source}; accepted: {value!r}")
    if base_names and not train_set.meta["class_names"]:  # samples would show the base's
        raise UserError(
            f"lora_rank: data={config['data']!r} has no classes, {base.source} has {len(base_names)}; "
            "accepted: one sub-folder of images, which becomes a new class"
        )
    size = model.config.image_size
    base_size = base.model.config.image_size
    if size != base_size:
        raise UserError(f"lora_rank: the data have resolution {size}, the model wants {base_size}")
    rank = config["lora_rank"]
    targets = config["lora_targets"]
    alpha = config["lora_alpha"] or float(rank)
    new = class_names[len(base_names) :]
    rows = range(len(base_names), len(class_names))
    add_lora(model, rank, alpha, targets, rows, config["seed"])
    print0(f"adapters: rank {rank}; new classes: {', '.join(new) or 'none'}")
    return identity(base) | dict(rank=rank, alpha=alpha, targets=targets, classes=new)


def teach(process, teacher: Loaded, model_config, class_names: list[str]) -> None:
    """Let `teacher` teach a flow map with this model config and these classes, mapped to the teacher's numbers."""
    if teacher is None or teacher.process.is_gaussian:
        raise UserError("objective=flow_map tunes a flow run: give its name as init_from")
    if process.cfg_scale != 1 and teacher.why_unguided:
        print0(f"cfg_scale={process.cfg_scale} is ignored for the teacher {teacher.source}: {teacher.why_unguided}")
        process.cfg_scale = 1.0
    process.teacher = teacher
    teacher_shapes = row_shapes(teacher.model.config)
    map_shapes = row_shapes(model_config)
    if teacher_shapes != map_shapes:
        raise UserError(
            f"objective=flow_map: {teacher.source} takes {teacher_shapes}; the conditions here are {map_shapes}"
        )
    numbers = match_labels(class_names, teacher.class_names, f"objective=flow_map, {teacher.source}")
    process.classes = torch.tensor([*numbers, len(teacher.class_names)], device=teacher.device)


def check_shape(model, base: Loaded) -> None:
    """Raise UserError unless `model` has the loaded model's shape; it names the settings that would give that shape."""
    base_config = base.model.config
    base_settings = model_settings(base_config)
    new_settings = model_settings(model.config)
    if "attention_resolutions" in base_settings:  # in pixels, at the image size of the new run
        ratio = model.config.image_size / base_config.image_size
        resolutions = [round(res * ratio) for res in base_config.attention_resolutions]
        base_settings["attention_resolutions"] = ",".join(map(str, resolutions))
    differing = [key for key in base_settings.keys() - NO_SHAPE if base_settings[key] != new_settings.get(key)]
    if differing:
        shape = " ".join(f"--{key}={base_settings[key]}" for key in sorted(differing))
        raise UserError(f"init_from: {base.source} has another shape; to start from it: {shape}")


def train_only(model: torch.nn.Module, patterns: str, new: list[str]) -> None:
    """Freeze the parameters whose names contain none of `patterns`, comma-separated; refuse to freeze `new`."""
    parts = [pattern.strip() for pattern in patterns.split(",")]
    names = [name for name, _ in model.named_parameters()]
    for pattern in parts:
        if not pattern or not any(pattern in name for name in names):
            some = f"{names[0]}, ..., {names[-1]}"
            raise UserError(f"trainable={patterns!r}: no parameter's name contains {pattern!r}; it has {some}")
    for name, p in model.named_parameters():
        p.requires_grad_(any(pattern in name for pattern in parts))
        if name in new and not p.requires_grad:
            raise UserError(f"trainable={patterns!r} freezes {name}, which is new or has new classes or images: add it")
