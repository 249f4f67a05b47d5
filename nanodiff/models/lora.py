"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685) on a model's linear layers, and rows of its class table.

Beside a frozen W (out, in) a layer learns alpha / rank B A, with A (rank, in) and B (out, rank), B = 0 at the start. A
class that the model lacks gets a new row in the table of classes; it starts as the null class, as no class at all.
A file of adapters is a .safetensors with the names of the peft library (github.com/huggingface/peft), so that peft's
set_peft_model_state_dict reads it. To use it is to merge it: W + scale alpha / rank B A costs nothing when sampling.
"""

import dataclasses
import hashlib
import json
import math
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

from nanodiff.common import UserError, base_dir
from nanodiff.data.dataset import Relabelled
from nanodiff.safetensors import load_safetensors, save_safetensors

PREFIX = "base_model.model."  # peft's names: this, the module's, and one of these three
A, B, ROWS = ".lora_A.weight", ".lora_B.weight", ".token_adapter.trainable_tokens_delta"
METADATA = ("rank", "alpha", "targets", "classes", "base", "base_sha256", "sha256")


class LoRALinear(nn.Linear):
    """W x + b + alpha / rank B A x. W and b are those of the layer that it replaces, under their old names."""

    def __init__(self, layer: nn.Linear, rank: int, alpha: float, generator: torch.Generator):
        n_in, n_out, device = layer.in_features, layer.out_features, layer.weight.device
        super().__init__(n_in, n_out, layer.bias is not None, device="meta")
        self.weight, self.bias, self.lora_scale = layer.weight, layer.bias, alpha / rank
        self.lora_A = nn.Linear(n_in, rank, bias=False, device=device)
        self.lora_B = nn.Linear(rank, n_out, bias=False, device=device)
        with torch.no_grad():  # uniform within 1/sqrt(in), as in peft; drawn on the CPU, the same for every device
            self.lora_A.weight.copy_((2 * torch.rand(rank, n_in, generator=generator) - 1) * n_in**-0.5)
            self.lora_B.weight.zero_()

    def forward(self, x):  # (..., in) -> (..., out)
        return super().forward(x) + self.lora_scale * self.lora_B(self.lora_A(x))


class ClassTable(nn.Embedding):
    """A table of classes (N, C) of which some rows learn: `delta` (K, C) is added to `rows` (K,)."""

    def __init__(self, table: nn.Embedding, rows: list[int]):
        super().__init__(*table.weight.shape, device="meta")
        self.weight, device = table.weight, table.weight.device
        self.register_buffer("rows", torch.tensor(rows, device=device), persistent=False)
        self.delta = nn.Parameter(torch.zeros(len(rows), table.embedding_dim, device=device))

    def forward(self, y):  # (N,) -> (N, C)
        return F.embedding(y, self.weight.index_add(0, self.rows, self.delta))


def find_layers(model: nn.Module, targets: str) -> list[str]:
    """Names of the linear layers whose name ends in one of `targets`, comma-separated, as with peft; "all" = all.

    "qkv,proj" are a DiT's attention, "fc1,fc2" its MLPs, "blocks.0.ada" is one layer. UserError for what names none.
    """
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if targets == "all":
        return layers
    wanted = [target.strip() for target in targets.split(",")]
    for target in wanted:
        if not target or not any(f".{name}".endswith(f".{target}") for name in layers):
            parts = [name.split(".") for name in layers]
            ends = sorted({".".join(part[-2 if part[-1].isdigit() else -1 :]) for part in parts})
            raise UserError(
                f"targets={targets!r}: no linear layer is named {target!r}; accepted: all, {', '.join(ends)}"
            )
    return [name for name in layers if any(f".{name}".endswith(f".{target}") for target in wanted)]


def add_lora(model: nn.Module, rank: int, alpha: float, targets: str, rows: list[int] = (), seed: int = 0) -> None:
    """Freeze the model but for adapters on the layers of `targets` (see find_layers) and `rows` of its class table.

    Its predictions stay what they were, bit for bit; dropout is off. Call it before make_optimizer and torch.compile.
    Raises UserError.
    """
    generator = torch.Generator().manual_seed(seed)
    layers = find_layers(model, targets)
    model.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    for name in layers:
        model.set_submodule(name, LoRALinear(model.get_submodule(name), rank, alpha, generator))
    if rows:
        name, table = class_table(model)
        model.set_submodule(name, ClassTable(table, list(rows)))


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that learn, by the model's own names."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


# ---------------------------------------------------------------------------------------------------------------------
# Classes


def class_table(model: nn.Module) -> tuple[str, nn.Embedding]:
    """Name and module of a conditional model's table of classes."""
    return next((name, module) for name, module in model.named_modules() if isinstance(module, nn.Embedding))


