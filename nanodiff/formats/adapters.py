"""LoRA adapters: written by base_train, merged into their base's weights on loading.

A .safetensors with peft's names (github.com/huggingface/peft): its set_peft_model_state_dict reads it. Its metadata are
a checkpoint's meta, in which `lora` says on which base.
"""

import hashlib
import json
from pathlib import Path

import torch

from nanodiff.common import UserError, base_dir
from nanodiff.models.lora import add_classes
from nanodiff.safetensors import save_safetensors

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
    """Identify load_run's weights: `base` (its argument), `name` and `sha256`."""
    sha256 = fingerprint(loaded.model.state_dict())
    path = (loaded.run_dir or Path(loaded.source)).absolute()
    if loaded.run_dir is None:
        return {"base": str(path), "name": path.name, "sha256": sha256}
    run = str(path)
    if path.parent == (base_dir() / "runs").absolute():
        run = path.name  # a tag survives a move
    name = f"{path.name} at step {loaded.step} ({loaded.weights})"
    return {"base": f"{run},step={loaded.step},ema={loaded.weights}", "name": name, "sha256": sha256}


def check_base(lora: dict, origin: dict, source) -> None:
    """Raise UserError unless the adapters of `source` were trained on the weights `origin`."""
    if lora["sha256"] != origin["sha256"]:
        theirs, ours = f"{lora['name']} ({lora['sha256'][:16]}...)", f"{origin['name']} ({origin['sha256'][:16]}...)"
        raise UserError(f"{source} holds adapters for other weights: {theirs}, not {ours}")


def save_adapters(run_dir: Path, meta: dict, tensors: dict) -> None:
    """Write adapters/step_000500.safetensors, from a checkpoint's meta and tensors: the first average, if any."""
    ema = str(next(iter(meta["ema_rates"]), "raw"))
    named = {PREFIX + name: x for name, x in tensors["model" if ema == "raw" else f"ema_{ema}"].items()}
    told = {key: meta[key] for key in ("step", "arch", "config", "model_config", "data", "lora")} | {"ema": ema}
    told["sha256"] = fingerprint(named)  # no loop: see is_adapter_file
    path = run_dir / "adapters" / f"step_{meta['step']:06d}.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    save_safetensors(named, path, {"format": "pt"} | {key: json.dumps(value) for key, value in told.items()})


@torch.no_grad()
def merge(loaded, lora: dict, tensors: dict, scale: float = 1.0) -> None:
    """Merge adapters (tensors by our names) into a model from load_run, W + scale alpha / rank B A, with its new
    classes."""
    rows = []
    if loaded.num_classes:
        known = loaded.class_names
        new = [name for name in lora["classes"] if name not in known]
        add_classes(loaded.model, known, new)  # a new class starts as the base's null class
        loaded.data = loaded.data | {"class_names": known + new, "num_classes": len(known + new)}
        rows = [(known + new).index(name) for name in lora["classes"]]
    for name, x in tensors.items():
        if name.endswith(A):
            weight = loaded.model.get_submodule(name.removesuffix(A)).weight
            delta = tensors[name.replace(A, B)].float() @ x.float()  # (out, in), on the CPU: in full fp32
            weight.add_(delta.to(weight.device), alpha=scale * lora["alpha"] / lora["rank"])
        elif name.endswith(ROWS):
            table = loaded.model.get_submodule(name.removesuffix(ROWS)).weight
            table[rows] += scale * (x.to(table) - table[rows])
