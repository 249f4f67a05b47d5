"""LoRA adapter files: written by lora_train, merged into their base's weights on loading.

A .safetensors with peft's names (github.com/huggingface/peft): its set_peft_model_state_dict reads it.
"""

import hashlib
import json
from pathlib import Path

import torch

from nanodiff.common import UserError, base_dir
from nanodiff.data.dataset import same_order
from nanodiff.files import reading
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
        flat = x.detach().cpu().contiguous().flatten()
        digest.update(flat.view(torch.uint8).numpy())
    return digest.hexdigest()


def identity(loaded) -> dict:
    """Identify load_run's weights: `base` (its arguments), `name` and `sha256`."""
    sha256 = fingerprint(loaded.model.state_dict())
    path = (loaded.run_dir or Path(loaded.source)).absolute()
    if loaded.run_dir is None:
        return {"base": {"run": str(path)}, "name": path.name, "sha256": sha256}
    run = str(path)
    if path.parent == (base_dir() / "runs").absolute():
        run = path.name  # a tag survives a move
    base = {"run": run, "step": loaded.step, "ema": loaded.weights}
    return {"base": base, "name": f"{path.name} at step {loaded.step} ({loaded.weights})", "sha256": sha256}


def match_classes(loaded, dataset, train_classes: str = "new"):
    """Match a data set's classes with a model's by name, or by order (see same_order); add those that the model lacks.

    Returns the data set with the model's label numbers, the names of the model's classes, and the rows of the class
    table to train, by `train_classes`: "new", "all" (the null class too), "none", or names. No label: the null class.
    """
    if not loaded.num_classes:
        return dataset, [], []
    known = loaded.data["class_names"]
    own_names = dataset.class_names
    if same_order(own_names, known):
        own_names = known
    new = [name for name in own_names if name not in known]
    names = [*known, *new]
    _, table = class_table(loaded.model)
    null = []
    if len(table.weight) > len(known):
        null = [len(names)]
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
    add_classes(loaded.model, known, new)
    return dataset.relabelled(numbers), names, rows


def save_adapters(
    path: Path,
    model,
    rank: int,
    alpha: float,
    targets: str,
    classes: list,
    origin: dict,
) -> None:
    """Write what add_lora added. `classes`: names of the trained rows, None = null class; `origin`: base's identity."""
    tensors = {}
    for name, p in trained(model).items():
        if name.endswith(".delta"):  # peft stores the rows themselves, not their change
            name = name.removesuffix(".delta")
            table = model.get_submodule(name)
            tensors[PREFIX + name + ROWS] = (table.weight[table.rows] + p).detach()
        else:
            tensors[PREFIX + name] = p
    metadata = {
        "format": "pt",
        "rank": str(rank),
        "alpha": str(alpha),
        "targets": targets,
        "classes": json.dumps(classes),
        "base": origin["name"],
        "base_sha256": origin["sha256"],
        "sha256": fingerprint(tensors),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    save_safetensors(tensors, path, metadata)


def read_adapters(path: str, origin: dict) -> tuple[dict[str, torch.Tensor], list, float]:
    """(tensors by peft's names, classes of the trained rows, alpha / rank) of a file for the base `origin`."""
    tensors, metadata = load_safetensors(path)
    with reading(path, "holds no adapters of lora_train"):
        classes = json.loads(metadata["classes"])
        scale = float(metadata["alpha"]) / int(metadata["rank"])
        base, base_sha256, sha256 = metadata["base"], metadata["base_sha256"], metadata["sha256"]
    if base_sha256 != origin["sha256"]:
        theirs, ours = f"{base} ({base_sha256[:16]}...)", f"{origin['name']} ({origin['sha256'][:16]}...)"
        raise UserError(f"{path} holds adapters for other weights: {theirs}, not {ours}")
    if sha256 != fingerprint(tensors):
        raise UserError(f"{path} is corrupt: its tensors do not match the SHA-256 in its metadata")
    return tensors, classes, scale


@torch.no_grad()
def start_from_adapters(model, path: str, scale: float, origin: dict, class_names: list[str]) -> None:
    """Copy a file's adapters into those that add_lora made with alpha / rank = `scale`: same base, layers and rank."""
    tensors, classes, file_scale = read_adapters(path, origin)
    given = {}
    rows = None
    for name, x in tensors.items():
        if name.endswith(ROWS):
            rows = x
        else:
            given[name.removeprefix(PREFIX)] = x
    adapters = {name: p for name, p in trained(model).items() if not name.endswith(".delta")}
    for name in sorted(adapters.keys() ^ given.keys()):
        raise UserError(f"init_from={path!r} has adapters on other layers, such as {name}; see targets")
    for name, p in adapters.items():
        x = given[name]
        if x.shape != p.shape:
            raise UserError(f"init_from={path!r} has adapters of rank {len(x)}; give --rank={len(x)}")
        p.copy_(x * (file_scale / scale) if name.endswith(B) else x)
    if rows is None:
        return
    table = class_table(model)[1]
    learning = table.rows.tolist() if isinstance(table, ClassTable) else []
    for class_name, row in zip(classes, rows):
        number = len(class_names) if class_name is None else class_names.index(class_name)
        if number not in learning:
            raise UserError(f"init_from={path!r} has learned class {class_name!r}; name it in train_classes")
        table.delta[learning.index(number)] = row.to(table.weight) - table.weight[number]


@torch.no_grad()
def apply_adapters(loaded, path: str, scale: float = 1.0) -> None:
    """Merge a file's adapters into a model from load_run, W + scale alpha / rank B A, and add its new classes."""
    origin = identity(loaded)
    tensors, classes, alpha_over_rank = read_adapters(path, origin)
    rows = []
    if loaded.num_classes:
        known = loaded.data["class_names"]
        names = known + [name for name in classes if name is not None and name not in known]
        add_classes(loaded.model, known, names[len(known) :])  # a new class starts as the base's null class
        loaded.data = loaded.data | {"class_names": names, "num_classes": len(names)}
        rows = [len(names) if name is None else names.index(name) for name in classes]
    for key, x in tensors.items():
        name = key.removeprefix(PREFIX)
        if key.endswith(A):
            weight = loaded.model.get_submodule(name.removesuffix(A)).weight
            delta = tensors[key.replace(A, B)].float() @ x.float()  # (out, in), on the CPU: in full fp32
            weight.add_(delta.to(weight.device), alpha=scale * alpha_over_rank)
        elif key.endswith(ROWS):
            table = loaded.model.get_submodule(name.removesuffix(ROWS)).weight
            table[rows] += scale * (x.to(table) - table[rows])