def add_classes(model: nn.Module, count: int) -> None:
    """`count` more classes, which start as the null class, or where there is none as the mean of all classes.

    They come after the model's own; the null class stays the last row, so its number grows.
    """
    if not count:
        return
    name, table = class_table(model)
    classes, null = table.weight.detach().split([n := model.config.num_classes, len(table.weight) - n])
    start = null if len(null) else classes.mean(0, keepdim=True)
    weight = torch.cat([classes, start.expand(count, -1), null])
    model.set_submodule(name, nn.Embedding.from_pretrained(weight))
    model.config = dataclasses.replace(model.config, num_classes=n + count)


def match_classes(loaded, dataset, train_classes: str = "new"):
    """Match the classes of a data set with a model's, by name, and add to the model those that it lacks.

    Returns the set with the model's numbers for labels, the names of the model's classes, and the rows to train, of
    `train_classes`: "new" = those that the model lacked, "all" = all in the set and the null class, "none", or names,
    comma-separated. An unlabelled set is of the null class; a model without classes ignores labels. Raises UserError.
    """
    known = list(loaded.data["class_names"]) if loaded.num_classes else []
    if not known:
        return dataset, [], []
    new = [name for name in dataset.class_names if name not in known]
    names = known + new
    null = [len(names)] if len(class_table(loaded.model)[1].weight) > len(known) else []
    if not (dataset.num_classes or null):
        raise UserError(f"data={dataset.name!r} has no labels, and {loaded.source} has no null class")
    if new and train_classes == "none":
        raise UserError(f"train_classes=none, but {loaded.source} lacks class {new[0]!r} of {dataset.name!r}")
    numbers = [names.index(name) for name in dataset.class_names] or null
    chosen = {"new": new, "all": dataset.class_names, "none": []}.get(train_classes, train_classes.split(","))
    for name in chosen:
        if name not in names:
            raise UserError(f"train_classes: no class {name!r}; accepted: new, all, none, {', '.join(names[:100])}")
    rows = sorted({names.index(name) for name in chosen}) + (null if train_classes == "all" else [])
    add_classes(loaded.model, len(new))
    return Relabelled(dataset, numbers), names, rows


# ---------------------------------------------------------------------------------------------------------------------
# Files


