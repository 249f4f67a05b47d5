"""Ceilings of this GPU, for runs/gpu.sh: copies; bf16 matrix products and attention at the shapes of d12 and d24."""

import torch
import torch.nn.functional as F
from triton.testing import do_bench

BF16 = dict(device="cuda", dtype=torch.bfloat16)


def ms(f, *args, **more):
    return do_bench(lambda: f(*args, **more), warmup=25, rep=80, return_mode="median")


def copy_speed():
    x = torch.empty(2**30, **BF16)
    return 4 * x.numel() / ms(torch.empty_like(x).copy_, x) / 1e9


def products(depth, T):
    """qkv, proj, fc1, fc2 of all blocks: forward and both gradients."""
    C = 64 * depth
    H = 64 * round(C * 8 / 3 / 64)
    total = 0.0
    for n, k in ((3 * C, C), (C, C), (2 * H, C), (C, H)):
        x, w, g = torch.randn(T, k, **BF16), torch.randn(n, k, **BF16), torch.randn(T, n, **BF16)
        total += ms(torch.mm, x, w.T) + ms(torch.mm, g, w) + ms(torch.mm, g.T, x)
    return depth * total


def attention(depth, batch):
    q, k, v = (torch.randn(batch, depth, 256, 64, requires_grad=True, **BF16) for _ in range(3))
    out = F.scaled_dot_product_attention(q, k, v)
    g = torch.randn_like(out)
    backward = ms(torch.autograd.grad, out, (q, k, v), g, retain_graph=True)
    return depth * (ms(F.scaled_dot_product_attention, q, k, v) + backward)


print(f"figure copy TB/s: {copy_speed():.2f}", flush=True)
a, b = torch.randn(2, 8192, 8192, **BF16)
print(f"figure bf16 TFLOP/s, 8192: {2 * 8192**3 / ms(torch.mm, a, b) / 1e9:.0f}", flush=True)
for depth, batch in ((12, 256), (24, 128)):
    print(f"figure d{depth} GEMMs ms: {products(depth, 256 * batch):.1f}", flush=True)
    print(f"figure d{depth} attention ms: {attention(depth, batch):.1f}", flush=True)
