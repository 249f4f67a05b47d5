"""Files of LoRA adapters: written by scripts/lora_train.py, merged into a base model wherever one is loaded.

A .safetensors with the names of the peft library (github.com/huggingface/peft), so its set_peft_model_state_dict reads
it. Adapters are used by merging: W + scale alpha / rank B A costs nothing when sampling.
"""

import hashlib
import json
import math
from pathlib import Path

import torch

from nanodiff.common import UserError, base_dir
from nanodiff.models.lora import ClassTable, LoRALinear, add_classes, class_table
from nanodiff.safetensors import load_safetensors, save_safetensors

# peft's names: the prefix, the module's name, and one of the three suffixes
PREFIX = "base_model.model."
A, B, ROWS = ".lora_A.weight", ".lora_B.weight", ".token_adapter.trainable_tokens_delta"


def fingerprint(tensors: dict[str, torch.Tensor]) -> str:
    """SHA-256 of names, shapes, dtypes and values: the same for the same weights, whatever file they came in."""
    digest = hashlib.sha256()
    for name, x in sorted(tensors.items()):
        digest.update(f"{name} {tuple(x.shape)} {x.dtype}\n".encode())
        digest.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def identity(loaded) -> dict:
    """Which weights a model from load_run has: `base` (the arguments that load them again), `name` and `sha256`.

    `base` holds the run's tag rather than its path if it can, so the folder of all runs may move.
    """
    sha256 = fingerprint(loaded.model.state_dict())
    path = (loaded.run_dir or Path(loaded.source)).absolute()
    if loaded.run_dir is None:
        return dict(base=dict(run=str(path)), name=path.name, sha256=sha256)
    run = path.name if path.parent == (base_dir() / "runs").absolute() else str(path)
    name = f"{path.name} at step {loaded.step} ({loaded.weights})"
    return dict(base=dict(run=run, step=loaded.step, ema=loaded.weights), name=name, sha256=sha256)


def match_classes(loaded, dataset, train_classes: str = "new"):
    """Match a data set's classes with a model's by name, and add to the model those that it lacks.

    Returns the data set with the model's label numbers, the names of the model's classes, and the rows of the class
    table to train. `train_classes`: "new" = those just added, "all" = the set's and the null class, "none", or names,
    comma-separated. Unlabelled images get the null class; an unconditional model ignores labels.
    """
    known = loaded.data["class_names"] if loaded.num_classes else []
    if not known:
        return dataset, [], []
    new = [name for name in dataset.class_names if name not in known]
    names = [*known, *new]
    has_null = len(class_table(loaded.model)[1].weight) > len(known)
    null = [len(names)] if has_null else []
    if not dataset.num_classes and not has_null:
        raise UserError(f"data={dataset.name!r} has no labels, and {loaded.source} has no null class")
    if new and train_classes == "none":
        raise UserError(f"train_classes=none, but {loaded.source} lacks class {new[0]!r} of {dataset.name!r}")
    chosen = {"new": new, "all": dataset.class_names, "none": []}.get(train_classes, train_classes.split(","))
    for name in chosen:
        if name not in names:
            raise UserError(f"train_classes: no class {name!r}; accepted: new, all, none, {', '.join(names[:100])}")
    rows = sorted({names.index(name) for name in chosen})
    if train_classes == "all":
        rows += null
    numbers = [names.index(name) for name in dataset.class_names] or null
    add_classes(loaded.model, len(new))
    return dataset.relabelled(numbers), names, rows


def save_adapters(path: Path, model, rank: int, alpha: float, targets: str, classes: list, origin: dict) -> None:
    """Write what add_lora added to a model. `classes`: names of the trained rows, None = the null class; `origin`: the
    base's identity()."""
    tensors = {}
    for name, module in model.named_modules():
        if isinstance(module, LoRALinear):
            tensors[PREFIX + name + A] = module.lora_A.weight
            tensors[PREFIX + name + B] = module.lora_B.weight
        elif isinstance(module, ClassTable):  # peft stores the rows themselves, not their change
            tensors[PREFIX + name + ROWS] = (module.weight[module.rows] + module.delta).detach()
    metadata = dict(format="pt", rank=str(rank), alpha=str(alpha), targets=targets, classes=json.dumps(classes))
    metadata |= dict(base=origin["name"], base_sha256=origin["sha256"], sha256=fingerprint(tensors))
    path.parent.mkdir(parents=True, exist_ok=True)
    save_safetensors(tensors, path, metadata)


def read_adapters(path: str) -> tuple[dict[str, torch.Tensor], dict]:
    """(tensors by peft's names, metadata with rank and alpha as numbers and classes as a list)."""
    tensors, info = load_safetensors(path)
    try:
        classes = [None if name is None else str(name) for name in json.loads(info["classes"])]
        info |= dict(rank=int(info["rank"]), alpha=float(info["alpha"]), classes=classes)
        intact = fingerprint(tensors) == info["sha256"]
    except (KeyError, ValueError, TypeError, RecursionError) as e:
        raise UserError(f"{path} was not made by lora_train: its metadata have no valid {e}") from None
    if not intact:
        raise UserError(f"{path} is corrupt: its tensors do not have the SHA-256 in its metadata")
    return tensors, info


@torch.no_grad()
def apply_adapters(loaded, lora: str, lora_scale: str = "1") -> None:
    """Merge adapters into a model from load_run, and add their new classes to its `data`.

    `lora`: paths, comma-separated; `lora_scale`: a number for each, or one for all; 0 = the base. Several add up, their
    class rows too. A corrupt file, or one for another base, is refused before any weight changes.
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
    if len(scales) != len(paths) or not all(math.isfinite(scale) for scale in scales):
        accepted = f"a number, or {len(paths)} of them, comma-separated"
        raise UserError(f"lora_scale={lora_scale!r}; accepted: {accepted}")
    origin = identity(loaded)
    files = [read_adapters(path) for path in paths]
    for path, (_, info) in zip(paths, files):
        if info["base_sha256"] != origin["sha256"]:
            raise UserError(f"{path} is for other weights, those of {info['base']}, not for {origin['name']}")

    names = list(loaded.data["class_names"]) if loaded.num_classes else []
    added = [name for _, info in files for name in info["classes"] if name not in (None, *names)]
    added = list(dict.fromkeys(added))  # in order, once each
    add_classes(loaded.model, len(added))
    names += added
    if names:
        loaded.data = loaded.data | {"class_names": names, "num_classes": len(names)}
    table = class_table(loaded.model)[1].weight if names else torch.empty(0)
    original = table.clone()  # a new class starts as the base's null class
    for path, (tensors, info), scale in zip(paths, files, scales):
        rows = [len(names) if name is None else names.index(name) for name in info["classes"]]
        try:
            for key, x in tensors.items():
                if key.endswith(A):
                    weight = loaded.model.get_submodule(key.removeprefix(PREFIX).removesuffix(A)).weight
                    delta = tensors[key.replace(A, B)].float() @ x.float()  # (out, in), on the CPU: in full fp32
                    weight.add_(delta.to(weight.device), alpha=scale * info["alpha"] / info["rank"])
                elif key.endswith(ROWS):
                    table[rows] += scale * (x.to(table) - original[rows])
        except (AttributeError, LookupError, ArithmeticError, RuntimeError) as e:
            raise UserError(f"{path} does not fit {origin['name']}: {e}") from None
