"""LoRA adapter files: written by lora_train, merged into their base's weights on loading.

A .safetensors with peft's names (github.com/huggingface/peft): its set_peft_model_state_dict reads it.
"""

import hashlib
import json
import math
from pathlib import Path

import torch

from nanodiff.common import UserError, base_dir
from nanodiff.data.dataset import same_order
from nanodiff.files import FAULTS
from nanodiff.models.lora import ClassTable, add_classes, class_table, trained
from nanodiff.safetensors import load_safetensors, save_safetensors

# peft's names: prefix, module, suffix
PREFIX = "base_model.model."
A, B, ROWS = ".lora_A.weight", ".lora_B.weight", ".token_adapter.trainable_tokens_delta"


def fingerprint(tensors: dict[str, torch.Tensor]) -> str:
    """SHA-256 of names, shapes, dtypes and values."""
    digest = hashlib.sha256()
    for name, x in sorted(tensors.items()):
        digest.update(f"{name} {tuple(x.shape)} {x.dtype}\n".encode())
        digest.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def identity(loaded) -> dict:
    """Identify load_run's weights: `base` (its arguments), `name` and `sha256`."""
    sha256 = fingerprint(loaded.model.state_dict())
    path = (loaded.run_dir or Path(loaded.source)).absolute()
    if loaded.run_dir is None:
        return dict(base=dict(run=str(path)), name=path.name, sha256=sha256)
    run = path.name if path.parent == (base_dir() / "runs").absolute() else str(path)  # a tag survives a move
    name = f"{path.name} at step {loaded.step} ({loaded.weights})"
    return dict(base=dict(run=run, step=loaded.step, ema=loaded.weights), name=name, sha256=sha256)


def match_classes(loaded, dataset, train_classes: str = "new"):
    """Match a data set's classes with a model's by name, or by order (see same_order); add those that the model lacks.

    Returns the data set with the model's label numbers, the names of the model's classes, and the rows of the class
    table to train, by `train_classes`: "new", "all" (the null class too), "none", or names. No label: the null class.
    """
    known = loaded.data["class_names"] if loaded.num_classes else []
    if not known:
        return dataset, [], []
    own_names = known if same_order(dataset.class_names, known) else dataset.class_names
    new = [name for name in own_names if name not in known]
    names = [*known, *new]
    null = [len(names)] if len(class_table(loaded.model)[1].weight) > len(known) else []
    numbers = [names.index(name) for name in own_names] or null
    if not numbers:
        raise UserError(f"data={dataset.name!r} has no labels, and {loaded.source} has no null class")
    if new and train_classes == "none":
        raise UserError(f"train_classes=none, but {loaded.source} lacks class {new[0]!r} of {dataset.name!r}")
    chosen = {"new": new, "all": own_names, "none": []}.get(train_classes, train_classes.split(","))
    for name in chosen:
        if name not in names:
            raise UserError(f"train_classes: no class {name!r}; accepted: new, all, none, {', '.join(names[:100])}")
    rows = sorted({names.index(name) for name in chosen})
    if train_classes == "all":
        rows += null
    add_classes(loaded.model, len(new))
    return dataset.relabelled(numbers), names, rows


def save_adapters(path: Path, model, rank: int, alpha: float, targets: str, classes: list, origin: dict) -> None:
    """Write what add_lora added. `classes`: names of the trained rows, None = null class; `origin`: base's identity."""
    tensors = {}
    for name, p in trained(model).items():
        if name.endswith(".delta"):  # peft stores the rows themselves, not their change
            name = name.removesuffix(".delta")
            table = model.get_submodule(name)
            tensors[PREFIX + name + ROWS] = (table.weight[table.rows] + p).detach()
        else:
            tensors[PREFIX + name] = p
    metadata = dict(format="pt", rank=str(rank), alpha=str(alpha), targets=targets, classes=json.dumps(classes))
    metadata |= dict(base=origin["name"], base_sha256=origin["sha256"], sha256=fingerprint(tensors))
    path.parent.mkdir(parents=True, exist_ok=True)
    save_safetensors(tensors, path, metadata)