def fingerprint(tensors: dict[str, torch.Tensor]) -> str:
    """SHA-256 of names, shapes, dtypes and values: the same weights have the same, in whatever file they came."""
    digest = hashlib.sha256()
    for name, x in sorted(tensors.items()):
        digest.update(f"{name} {tuple(x.shape)} {x.dtype}\n".encode())
        digest.update(x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def save_adapters(path: Path, model: nn.Module, rank: int, alpha: float, targets: str, classes: list, origin: dict):
    """Write what add_lora made of a model. `classes`: names of the trained rows, None = the null class; `origin`:
    identity() of the base. UserError where it cannot be written."""
    tensors = {}
    for name, module in model.named_modules():
        if isinstance(module, LoRALinear):
            tensors |= {PREFIX + name + A: module.lora_A.weight, PREFIX + name + B: module.lora_B.weight}
        elif isinstance(module, ClassTable):  # the rows themselves, as peft has it
            tensors[PREFIX + name + ROWS] = (module.weight[module.rows] + module.delta).detach()
    metadata = dict(format="pt", rank=str(rank), alpha=str(alpha), targets=targets, classes=json.dumps(classes))
    metadata |= dict(base=origin["name"], base_sha256=origin["sha256"], sha256=fingerprint(tensors))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_safetensors(tensors, path, metadata)
    except OSError as e:
        raise UserError(f"cannot write {path}: {e.strerror}") from e


def read_adapters(path: str) -> tuple[dict[str, torch.Tensor], dict]:
    """(tensors by peft's names, metadata: rank and alpha as numbers, classes as a list). UserError if it is no such."""
    tensors, info = load_safetensors(path)
    for key in METADATA:
        if key not in info:
            raise UserError(f"{path} was not made by lora_train: its metadata lack {key!r}")
    try:
        info |= dict(rank=int(info["rank"]), alpha=float(info["alpha"]), classes=json.loads(info["classes"]))
        if info["rank"] < 1 or not math.isfinite(info["alpha"]) or not isinstance(info["classes"], list):
            raise ValueError
        if not all(name is None or (isinstance(name, str) and name.isprintable()) for name in info["classes"]):
            raise ValueError
    except (ValueError, RecursionError):
        raise UserError(f"{path}: rank, alpha or classes in its metadata cannot be read") from None
    if fingerprint(tensors) != info["sha256"]:
        raise UserError(f"{path} is damaged: its tensors do not have the SHA-256 in its metadata")
    return tensors, info


@torch.no_grad()
def apply_adapters(loaded, lora: str, lora_scale: str = "1") -> None:
    """Merge files of adapters into a model from loading.load_run, and their new classes into its `data`.

    `lora`: paths, comma-separated; `lora_scale`: a number for each, or one for all; 0 = the base. Several add up; the
    rows of a class, too. Raises UserError, before a weight is changed, for a file that is damaged or of another base.
    """
    paths = [path.strip() for path in lora.split(",") if path.strip()]
    if not paths:
        return
    try:
        scales = [float(scale) for scale in lora_scale.split(",")]
        scales *= len(paths) if len(scales) == 1 else 1
        if len(scales) != len(paths) or not all(map(math.isfinite, scales)):
            raise ValueError
    except ValueError:
        raise UserError(
            f"lora_scale={lora_scale!r}; accepted: a number, or {len(paths)} of them, comma-separated"
        ) from None
    model, ours = loaded.model, identity(loaded)
    files = [read_adapters(path) for path in paths]
    for path, (tensors, info) in zip(paths, files):
        if info["base_sha256"] != ours["sha256"]:
            raise UserError(f"{path} is for other weights, those of {info['base']}, not for {ours['name']}")
        check_fit(path, tensors, info, model)

    names = list(loaded.data["class_names"]) if loaded.num_classes else []
    added = dict.fromkeys(name for _, info in files for name in info["classes"] if name not in (None, *names))
    add_classes(model, len(added))
    names += added
    if names:
        loaded.data = loaded.data | {"class_names": names, "num_classes": len(names)}
        table = class_table(model)[1].weight
        original = table.clone()  # the base's rows, and the null class's for new classes
    for (tensors, info), scale in zip(files, scales):
        for key, x in tensors.items():
            if key.endswith(A):
                weight = model.get_submodule(key.removeprefix(PREFIX).removesuffix(A)).weight
                delta = tensors[key.replace(A, B)].float() @ x.float()  # (out, in), on the CPU: in full fp32
                weight.add_(delta.to(weight.device), alpha=scale * info["alpha"] / info["rank"])
            elif key.endswith(ROWS):
                rows = [len(names) if name is None else names.index(name) for name in info["classes"]]
                table[rows] += scale * (x.to(table) - original[rows])


def check_fit(path: str, tensors: dict, info: dict, model: nn.Module) -> None:
    """UserError unless every tensor of a file has its place in the model and the shape for it."""
    for key, x in tensors.items():
        suffix = next((suffix for suffix in (A, B, ROWS) if key.endswith(suffix)), "")
        try:
            layer = model.get_submodule(key.removeprefix(PREFIX).removesuffix(suffix))
        except AttributeError:
            layer = None
        if suffix == ROWS and isinstance(layer, nn.Embedding):
            wanted = (len(info["classes"]), layer.embedding_dim)
        elif suffix in (A, B) and isinstance(layer, nn.Linear) and {key.replace(B, A), key.replace(A, B)} <= {*tensors}:
            wanted = (info["rank"], layer.in_features) if suffix == A else (layer.out_features, info["rank"])
        else:
            raise UserError(f"{path}: {key!r} fits nothing in this model")
        if x.shape != wanted:
            raise UserError(f"{path}: {key!r} has shape {tuple(x.shape)}, the model wants {wanted}")


def identity(loaded) -> dict:
    """Which weights a model from loading.load_run has: `base`, the arguments that load them again, by the run's tag so
    that the folder of all runs may move; `name`, for a person; `sha256`."""
    sha256, path = fingerprint(loaded.model.state_dict()), (loaded.run_dir or Path(loaded.source)).absolute()
    if loaded.run_dir is None:
        return dict(base=dict(run=str(path)), name=path.name, sha256=sha256)
    run = path.name if path.parent == (base_dir() / "runs").absolute() else str(path)
    name = f"{path.name} at step {loaded.step} ({loaded.weights})"
    return dict(base=dict(run=run, step=loaded.step, ema=loaded.weights), name=name, sha256=sha256)
