"""LoRA: low-rank adapters (Hu et al. 2021, arXiv:2106.09685) on linear layers, and trainable rows of the class table.

A layer adds alpha / rank B A to its frozen W (out, in), and learns A (rank, in) and B (out, rank), at first 0.
"""

import torch
import torch.nn.functional as F
from torch import nn

from nanodiff.common import UserError


def adapt(layer: nn.Linear, rank: int, alpha: float, generator: torch.Generator) -> None:
    """Give the layer A and B: it returns W x + b + alpha / rank B A x."""
    n_out, n_in = layer.weight.shape
    device = layer.weight.device
    layer.lora_A = nn.Linear(n_in, rank, bias=False, device=device)
    layer.lora_B = nn.Linear(rank, n_out, bias=False, device=device)
    # Uniform within 1/sqrt(in), as in peft; drawn on the CPU, so that every device starts alike
    u = torch.rand(rank, n_in, generator=generator)
    with torch.no_grad():
        layer.lora_A.weight.copy_((2 * u - 1) * n_in**-0.5)
        layer.lora_B.weight.zero_()

    def add_update(layer, x, y):
        return y + alpha / rank * layer.lora_B(layer.lora_A(*x))

    layer.register_forward_hook(add_update)


def learn_rows(table: nn.Embedding, rows: list[int]) -> None:
    """Let `rows` (K,) of a class table (N, C) learn, as a parameter (K, C) with peft's name."""
    rows = torch.tensor(rows, device=table.weight.device)
    table.token_adapter = nn.ParameterDict({"trainable_tokens_delta": table.weight.detach()[rows]})

    def look_up(table, y, out):  # (N,) -> (N, C)
        row_values = table.token_adapter["trainable_tokens_delta"]
        return F.embedding(*y, table.weight.index_copy(0, rows, row_values))

    table.register_forward_hook(look_up)


def find_layers(model: nn.Module, targets: str) -> list[str]:
    """Linear layers whose names end in one of `targets`, as in peft: "qkv,proj", "blocks.0.ada"; or "all"."""
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    if targets == "all":
        return layers
    ends = tuple(f".{target.strip()}" for target in targets.split(","))
    for end in ends:
        if not any(f".{name}".endswith(end) for name in layers):
            last_parts = sorted({name.split(".")[-1] for name in layers})
            raise UserError(
                f"lora_targets: no linear layer is named {end[1:]!r}; accepted: all, {', '.join(last_parts)}"
            )
    return [name for name in layers if f".{name}".endswith(ends)]


def add_lora(
    model: nn.Module,
    rank: int,
    # Only lora_rank > 0
    lora_alpha: float = 0.0,  # >= 0: adapters are scaled by alpha / rank; 0 = rank
    lora_targets: str = "all",  # linear layers to adapt, by the ends of their names: qkv,proj,fc1,fc2,ada; or all
    rows: list[int] = (),
    seed: int = 0,
) -> None:
    """Freeze all but new adapters on the layers of `lora_targets` (see find_layers) and `rows` of the class table.

    At first the model's predictions do not change, bit for bit. Its state_dict holds only what learns.
    """
    generator = torch.Generator().manual_seed(seed)
    model.requires_grad_(False)
    layers = [model.get_submodule(name) for name in find_layers(model, lora_targets)]
    highest = max(min(layer.weight.shape) for layer in layers)
    if rank > highest:
        raise UserError(f"lora_rank={rank}: no matrix to adapt has a rank above {highest}; accepted: 1 to {highest}")
    for layer in layers:
        adapt(layer, rank, lora_alpha or rank, generator)
    if rows:
        learn_rows(model.get_submodule(class_table(model)), rows)
    model.register_state_dict_post_hook(drop_frozen)
    model.register_load_state_dict_pre_hook(fill_frozen)


def drop_frozen(model, state_dict, prefix, local_metadata) -> None:
    for name, p in model.named_parameters():
        if not p.requires_grad:
            del state_dict[name]


def fill_frozen(model, state_dict, *args) -> None:
    for name, p in model.named_parameters():
        if not p.requires_grad:
            state_dict[name] = p.detach()


def class_table(model: nn.Module) -> str:
    """The name of a conditional model's class table, an nn.Embedding."""
    return next(name for name, module in model.named_modules() if isinstance(module, nn.Embedding))
