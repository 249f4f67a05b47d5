"""LoRA adapters: written by base_train, merged into their base's weights when read.

The file is a .safetensors with the names of peft (github.com/huggingface/peft), whose set_peft_model_state_dict reads
it. Like our other files of weights it describes itself; `lora` in its metadata names the base.
"""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from nanodiff.common import Tensors, UserError, base_dir
from nanodiff.safetensors import described, fingerprint, save_safetensors

# peft's names: prefix, module, suffix
PREFIX = "base_model.model."
A = ".lora_A.weight"
B = ".lora_B.weight"
ROWS = ".token_adapter.trainable_tokens_delta"


def identity(base_model) -> dict:
    """Identify loaded weights: `base`, an argument for load_run, and `sha256`."""
    path = (base_model.run_dir or Path(base_model.source)).absolute()
    base = str(path)
    if base_model.run_dir:
        run = path.name if path.parent.resolve() == (base_dir() / "runs").resolve() else path  # a tag survives a move
        base = f"{run},step={base_model.step},ema={base_model.weights}"
    return {"base": base, "sha256": fingerprint(base_model.model.state_dict())}


def save_adapters(run_dir: Path, meta: dict, tensors: Tensors) -> None:
    """Write adapters/step_000500.safetensors from a checkpoint's meta and tensors: the first average, else the raw."""
    ema = str(next(iter(meta["ema_rates"]), "raw"))
    tensors = tensors["model" if ema == "raw" else f"ema_{ema}"]
    path = run_dir / "adapters" / f"step_{meta['step']:06d}.safetensors"
    path.parent.mkdir(exist_ok=True)
    meta = meta | {"ema": ema, "sha256": fingerprint(tensors)}
    save_safetensors({PREFIX + name: x for name, x in tensors.items()}, path, described(meta))


def class_rows(
    table: Tensor,
    table_names: list[str],
    class_names: list[str],
    num_rows: int,
) -> Tensor:
    """A class table (num_rows, C) for `class_names`, with rows taken from the `table` of the classes `table_names`.

    New classes, and the null class in the last row, start as the table's null class; without one, as its mean.
    """
    classes, null = table.tensor_split([len(table_names)])  # null: 1 row or none
    rows = [null[0] if len(null) else classes.mean(0)] * num_rows
    for i, name in enumerate(class_names):
        if name in table_names:
            rows[i] = classes[table_names.index(name)]
    return torch.stack(rows)


def merge(
    base: dict,
    tensors: Tensors,
    adapters: dict,
    adapter_tensors: Tensors,
    scale: float,
) -> tuple[dict, Tensors]:
    """Merge adapters (their meta, tensors by our names) into a base -> (meta, tensors). Weights become W + scale
    alpha / rank B A. The adapters' new classes are added: see class_rows."""
    lora = adapters["lora"]
    if lora["sha256"] != fingerprint(tensors):
        raise UserError(
            f"{adapters['source']} has adapters for other weights: {lora['base']} as it was, not {base['source']}"
        )
    tensors = dict(tensors)
    base_names = base["data"].class_names[: base["model_config"].num_classes]
    names = list(dict.fromkeys(base_names + lora["classes"]))
    for name, x in adapter_tensors.items():
        if name.endswith(A):
            weight = name.removesuffix(A) + ".weight"
            delta = adapter_tensors[name.replace(A, B)].float() @ x.float()  # (out, in), on the CPU: in full fp32
            alpha = scale * lora["alpha"] / lora["rank"]
            tensors[weight] = tensors[weight].add(delta, alpha=alpha)
        elif name.endswith(ROWS):
            weight = name.removesuffix(ROWS) + ".weight"
            table = class_rows(tensors[weight], base_names, names, len(tensors[weight]) + len(names) - len(base_names))
            rows = [names.index(class_name) for class_name in lora["classes"]]
            table[rows] += scale * (x - table[rows])
            tensors[weight] = table
    num_classes = len(names)
    data = base["data"]
    if base_names:
        data = replace(data, class_names=names, num_classes=num_classes)
    model_config = replace(base["model_config"], num_classes=num_classes)
    return base | {"data": data, "model_config": model_config}, tensors
