"""DiT: the diffusion transformer (Peebles & Xie 2023, arXiv:2212.09748), published ("classic") and modern."""

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from nanodiff.common import UserError

T_EMBED_DIM = 256  # sinusoids that a timestep is turned into, cosines first


@dataclass(frozen=True)
class DiTConfig:
    """Shape of a DiT. The class table has num_classes + 1 rows, the last for the null class; num_classes=0: no table.

    block="modern": RMSNorm, qk-norm, axial 2-D RoPE beside the fixed table of positions, SwiGLU, no biases in attention
    and MLP. block="classic": the published DiT, arithmetic and (after `from_meta`) weights.
    """

    image_size: int  # pixels (or latent pixels) on a side; images are square
    in_channels: int
    out_channels: int  # 2 * in_channels where the variance is learned
    patch_size: int
    width: int
    depth: int
    heads: int
    num_classes: int
    block: str = "modern"
    mlp_ratio: float = 4.0  # hidden / width; the modern MLP has 2/3 of it, since it has three matrices
    low_res: int = 0  # super-resolution: side of the low-resolution image that is concatenated to x_t; 0 = off
    checkpointing: bool = False  # recompute each block in backward: less memory, a third more compute

    def __post_init__(self):
        if self.block not in BLOCKS:
            raise UserError(f"block={self.block!r} is not known; accepted: {', '.join(BLOCKS)}")
        if self.patch_size < 1 or self.image_size % self.patch_size:
            sizes = [p for p in range(1, self.image_size + 1) if self.image_size % p == 0]
            raise UserError(f"patch_size={self.patch_size} for image_size={self.image_size}; accepted: {sizes}")
        if min(self.depth, self.heads) < 1 or self.width % (4 * self.heads):
            raise UserError(f"depth={self.depth}, width={self.width}; accepted: > 0; a multiple of {4 * self.heads}")

    @classmethod
    def from_depth(
        cls, depth, image_size, in_channels, out_channels, num_classes, patch_size=0, width=0, heads=0, **kwargs
    ):
        """The one dial: width = 64 * depth, a head per 64 of width. d12 is DiT-B's shape. 0 stands for these.

        patch_size 0 chooses about 256 tokens: 32 px -> 2, 64 px -> 4, 256 px -> 16; never below 2 (16 px -> 64 tokens).
        """
        patch_size = patch_size or max(2, image_size // 16)
        width = width or 64 * depth
        heads = heads or max(1, width // 64)
        return cls(image_size, in_channels, out_channels, patch_size, width, depth, heads, num_classes, **kwargs)

    @property
    def num_tokens(self) -> int:
        """Tokens per image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def mlp_hidden(self) -> int:
        if self.block == "classic":
            return int(self.width * self.mlp_ratio)
        return max(64, 64 * round(self.width * self.mlp_ratio * 2 / 3 / 64))


# ---------------------------------------------------------------------------------------------------------------------
# Where and when: tables and embeddings


def sincos_table(config: DiTConfig) -> torch.Tensor:
    """(T, C) fp32, the fixed embedding of the published DiT: first half of C for the column, second for the row."""
    grid, dim = config.image_size // config.patch_size, config.width // 4
    omega = 10000.0 ** -(np.arange(dim) / dim)
    angles = np.outer(np.arange(grid), omega)  # (grid, C/4), in float64 as published
    line = np.concatenate([np.sin(angles), np.cos(angles)], axis=1)  # (grid, C/2)
    rows, cols = np.divmod(np.arange(grid * grid), grid)
    return torch.from_numpy(np.concatenate([line[cols], line[rows]], axis=1).astype(np.float32))


def rope_table(config: DiTConfig) -> torch.Tensor:
    """(2, T, 1, 1, head_dim/2) fp32, cos and sin of axial RoPE: half the angles from the row, half from the column.

    Base 100 rather than 10000, since a grid has tens of positions, not thousands (Heo et al. 2024, arXiv:2403.13298).
    """
    grid, dim = config.image_size // config.patch_size, config.width // config.heads // 4
    omega = 100.0 ** -(np.arange(dim) / dim)
    rows, cols = np.divmod(np.arange(grid * grid), grid)
    angles = np.concatenate([np.outer(rows, omega), np.outer(cols, omega)], axis=1)  # (T, head_dim/2)
    return torch.from_numpy(np.stack([np.cos(angles), np.sin(angles)])[:, :, None, None].astype(np.float32))


def timestep_embedding(t: torch.Tensor, dim: int = T_EMBED_DIM, max_period: float = 10000.0) -> torch.Tensor:
    """t (N,) in [0, 1000] -> (N, dim) fp32: cosines, then sines, of geometrically spaced frequencies."""
    freqs = torch.exp(-math.log(max_period) / (dim // 2) * torch.arange(dim // 2, dtype=torch.float32, device=t.device))
    angles = t.float()[:, None] * freqs  # fp32: bf16 has no bits left for the fraction of t = 999.5
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


# ---------------------------------------------------------------------------------------------------------------------
# Blocks


def rms_norm(x):
    return F.rms_norm(x, (x.size(-1),), eps=1e-6)


def layer_norm(x):
    return F.layer_norm(x, (x.size(-1),), eps=1e-6)


def attention(q, k, v):
    """softmax(q k^T / sqrt(head_dim)) v; each (N, heads, T, head_dim)."""
    if q.device.type == "cpu" and q.dtype == torch.bfloat16 and q.size(2) <= 256:
        # The fused CPU kernel gains nothing from bf16. Compiled step of a modern d4, CPU time on one Zen 5 core: 132 ms
        # for 186 ms at 64 tokens (batch 32), 317 for 438 at 256 (batch 16). Beyond, memory counts.
        weights = torch.softmax(q @ k.mT * q.size(-1) ** -0.5, dim=-1, dtype=torch.float32)  # (N, heads, T, T)
        return weights.to(v.dtype) @ v
    return F.scaled_dot_product_attention(q, k, v)


def modulate(x, shift, scale):
    return x * (1 + scale) + shift  # x (N, T, C); shift, scale (N, 1, C): once per image


class Block(nn.Module):
    """Attention and MLP, each behind adaLN-Zero: normalise, shift and scale by c, gate into the residual stream."""

    def __init__(self, config: DiTConfig, bias: bool, mlp_inputs: int):
        super().__init__()
        C, hidden = config.width, config.mlp_hidden
        self.heads = config.heads
        self.qkv = nn.Linear(C, 3 * C, bias=bias)
        self.proj = nn.Linear(C, C, bias=bias)
        self.fc1 = nn.Linear(C, mlp_inputs * hidden, bias=bias)
        self.fc2 = nn.Linear(hidden, C, bias=bias)
        self.ada = nn.Linear(C, 6 * C)

    def forward(self, x, c, rotation):
        # x (N, T, C) is fp32 under autocast too; .float() since 1 + scale in bf16 would round scale to 1/128
        shift1, scale1, gate1, shift2, scale2, gate2 = self.ada(c).float().unsqueeze(1).chunk(6, dim=-1)  # (N, 1, C)
        x = x + gate1 * self.attention(modulate(self.norm(x), shift1, scale1), rotation)
        return x + gate2 * self.mlp(modulate(self.norm(x), shift2, scale2))

    def attention(self, x, rotation):
        N, T, C = x.shape
        qkv = self.qkv(x).view(N, T, 3, self.heads, C // self.heads)  # (N, T, 3, heads, head_dim)
        q, k, v = (u.transpose(1, 2) for u in self.rotate(qkv, rotation))  # (N, heads, T, head_dim)
        return self.proj(attention(q, k, v).transpose(1, 2).reshape(N, T, C))


class ClassicBlock(Block):
    """The published block: LayerNorm, biases, GELU MLP; where a token is, it knows from the table added to it alone."""

    norm = staticmethod(layer_norm)

    def __init__(self, config: DiTConfig):
        super().__init__(config, bias=True, mlp_inputs=1)

    def rotate(self, qkv, rotation):
        return qkv.unbind(2)

    def mlp(self, x):
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class ModernBlock(Block):
    """RMSNorm, qk-norm (Henry et al. 2020), RoPE (Su et al. 2021), SwiGLU (Shazeer 2020), no biases but adaLN's.

    RoPE tells how far apart two tokens are; where sky and ground are is told by the table, which stays.
    """

    norm = staticmethod(rms_norm)

    def __init__(self, config: DiTConfig):
        super().__init__(config, bias=False, mlp_inputs=2)  # fc1 = gate and up in one matrix

    def rotate(self, qkv, rotation):
        cos, sin = rotation  # (T, 1, 1, head_dim/2)
        a, b = rms_norm(qkv[:, :, :2].float()).chunk(2, dim=-1)  # q and k at once: (N, T, 2, heads, head_dim/2)
        qk = torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(qkv.dtype)
        return *qk.unbind(2), qkv[:, :, 2]

    def mlp(self, x):
        gate, up = self.fc1(x).chunk(2, dim=-1)
        return self.fc2(F.silu(gate) * up)


class Final(nn.Module):
    def __init__(self, config: DiTConfig):
        super().__init__()
        self.linear = nn.Linear(config.width, config.patch_size**2 * config.out_channels)
        self.ada = nn.Linear(config.width, 2 * config.width)

    def forward(self, x, c, norm):
        shift, scale = self.ada(c).float().unsqueeze(1).chunk(2, dim=-1)  # (N, 1, C)
        return self.linear(modulate(norm(x), shift, scale))  # (N, T, p*p*out)


BLOCKS = {"modern": ModernBlock, "classic": ClassicBlock}


class DiT(nn.Module):
    """`model(x_t, t, y, low_res) -> prediction`. Build it (on "meta", then `.to_empty`), then call `init_weights`."""

    def __init__(self, config: DiTConfig):
        super().__init__()
        self.config = config
        C, channels = config.width, config.in_channels * (2 if config.low_res else 1)
        self.patch_embed = nn.Linear(channels * config.patch_size**2, C)
        self.t_embed = nn.Sequential(nn.Linear(T_EMBED_DIM, C), nn.SiLU(), nn.Linear(C, C))
        # nn.Embedding would draw its table, for which torch on "meta" imports its compiler: 2 s of every start
        table = torch.empty(config.num_classes + 1, C)
        self.y_embed = nn.Embedding.from_pretrained(table, freeze=False) if config.num_classes else None
        self.blocks = nn.ModuleList(BLOCKS[config.block](config) for _ in range(config.depth))
        self.final = Final(config)
        self.register_buffer("position", sincos_table(config), persistent=False)  # made by numpy: real on "meta", too
        self.register_buffer("rotation", rope_table(config), persistent=False)

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Published init, drawn on the CPU (generator on the CPU), so that every device starts from the same weights.

        Xavier-uniform matrices, N(0, 0.02) embeddings, zero biases; adaLN and the last layer start at zero, so that
        each block starts as the identity (adaLN-Zero) and the prediction as 0.
        """
        for name, p in self.named_parameters():
            w = torch.zeros(p.shape, device="cpu")
            if "embed" in name and "patch" not in name and p.ndim > 1:
                w.normal_(std=0.02, generator=generator)
            elif p.ndim > 1 and "ada" not in name and "final" not in name:
                nn.init.xavier_uniform_(w, generator=generator)
            p.copy_(w)
        self.position.copy_(sincos_table(self.config))
        self.rotation.copy_(rope_table(self.config))

    def forward(self, x_t, t, y=None, low_res=None):
        """x_t (N, C, H, W), t (N,) float in [0, 1000], y (N,) int64, low_res (N, C, h, w) -> (N, out_channels, H, W).

        Labels run from 0 to num_classes, the null class. Raises UserError when a needed y or low_res is not given.
        """
        cfg, p = self.config, self.config.patch_size
        N, grid = x_t.size(0), cfg.image_size // p
        if cfg.low_res:
            if low_res is None:
                raise UserError("low_res=None; accepted: (N, C, h, w), as this model was built for super-resolution")
            x_t = torch.cat([x_t, F.interpolate(low_res, x_t.shape[-2:], mode="bilinear")], dim=1)  # (N, 2C, H, W)
        x = x_t.view(N, -1, grid, p, grid, p).permute(0, 2, 4, 1, 3, 5)  # (N, row, col, C, p, p)
        x = self.patch_embed(x.reshape(N, cfg.num_tokens, -1)).float() + self.position  # (N, T, C): the residual stream

        c = self.t_embed(timestep_embedding(t))  # (N, width)
        if self.y_embed is not None:
            if y is None:
                raise UserError(f"y=None; accepted: (N,) labels from 0 to {cfg.num_classes} (the null class)")
            c = c + self.y_embed(y)
        c = F.silu(c)  # all that adaLN asks of c

        for block in self.blocks:
            if cfg.checkpointing and torch.is_grad_enabled():
                x = checkpoint(block, x, c, self.rotation, use_reentrant=False)
            else:
                x = block(x, c, self.rotation)

        x = self.final(x, c, self.blocks[0].norm)  # (N, T, p*p*out)
        x = x.view(N, grid, grid, p, p, -1).permute(0, 5, 1, 3, 2, 4)  # (N, out, row, p, col, p)
        return x.reshape(N, cfg.out_channels, cfg.image_size, cfg.image_size)

    def num_params(self) -> int:
        """Learned parameters (the fixed tables are none)."""
        return sum(p.numel() for p in self.parameters())

    def estimate_flops(self) -> int:
        """FLOPs (2 per multiply-add) of matrix products and attention, per image, forward + backward = 3x forward."""
        T = self.config.num_tokens
        flops = self.config.depth * 4 * T * T * self.config.width  # q @ k and weights @ v, 2 T T C each
        for name, p in self.named_parameters():
            if p.ndim == 2 and "y_embed" not in name:  # a look-up is no product
                flops += 2 * p.numel() * (1 if "t_embed" in name or ".ada." in name else T)
        return 3 * flops


# ---------------------------------------------------------------------------------------------------------------------
# The published format, that of DiT-XL-2-256x256.pt

META_KEYS = (  # theirs, ours; every other part of a name is the same. Undone from last to first.
    ("x_embedder.proj.", "patch_embed."),
    ("t_embedder.mlp.", "t_embed."),
    ("y_embedder.embedding_table.", "y_embed."),
    (".attn.qkv.", ".qkv."),
    (".attn.proj.", ".proj."),
    (".mlp.fc", ".fc"),
    (".adaLN_modulation.1.", ".ada."),
    ("final_layer.", "final."),
)
META_HEADS = {384: 6, 768: 12, 1024: 16, 1152: 16}  # S, B, L, XL


def from_meta(state_dict: dict, heads: int = 0, **overrides) -> tuple[DiTConfig, dict]:
    """(config, state_dict of ours) from facebookresearch/DiT's: a plain one, or a training checkpoint (its "ema").

    The shape is read off the tensors; `heads` is not in them: 0 = that of S, B, L, XL by width, else width/64.
    `overrides` replace fields of the config. Raises UserError for another format.
    """
    sd = next((state_dict[key] for key in ("ema", "model") if key in state_dict), state_dict)
    missing = {"pos_embed", "x_embedder.proj.weight", "final_layer.linear.weight", "blocks.0.mlp.fc1.weight"} - set(sd)
    if missing:
        raise UserError(f"not a state dict of the published DiT: no {sorted(missing)[0]!r} among its {len(sd)} keys")
    width, in_channels, patch_size, _ = sd["x_embedder.proj.weight"].shape
    classes = sd.get("y_embedder.embedding_table.weight")  # (num_classes + 1, width)
    fields = dict(
        image_size=math.isqrt(sd["pos_embed"].shape[1]) * patch_size,
        in_channels=in_channels,
        out_channels=sd["final_layer.linear.weight"].shape[0] // patch_size**2,
        patch_size=patch_size,
        width=width,
        depth=1 + max(int(key.split(".")[1]) for key in sd if key.startswith("blocks.")),
        heads=heads or META_HEADS.get(width, max(1, width // 64)),
        num_classes=0 if classes is None else len(classes) - 1,
        block="classic",
        mlp_ratio=sd["blocks.0.mlp.fc1.weight"].shape[0] / width,
    )
    config, ours = DiTConfig(**fields | overrides), {}
    for key, value in sd.items():
        for theirs, name in META_KEYS:
            key = key.replace(theirs, name)
        ours[key] = value.flatten(1) if key == "patch_embed.weight" else value  # (C, ch, p, p) -> (C, ch*p*p)
    if not torch.allclose(ours.pop("pos_embed")[0].float(), sincos_table(config), atol=1e-4):
        raise UserError("pos_embed is not the fixed sin-cos table of the published DiT, the only one accepted")
    return config, ours


def to_meta(state_dict: dict, config: DiTConfig) -> dict:
    """The inverse of `from_meta`: a plain state dict that facebookresearch/DiT loads. UserError if not classic."""
    if config.block != "classic":
        raise UserError(f"block={config.block!r} cannot be written in the published format; accepted: classic")
    theirs = {"pos_embed": sincos_table(config)[None]}
    for key, value in state_dict.items():
        if key == "patch_embed.weight":
            value = value.unflatten(1, (-1, config.patch_size, config.patch_size))
        for name, ours in reversed(META_KEYS):
            key = key.replace(ours, name)
        theirs[key] = value
    return theirs