@torch.no_grad()
def start_from_adapters(model, path: str, scale: float, origin: dict, class_names: list[str]) -> None:
    """Copy a file's adapters into those that add_lora made with alpha / rank = `scale`: same base, layers and rank."""
    tensors, classes, their_scale = read_adapters(path, origin)
    mine = {PREFIX + name: p for name, p in trained(model).items() if not name.endswith(".delta")}
    for name in sorted(mine.keys() ^ {name for name in tensors if not name.endswith(ROWS)}):
        layer = name.removeprefix(PREFIX)
        raise UserError(f"init_from={path!r} has adapters on other layers, such as {layer}; see targets")
    for name, p in mine.items():
        x = tensors[name]
        if x.shape != p.shape:
            raise UserError(f"init_from={path!r} has adapters of rank {len(x)}; give --rank={len(x)}")
        p.copy_(x * (their_scale / scale) if name.endswith(B) else x)
    rows = [x for name, x in tensors.items() if name.endswith(ROWS)]
    table = class_table(model)[1] if rows else None
    trains = table.rows.tolist() if isinstance(table, ClassTable) else []
    for class_name, row in zip(classes, rows[0] if rows else []):
        number = len(class_names) if class_name is None else class_names.index(class_name)
        if number not in trains:
            raise UserError(f"init_from={path!r} has learned class {class_name!r}; name it in train_classes")
        table.delta[trains.index(number)] = row.to(table.weight) - table.weight[number]


def read_adapters(path: str, origin: dict) -> tuple[dict[str, torch.Tensor], list, float]:
    """(tensors by peft's names, classes of the trained rows, alpha / rank) of a file for the base `origin`."""
    tensors, info = load_safetensors(path)
    try:
        classes = [None if name is None else str(name) for name in json.loads(info["classes"])]
        scale = float(info["alpha"]) / int(info["rank"])
        if info["base_sha256"] != origin["sha256"]:
            theirs = f"{info['base']} (SHA-256 {info['base_sha256'][:16]}...)"
            raise UserError(f"they are for other weights: {theirs}, not {origin['name']} ({origin['sha256'][:16]}...)")
        if info["sha256"] != fingerprint(tensors):
            raise UserError("corrupt: its tensors do not match the SHA-256 in its metadata")
    except FAULTS as e:
        raise UserError(f"{path} holds no usable adapters of lora_train: {e}") from None
    return tensors, classes, scale


@torch.no_grad()
def apply_adapters(loaded, lora: str, lora_scale: str = "1") -> None:
    """Merge adapters into a model from load_run, W + scale alpha / rank B A, and add their new classes to its `data`.

    `lora`: paths, comma-separated; `lora_scale`: a number each, or one for all. Several add up, class rows too.
    """
    paths = [path.strip() for path in lora.split(",") if path.strip()]
    if not paths:
        return
    try:
        scales = [float(scale) for scale in lora_scale.split(",")]
    except ValueError:
        scales = []
    if len(scales) == 1:
        scales *= len(paths)
    if len(scales) != len(paths) or not all(map(math.isfinite, scales)):
        raise UserError(f"lora_scale={lora_scale!r}; accepted: a number, or {len(paths)} of them, comma-separated")
    origin = identity(loaded)
    files = [read_adapters(path, origin) for path in paths]  # all, before any weight changes

    names, original = [], torch.empty(0)
    if loaded.num_classes:
        known = loaded.data["class_names"]
        taught = [name for _, classes, _ in files for name in classes if name is not None]
        names = list(dict.fromkeys([*known, *taught]))
        add_classes(loaded.model, len(names) - len(known))
        loaded.data = loaded.data | {"class_names": names, "num_classes": len(names)}
        original = class_table(loaded.model)[1].weight.clone()  # a new class starts as the base's null class
    for path, (tensors, classes, alpha_over_rank), scale in zip(paths, files, scales):
        try:
            rows = [len(names) if name is None else names.index(name) for name in classes]
            for key, x in tensors.items():
                if key.endswith(A):
                    weight = loaded.model.get_submodule(key.removeprefix(PREFIX).removesuffix(A)).weight
                    delta = tensors[key.replace(A, B)].float() @ x.float()  # (out, in), on the CPU: in full fp32
                    weight.add_(delta.to(weight.device), alpha=scale * alpha_over_rank)
                elif key.endswith(ROWS):
                    table = loaded.model.get_submodule(key.removeprefix(PREFIX).removesuffix(ROWS)).weight
                    table[rows] += scale * (x.to(table) - original[rows])
        except FAULTS as e:
            raise UserError(f"{path} does not fit {origin['name']}: {e}") from None
