"""fp8 for the four linear layers of a DiT's blocks, only in training: forward in e4m3 x e4m3, gradients of inputs in
e5m2 x e4m3, gradients of weights in bf16 (Micikevicius et al. 2022, arXiv:2209.05433).

Each tensor has one scale. A weight's scale is measured at every step. Those of inputs and gradients are measured by
`calibrate` alone: only with a scale known beforehand can Inductor cast in the kernels that write these tensors.
Only attention's output, which no kernel of Inductor writes, and the weights are cast in passes of their own: 1.1 and
1.2 of 162 ms of kernels at d12 on an H200. fc2's gradient is computed twice from the block's, once in fp8 and once in
bf16: no more traffic than one kernel for both.
"""

import torch
from torch import nn

from nanodiff.common import UserError
from nanodiff.dist import from_first_rank
from nanodiff.models.build import uncompiled
from nanodiff.models.dit import split_qkv

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2


def scale_for(x, dtype, headroom=1.0):
    """The factor to divide x by, so that `headroom` times its largest number still fits into `dtype`."""
    largest = x.abs().amax().float() + 1e-20
    return largest * headroom / torch.finfo(dtype).max


def to_fp8(x, scale, dtype):
    top = torch.finfo(dtype).max
    x = (x.float() / scale).clamp(-top, top)  # overflow would be NaN in e4m3
    return x.to(dtype).contiguous()


def product(a, a_scale, b, b_scale):
    """a (..., K) b (N, K)^T -> (..., N) bf16; a comes in fp8, divided by its scale, and b is cast to e4m3 here."""
    b = to_fp8(b, b_scale, E4M3)
    out = torch._scaled_mm(
        a.flatten(0, -2),
        b.T,
        a_scale,
        b_scale,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )
    return out.unflatten(0, a.shape[:-1])


class Product(torch.autograd.Function):
    """x (B, T, K), w (N, K), both bf16, and the scales of x and of the result's gradient -> x w^T (B, T, N), split by
    split_qkv if `heads`.

    With a split outside, the gradient would be a cat of q and k's, which a reduction computes, and of v's. Inductor
    fuses nothing with such a cat: the cast would read all of it again, 302 MB per block at d12 with 256 images.
    """

    @staticmethod
    def forward(ctx, x, w, x_scale, g_scale, heads):
        w_scale = scale_for(w, E4M3)
        ctx.save_for_backward(x, w, g_scale, w_scale)
        out = product(to_fp8(x, x_scale, E4M3), x_scale, w, w_scale)
        return split_qkv(out, heads) if heads else out

    @staticmethod
    def backward(ctx, *parts):
        x, w, g_scale, w_scale = ctx.saved_tensors
        # In this order: once the parts have a place in g, Inductor casts them in another pass
        parts8 = [to_fp8(part, g_scale, E5M2) for part in parts]
        g8 = torch.cat(parts8, 2).flatten(2)
        g = torch.cat(parts, 2).flatten(2)
        x_grad = product(g8, g_scale, w.T, w_scale)
        w_grad = g.flatten(0, 1).T @ x.flatten(0, 1)
        return x_grad, w_grad, None, None, None


class Linear(nn.Linear):
    """A linear layer in fp8; in eval mode nn.Linear, whose backward sets the scales."""

    heads = 0

    def forward(self, x):
        if self.training:
            w = self.weight.bfloat16()
            return Product.apply(x.bfloat16(), w, self.x_scale, self.g_scale, self.heads)
        out = super().forward(x)

        def measure(g):
            # Headroom, as numbers may grow until the next calibration; e5m2 keeps its precision over 30 powers of two
            self.x_scale.copy_(scale_for(x, E4M3, 2.0))
            self.g_scale.copy_(scale_for(g, E5M2, 64.0))

        if out.requires_grad:
            out.register_hook(measure)
        return out


def is_fast(device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def use_fp8(model: nn.Module, device, dtype) -> None:
    """Have the blocks' linear layers, except adaLN's, compute in fp8 while the model trains."""
    learns = all(p.requires_grad for p in model.parameters())
    if not (learns and is_fast(device)) or dtype != torch.bfloat16 or model.config.width % 16:
        raise UserError(
            "fp8=True needs a Hopper GPU (H100) or newer, dtype=bfloat16, no frozen weights and a width that is a "
            "multiple of 16; accepted: False"
        )
    # A step of 16 bytes from scale to scale: else cuBLAS refuses them
    spaced = torch.ones(len(model.blocks), 4, 2, 4, device=device)
    model.scales = spaced[..., 0]  # (blocks, layers, 2)
    for block, scales in zip(model.blocks, model.scales):
        layers = (block.qkv, block.proj, block.fc1, block.fc2)
        for layer, pair in zip(layers, scales):
            layer.__class__ = Linear
            layer.x_scale, layer.g_scale = pair
        block.qkv.heads = block.heads


def calibrate(model: nn.Module, process, autocast, batch, share: int) -> None:
    """A collective: set the scales of inputs and gradients by a pass over eight images, eager and in bf16. Called at
    powers of two, at evaluations, and after saves, so that a resumed run has the same scales.

    `batch`: process.losses' arguments after the model. `share`: images per rank and step, over which the loss averages.
    """
    *tensors, cond, training = batch
    cond = {name: value[:8] for name, value in cond.items()}
    model.eval()
    with uncompiled(), autocast:
        few = [x[:8] for x in tensors]
        losses = process.losses(model, *few, cond, training)["loss"]
        torch.autograd.grad(losses.sum() / share, model.patch_embed.weight)  # through all blocks
    model.train()
    model.scales.copy_(from_first_rank(model.scales.cpu(), "the scales of fp8"))
