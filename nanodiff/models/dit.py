"""DiT, the diffusion transformer (Peebles & Xie 2023, arXiv:2212.09748): the published block and a modern one.

Why patches? Attention compares all pairs of tokens: 1,024 pixels would cost 16 times as much as 256 patches of 2 x 2. t
is no token: its embedding, added to the class's, shifts, scales and gates the input of every layer (adaLN, in Block).
"""

import functools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nanodiff.common import UserError
from nanodiff.conditions import Conditioned, input_channels, null_rows, with_images

T_EMBED_DIM = 256  # sinusoids per timestep, cosines first


@dataclass(frozen=True)
class DiTConfig(Conditioned):
    """Shape of a DiT.

    block="modern": RMSNorm, qk-norm (Henry et al. 2020), axial 2-D RoPE (Su et al. 2021), SwiGLU (Shazeer 2020); in
    blocks, biases in adaLN only. block="classic": LayerNorm, biases and GELU, as published.
    """

    image_size: int  # side of the image in (latent) pixels; for rectangles, of a square of about their area
    in_channels: int
    out_channels: int  # 2 * in_channels if the variance is learned
    patch_size: int
    width: int
    depth: int
    heads: int
    block: str = "modern"
    mlp_ratio: float = 4.0  # hidden / width; 2/3 of this in a modern MLP, which has three matrices instead of two
    checkpointing: bool = False  # recompute each block in backward: less memory, a third more compute
    flow_map: int = 0  # the first block, from 1, that also sees h, the time to jump; 0 = none

    def __post_init__(self):
        if self.image_size % self.patch_size:
            raise UserError(f"patch_size={self.patch_size}; accepted: a divisor of image_size={self.image_size}")
        unit = 4 * self.heads
        if self.width % unit:
            raise UserError(f"width={self.width}; accepted: multiples of {unit}, four times the heads")

    @classmethod
    def from_depth(
        cls,
        depth: int,
        image_size: int,
        heads: int = 0,
        # Only arch=dit|dit_classic
        patch_size: int = 0,  # >= 0: side of a token in pixels or latents; 0 = size / 16, or size / 8 below depth 6;
        #                       2 or more if that divides
        width: int = 0,  # >= 0: overrides 64*depth, such as DiT-XL's 1152 at depth 28; 0 = 64*depth
        **fields,
    ):
        """The one dial: width = 64 * depth, a head per 64 of width but at least 4. Depth 12 is DiT-B.

        About 256 tokens; below depth 6 about 64: in short runs images pay more than finer tokens (runs/LOG.md, 7).
        The patch is the nearest divisor of image_size that leaves, from 16 pixels on, at least 8 tokens per side.
        """
        if not patch_size:
            side = 16 if depth > 5 else 8
            patches = [p for p in range(2, max(3, image_size // 8 + 1)) if image_size % p == 0] or [1]
            patch_size = min(patches, key=lambda p: abs(math.log(image_size / p / side)))
        width = width or 64 * depth
        heads = heads or max(4, width // 64)
        return cls(image_size, patch_size=patch_size, width=width, depth=depth, heads=heads, **fields)

    @property
    def grid(self) -> int:
        """Tokens per side."""
        return self.image_size // self.patch_size

    @property
    def num_tokens(self) -> int:
        return self.grid**2

    @property
    def side_unit(self) -> int:
        """Image sides must be multiples of this."""
        return self.patch_size

    @property
    def mlp_hidden(self) -> int:
        if self.block == "classic":
            return int(self.width * self.mlp_ratio)
        hidden = self.width * self.mlp_ratio * 2 / 3
        return max(64, 64 * round(hidden / 64))


def token_angles(config: DiTConfig, rows: int, cols: int, base: float, dim: int, device):
    """Each token's row and column times base^(-i / dim), i < dim: (T, 2, dim) float64, T = rows * cols.

    Rows and columns of a square of G x G tokens count from 0 to G-1; a rectangle has the same centre.
    """
    dtype = torch.float32 if torch.device(device).type == "mps" else torch.float64  # MPS has no float64
    count = functools.partial(torch.arange, dtype=dtype, device=device)
    down = count(rows) + (config.grid - rows) / 2
    across = count(cols) + (config.grid - cols) / 2
    places = torch.cartesian_prod(down, across)  # (T, 2)
    freqs = base ** -(count(dim) / dim)
    return places[:, :, None] * freqs


def position_table(config: DiTConfig, rows: int, cols: int, device="cpu") -> Tensor:
    """Sin-cos position embeddings (T, C) fp32 in the published order: first half the column's waves, second half the
    row's, each sines before cosines."""
    angles = token_angles(config, rows, cols, 10000.0, config.width // 4, device)
    waves = torch.stack([angles.sin(), angles.cos()], dim=2)
    return waves.flip(1).flatten(1).float()


def rotation_table(config: DiTConfig, rows: int, cols: int, device) -> tuple[Tensor, Tensor]:
    """RoPE's sin and cos, (L + T, 1, 1, head_dim/2) fp32: the row turns the first half of the pairs, the column the
    rest. The L = vector_len tokens before the image's have no position, so their angle is 0.

    Base 100 instead of 10000: a grid has tens of positions, not thousands (Heo et al. 2024, arXiv:2403.13298).
    """
    head_dim = config.width // config.heads
    angles = token_angles(config, rows, cols, 100.0, head_dim // 4, device)
    angles = F.pad(angles.flatten(1), (0, 0, config.vector_len, 0))  # (L + T, head_dim/2)
    angles = angles[:, None, None]
    return angles.sin().float(), angles.cos().float()


def timestep_embedding(t: Tensor, dim: int) -> Tensor:
    """t (N,), usually in [0, 1000] -> (N, dim) fp32: cos, then sin, of t times frequencies from 1 to 1/10000 (DDPM)."""
    half = dim // 2
    powers = torch.arange(half, dtype=torch.float32, device=t.device)
    freqs = torch.exp(-math.log(10000) / half * powers)
    angles = t.float()[:, None] * freqs  # fp32: bf16 has no bits left for the fraction of t = 999.5
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def embedder(dim: int, C: int) -> nn.Module:
    """An MLP of two layers: a timestep_embedding (N, dim) -> (N, C)."""
    return nn.Sequential(nn.Linear(dim, C), nn.SiLU(), nn.Linear(C, C))


def run_block(config, block, *args):
    """block(*args). With config.checkpointing, backward recomputes it, with the same dropout."""
    if config.checkpointing and torch.is_grad_enabled():
        return checkpoint(block, *args, use_reentrant=False)
    return block(*args)


# ---------------------------------------------------------------------------------------------------------------------
# Blocks


def attention(q, k, v):
    """softmax(q k^T / sqrt(head_dim)) v; each (N, heads, T, head_dim). On GPUs in bf16 and fp16 a flash kernel."""
    if q.device.type == "cpu" and q.dtype == torch.bfloat16 and q.size(2) <= 288:
        # The fused CPU kernel gains nothing from bf16: a compiled step of a modern d4 takes 186 ms with it, 132 without
        # (64 tokens, batch 32, one Zen 5 core). Long sequences need it to save memory.
        scores = q @ k.mT * q.size(-1) ** -0.5  # (N, heads, T, T)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32)
        return weights.to(v.dtype) @ v
    return F.scaled_dot_product_attention(q, k, v)


def split_qkv(qkv, heads):
    """(N, T, 3C) -> q and k (N, T, 2, heads, head_dim), v (N, T, 1, heads, head_dim)."""
    # split, not slices: a slice's backward writes and reads a whole fp32 qkv of zeros
    return qkv.unflatten(2, (3, heads, -1)).split((2, 1), dim=2)


def modulate(norm, x, shift, scale):
    """norm(x) (1 + scale) + shift in fp32: x (N, T, C), scale and shift (N, 1, C), norm F.rms_norm or F.layer_norm."""
    return norm(x.float(), x.shape[-1:], eps=1e-6) * (1 + scale) + shift


class Block(nn.Module):
    """Attention and MLP with adaLN-Zero: each input is normalised, scaled and shifted by c, each output gated by c."""

    def __init__(self, config: DiTConfig):
        super().__init__()
        C = config.width
        hidden = config.mlp_hidden
        self.heads = config.heads
        self.modern = modern = config.block == "modern"
        self.norm = F.rms_norm if modern else F.layer_norm
        fc1_width = 2 * hidden if modern else hidden  # gate and up in one matrix
        bias = not modern
        self.qkv = nn.Linear(C, 3 * C, bias=bias)
        self.proj = nn.Linear(C, C, bias=bias)
        self.fc1 = nn.Linear(C, fc1_width, bias=bias)
        self.fc2 = nn.Linear(hidden, C, bias=bias)
        self.ada = nn.Linear(C, 6 * C)

    def forward(self, x, c, rotation):
        # x (N, T, C), fp32 or bf16; the six (N, 1, C), in fp32: bf16's 1 + scale has steps of 1/128
        shift1, scale1, gate1, shift2, scale2, gate2 = self.ada(c).float().unsqueeze(1).chunk(6, dim=-1)
        # Gates and sums are computed in fp32, then rounded to x's dtype
        h = modulate(self.norm, x, shift1, scale1)
        x = (x + gate1 * self.attention(h, rotation)).to(x.dtype)
        h = modulate(self.norm, x, shift2, scale2)
        return (x + gate2 * self.mlp(h)).to(x.dtype)

    def attention(self, x, rotation):
        qkv = self.qkv(x)
        qk, v = split_qkv(qkv, self.heads) if isinstance(qkv, Tensor) else qkv  # fp8.py's layer has split it
        if self.modern:
            qk = self.rotate(qk, rotation)
        out = attention(*qk.transpose(1, 3).unbind(2), v.transpose(1, 3).squeeze(2))  # (N, heads, T, head_dim)
        return self.proj(out.transpose(1, 2).flatten(2))

    def rotate(self, qk, rotation):
        """qk-norm, then RoPE, which gives relative offsets. Absolute positions come from the sin-cos table."""
        sin, cos = rotation  # (T, 1, 1, head_dim/2)
        qk_norm = F.rms_norm(qk.float(), qk.shape[-1:], eps=1e-6)
        a, b = qk_norm.chunk(2, dim=-1)  # q and k at once: (N, T, 2, heads, head_dim/2)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1).to(qk.dtype)

    def mlp(self, x):
        if not self.modern:
            return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))
        gate, up = self.fc1(x).chunk(2, dim=-1)
        return self.fc2(F.silu(gate) * up)


class Final(nn.Module):
    """The last norm, scaled and shifted by c, then the linear layer from tokens to patches."""

    def __init__(self, config: DiTConfig):
        super().__init__()
        self.norm = F.rms_norm if config.block == "modern" else F.layer_norm
        self.linear = nn.Linear(config.width, config.patch_size**2 * config.out_channels)
        self.ada = nn.Linear(config.width, 2 * config.width)

    def forward(self, x, c):  # (N, T, C), (N, C) -> (N, T, p*p*out)
        shift, scale = self.ada(c).float().unsqueeze(1).chunk(2, dim=-1)  # (N, 1, C) each
        return self.linear(modulate(self.norm, x, shift, scale))


class DiT(nn.Module):
    """`model(x_t, t, **cond)` -> prediction. Build on "meta", then `.to_empty(...)` and `init_weights`."""

    def __init__(self, config: DiTConfig):
        super().__init__()
        self.config = config
        C = config.width
        self.patch_embed = nn.Linear(input_channels(config) * config.patch_size**2, C)
        self.t_embed = embedder(T_EMBED_DIM, C)
        if config.flow_map:
            self.h_embed = embedder(T_EMBED_DIM, C)
        # nn.Embedding would draw its table; on "meta", torch imports its compiler for that: 2 s at every start
        if config.num_classes:
            self.y_embed = nn.Embedding.from_pretrained(torch.empty(config.num_classes + 1, C), freeze=False)
        if config.vector_len:
            self.vector_position = nn.Parameter(torch.empty(config.vector_len, C))
        if config.vector_dim:
            self.vector_embed = nn.Linear(config.vector_dim, C, bias=config.vector_len > 0)
            self.vector_null = nn.Parameter(torch.empty(C))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.final = Final(config)

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """Published init, drawn on the CPU, so that every device starts from the same weights.

        Xavier-uniform matrices, embeddings with std 0.02; biases, adaLN and the last layer are zero, so each block
        starts as the identity (adaLN-Zero) and the prediction as 0. A single vector's embedding starts at 0 too.
        """
        zero = ("ada", "final", "h_embed.2")  # h_embed.2: a flow model starts out as a flow map of short jumps
        if not self.config.vector_len:
            zero += ("vector_embed",)
        for name, p in self.named_parameters():
            w = torch.zeros(p.shape)
            if p.ndim > 1 and name.startswith(("t_embed", "h_embed.0", "y_embed", "vector_position")):
                w.normal_(std=0.02, generator=generator)
            elif p.ndim > 1 and not any(part in name for part in zero):
                nn.init.xavier_uniform_(w, generator=generator)
            p.copy_(w)

    def forward(self, x_t, t, y=None, vectors=None, h=None, **images):
        """x_t (N, C, H, W), t (N,) float as time_input says, y (N,) int64, vectors (N, D) or (N, L, D), images for
        with_images -> (N, out_channels, H, W).

        Labels run from 0 to num_classes, the null class. Null vectors are NaN. h (N,): how far a flow map jumps;
        None = 0.
        """
        cfg = self.config
        p = cfg.patch_size
        x = with_images(cfg, x_t, **images)
        x = F.pixel_unshuffle(x, p)  # (N, C p p, rows, cols)
        N, _, rows, cols = x.shape
        x = self.patch_embed(x.flatten(2).mT.contiguous())  # (N, T, C), a token per patch, row by row
        # The residual stream is in bf16 under bf16 autocast: half the memory traffic. fp16's range would be too small
        stream = torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32
        x = (x + position_table(cfg, rows, cols, x.device)).to(stream)
        rotation = rotation_table(cfg, rows, cols, x.device)

        c = self.t_embed(timestep_embedding(t, T_EMBED_DIM))  # (N, width)
        if cfg.num_classes:
            c = c + self.y_embed(y)
        if cfg.vector_dim:
            vectors, is_null = null_rows(vectors)
            vectors = self.vector_embed(vectors) + is_null * self.vector_null  # (N, C) or (N, L, C)
            if cfg.vector_len:  # tokens before the image's (Bao et al. 2022, arXiv:2209.12152), dropped at the end
                tokens = vectors + self.vector_position
                x = torch.cat([tokens.to(stream), x], dim=1)  # (N, L + T, C)
            else:
                c = c + vectors
        c_h = c  # with h
        if cfg.flow_map:
            c_h = c + self.h_embed(timestep_embedding(0 * t if h is None else h, T_EMBED_DIM))
        c, c_h = F.silu(c), F.silu(c_h)  # adaLN's activation, the same in every block

        for number, block in enumerate(self.blocks, 1):
            x = run_block(cfg, block, x, c if number < cfg.flow_map else c_h, rotation)

        x = self.final(x[:, cfg.vector_len :], c_h)  # (N, T, p*p*out)
        x = x.view(N, rows, cols, p, p, -1).permute(0, 5, 1, 3, 2, 4)  # (N, out, row, p, col, p)
        return x.flatten(4).flatten(2, 3)

    def parts(self) -> list[nn.Module]:
        """Modules that torch.compile compiles separately; the rest takes little time."""
        return [*self.blocks, self.final]
