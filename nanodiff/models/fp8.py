"""fp8 for the four linear layers of a DiT's blocks, in training alone: forward in e4m3 x e4m3, gradients of inputs in
e5m2 x e4m3, gradients of weights in bf16 (Micikevicius et al. 2022, arXiv:2209.05433).

Each tensor has one scale. A weight's scale is measured at every step. Those of inputs and gradients are measured by
`calibrate` alone: only with a scale known beforehand can Inductor cast in the kernels that write these tensors.
"""

import torch
from torch import nn

from nanodiff.common import UserError
from nanodiff.dist import from_first_rank
from nanodiff.models.build import uncompiled

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def scale_for(x, dtype, headroom=1.0):
    """The factor to divide x by, so that `headroom` times its largest number still fits into `dtype`."""
    return (x.abs().amax().float() + 1e-20) * headroom / torch.finfo(dtype).max


def to_fp8(x, scale, dtype):
    top = torch.finfo(dtype).max
    x = (x.float() / scale).clamp(-top, top)  # overflow would be NaN in e4m3
    return x.to(dtype).contiguous()


def product(a, a_scale, dtype, b, b_scale):
    """a (M, K) b (N, K)^T -> (M, N) bf16, with a in the fp8 `dtype` and b in e4m3."""
    a = to_fp8(a, a_scale, dtype)
    b = to_fp8(b, b_scale, E4M3)
    return torch._scaled_mm(a, b.T, scale_a=a_scale, scale_b=b_scale, out_dtype=torch.bfloat16, use_fast_accum=True)


class Product(torch.autograd.Function):
    """x (M, K), w (N, K), both bf16, and the scales of x and of the result's gradient -> x w^T (M, N)."""

    @staticmethod
    def forward(ctx, x, w, x_scale, g_scale):
        w_scale = scale_for(w, E4M3)
        ctx.save_for_backward(x, w, g_scale, w_scale)
        return product(x, x_scale, E4M3, w, w_scale)

    @staticmethod
    def backward(ctx, g):
        x, w, g_scale, w_scale = ctx.saved_tensors
        return product(g, g_scale, E5M2, w.T, w_scale), g.T @ x, None, None


class Linear(nn.Linear):
    """A linear layer in fp8; in eval mode nn.Linear, whose backward sets the scales."""

    def forward(self, x):
        if self.training:
            out = Product.apply(x.flatten(0, -2).bfloat16(), self.weight.bfloat16(), self.x_scale, self.g_scale)
            return out.unflatten(0, x.shape[:-1])
        out = super().forward(x)
        if out.requires_grad:
            out.register_hook(lambda g: self.measure(x, g))
        return out

    def measure(self, x, g):
        # Headroom, as numbers may grow until the next calibration; e5m2 keeps its precision over 30 powers of two
        self.x_scale.copy_(scale_for(x, E4M3, 2.0))
        self.g_scale.copy_(scale_for(g, E5M2, 64.0))


def is_fast(device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def use_fp8(model: nn.Module, device, dtype) -> None:
    """Have the blocks' linear layers, except adaLN's, compute in fp8 while the model trains."""
    learns = all(p.requires_grad for p in model.parameters())
    if not (learns and is_fast(device)) or dtype != torch.bfloat16 or model.config.width % 16:
        raise UserError(
            "fp8=True; accepted: on Hopper GPUs (H100) and newer, with dtype=bfloat16, where the whole model learns, "
            "at widths that are multiples of 16"
        )
    layers = [layer for block in model.blocks for layer in (block.qkv, block.proj, block.fc1, block.fc2)]
    model.scales = torch.ones(len(layers), 2, device=device)
    for layer, scales in zip(layers, model.scales):
        layer.__class__ = Linear
        layer.x_scale, layer.g_scale = scales


def calibrate(model: nn.Module, process, autocast, batch, share: int) -> None:
    """A collective: set the scales of inputs and gradients by a pass over eight images, eager and in bf16. Called at
    powers of two, at evaluations, and after saves, so that a resumed run has the same scales.

    `batch`: process.losses' arguments after the model. `share`: images per rank and step, over which the loss averages.
    """
    *tensors, cond, draw_jumps = batch
    cond = {name: value[:8] for name, value in cond.items()}
    model.eval()
    with uncompiled(), autocast:
        losses = process.losses(model, *(x[:8] for x in tensors), cond, draw_jumps)["loss"]
        torch.autograd.grad(losses.sum() / share, model.patch_embed.weight)  # through all blocks
    model.train()
    scales = from_first_rank(model.scales.tolist(), "the scales of fp8")
    model.scales.copy_(torch.tensor(scales))
