"""fp8 for the four linear layers of a DiT's blocks, in training alone: forward in e4m3 x e4m3, the gradient of the
input in e5m2 x e4m3, that of the weights in bf16 (Micikevicius et al. 2022, arXiv:2209.05433).

Each tensor has one scale. A weight's is exact. Those of inputs and gradients stay from one `calibrate` to the next:
only a scale known beforehand lets Inductor cast in the kernels that write these tensors.
"""

import torch
from torch import nn

from nanodiff.common import UserError
from nanodiff.dist import from_first_rank
from nanodiff.models.build import uncompiled

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
# How far beyond the calibrated maximum a number may go before it is clamped. Gradients change faster, and e5m2 keeps
# its precision over 30 powers of two
X_HEADROOM, G_HEADROOM = 2.0, 64.0


def scale_for(largest: float | torch.Tensor, dtype, headroom: float = 1.0):
    return (largest + 1e-20) * headroom / torch.finfo(dtype).max


def to_fp8(x, scale, dtype):
    top = torch.finfo(dtype).max
    return (x.float() / scale).clamp(-top, top).to(dtype)  # overflow would be NaN in e4m3


def product(a, b, scale_a, scale_b):
    """a (M, K) b (N, K)^T -> (M, N) bf16, of fp8 numbers times their scales."""
    return torch._scaled_mm(a, b.T, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16, use_fast_accum=True)


class Product(torch.autograd.Function):
    """x (M, K), w (N, K), both bf16, and the scales of x and of the result's gradient -> x w^T (M, N)."""

    @staticmethod
    def forward(ctx, x, w, x_scale, g_scale):
        w_scale = scale_for(w.float().abs().amax(), E4M3)
        ctx.save_for_backward(x, w, g_scale, w_scale)
        return product(to_fp8(x, x_scale, E4M3), to_fp8(w, w_scale, E4M3), x_scale, w_scale)

    @staticmethod
    def backward(ctx, g):
        x, w, g_scale, w_scale = ctx.saved_tensors
        w8 = to_fp8(w.T, w_scale, E4M3).contiguous()
        return product(to_fp8(g, g_scale, E5M2), w8, g_scale, w_scale), g.T @ x, None, None


class Linear(nn.Linear):
    """In eval mode nn.Linear."""

    def forward(self, x):
        if not self.training:
            return super().forward(x)
        out = Product.apply(x.flatten(0, -2).bfloat16(), self.weight.bfloat16(), self.x_scale, self.g_scale)
        return out.unflatten(0, x.shape[:-1])


def is_fast(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def use_fp8(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Have the blocks' linear layers, except adaLN's, compute in fp8 while the model trains."""
    layers = [layer for block in model.blocks for layer in (block.qkv, block.proj, block.fc1, block.fc2)]
    learn = all(layer.weight.requires_grad and layer.in_features % 16 == 0 for layer in layers)
    if not (learn and is_fast(device) and dtype == torch.bfloat16):
        raise UserError(
            "fp8=True; accepted: on Hopper GPUs (H100) and newer, with dtype=bfloat16, where the whole model learns, "
            "at widths that are multiples of 16"
        )
    for layer in layers:
        layer.__class__ = Linear
        layer.x_scale, layer.g_scale = torch.ones(2, device=device)


IMAGES = 8  # of a calibration


def calibrate(model: nn.Module, process, autocast, batch: tuple, share: int) -> None:
    """Set the scales of inputs and gradients by a pass over a few images, eager and in bf16; a collective. So at each
    save and evaluation, which a resumed run then shares, and at first with every doubling of the steps.

    `batch`: arguments of process.losses behind the model. `share`: images of a rank in a step, over which it averages.
    """
    seen = {}  # layer -> (input, output)

    def note(layer, args, out):
        if isinstance(layer, Linear) and out.requires_grad:
            seen.setdefault(layer, (args[0], out))

    x0, t, noise, cond, draw_jumps = batch
    cond = {name: value[:IMAGES] for name, value in cond.items()}
    hook = nn.modules.module.register_module_forward_hook(note)
    model.eval()
    with uncompiled(), autocast:
        losses = process.losses(model, x0[:IMAGES], t[:IMAGES], noise[:IMAGES], cond, draw_jumps)["loss"]
        hook.remove()
        inputs, outputs = zip(*seen.values())
        gradients = torch.autograd.grad(losses.sum() / share, outputs)
    model.train()
    largest = [[x.abs().amax().item() for x in pair] for pair in zip(inputs, gradients)]
    for layer, (x, g) in zip(seen, from_first_rank(largest, "the scales of fp8")):
        layer.x_scale.fill_(scale_for(x, E4M3, X_HEADROOM))
        layer.g_scale.fill_(scale_for(g, E5M2, G_HEADROOM))
