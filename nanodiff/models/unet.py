"""The UNet of IDDPM (Nichol and Dhariwal, 2021) and its super-resolution variant: x_t, t, y, low_res -> prediction.

Modules carry the names of the published code, so that its checkpoints load strictly after `from_improved_diffusion`.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from nanodiff.common import UserError

# Width of each level as a multiple of model_channels: IDDPM's for 32, 64 and 256 pixels, ADM's (2021) for 128.
CHANNEL_MULT = {32: (1, 2, 2, 2), 64: (1, 2, 3, 4), 128: (1, 1, 2, 3, 4), 256: (1, 1, 2, 2, 4, 4)}
NORM_GROUPS = 32


@dataclass(frozen=True)
class UNetConfig:
    """Shape of a UNet. `dataclasses.asdict` gives JSON and `UNetConfig(**dict)` takes it back.

    attention_resolutions are in pixels of the feature map, as on IDDPM's command line; channel_mult=() is the published
    one for image_size. num_classes=0 is unconditional; null_class adds row `num_classes` to the table of labels, for
    "no label". low_res makes a super-resolution model: a low-resolution image is concatenated to x_t. checkpointing
    recomputes each block in backward, to save memory. Raises UserError where the numbers do not fit together.
    """

    image_size: int = 32
    in_channels: int = 3  # of x_t alone; the low-resolution image brings as many again
    out_channels: int = 3  # twice in_channels where the variance is learned
    model_channels: int = 128
    num_res_blocks: int = 3
    attention_resolutions: tuple[int, ...] = (16, 8)
    channel_mult: tuple[int, ...] = ()
    num_heads: int = 4
    num_heads_upsample: int = 0  # heads on the way up; 0 = num_heads
    num_classes: int = 0
    null_class: bool = True  # False = the published table, without a row for classifier-free guidance
    dropout: float = 0.0
    use_scale_shift_norm: bool = True
    conv_resample: bool = True
    low_res: int = 0
    checkpointing: bool = False

    def __post_init__(self):
        set_ = lambda name, value: object.__setattr__(self, name, value)  # frozen, and JSON turns tuples into lists
        set_("attention_resolutions", tuple(self.attention_resolutions))
        set_("channel_mult", tuple(self.channel_mult) or default_channel_mult(self.image_size))
        set_("num_heads_upsample", self.num_heads_upsample or self.num_heads)
        factor = 2 ** (len(self.channel_mult) - 1)
        if self.image_size < 1 or self.image_size % factor:
            raise UserError(f"image_size={self.image_size}; accepted: a multiple of {factor}, by channel_mult's length")
        if self.model_channels < 1 or self.model_channels % NORM_GROUPS:
            raise UserError(f"model_channels={self.model_channels}; accepted: a positive multiple of {NORM_GROUPS}")
        for heads in (self.num_heads, self.num_heads_upsample):
            widths = [self.model_channels * mult for mult in self.channel_mult]
            if heads < 1 or any(width % heads for width in widths):
                raise UserError(f"num_heads={heads}; accepted: a divisor of every level's width {widths}")

    @classmethod
    def from_depth(cls, depth: int, image_size: int, **settings) -> "UNetConfig":
        """The one dial: model_channels = 32 * depth, so that d4 at 32 pixels is the published CIFAR-10 model."""
        return cls(image_size=image_size, model_channels=NORM_GROUPS * depth, **settings)

    @property
    def num_tokens(self) -> int:
        """Patches of 2 x 2 pixels, the DiT's measure of an image, for target_param_data_ratio."""
        return (self.image_size // 2) ** 2

    @property
    def attention_factors(self) -> set[int]:
        """Down-sampling factors with attention: for each resolution the level that is nearest by ratio.

        Exact for powers of two; at 28 pixels, (16, 8) are the levels of 14 and 7 pixels.
        """
        return {2 ** round(math.log2(self.image_size / res)) for res in self.attention_resolutions if res > 0}


def default_channel_mult(image_size: int) -> tuple[int, ...]:
    """The table's entry for this size or the next larger, cut where a level would be odd or under 4 pixels."""
    mult = CHANNEL_MULT[min((size for size in CHANNEL_MULT if size >= image_size), default=256)]
    levels = [i for i in range(len(mult)) if i == 0 or (image_size % 2**i == 0 and image_size >= 4 * 2**i)]
    return mult[: len(levels)]


def timestep_embedding(t, dim: int):
    """(N,) float t -> (N, dim) fp32: cos, then sin, of t at geometric frequencies from 1 to 1/10000 (DDPM)."""
    half = dim // 2
    freqs = torch.exp(-math.log(10000) / half * torch.arange(half, dtype=torch.float32, device=t.device))
    args = t.float()[:, None] * freqs  # (N, half)
    return F.pad(torch.cat([args.cos(), args.sin()], dim=1), (0, dim % 2))


def no_autocast(x):
    return torch.autocast(x.device.type, enabled=False)


class GroupNorm(nn.GroupNorm):
    """In the dtype of x, with statistics in fp32 as in every kernel; autocast would also write the output in fp32."""

    def __init__(self, channels: int):
        super().__init__(NORM_GROUPS, channels)

    def forward(self, x):
        with no_autocast(x):
            return F.group_norm(x, self.num_groups, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


class Downsample(nn.Sequential):
    def __init__(self, channels: int, conv: bool):
        op = nn.Conv2d(channels, channels, 3, stride=2, padding=1) if conv else nn.AvgPool2d(2)
        super().__init__(OrderedDict(op=op))


class Upsample(nn.Module):
    def __init__(self, channels: int, conv: bool):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1) if conv else nn.Identity()

    def forward(self, x):
        with no_autocast(x):  # on CPU autocast would copy nearest neighbours in fp32
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
        return self.conv(x)


class ResBlock(nn.Module):
    """Two convolutions beside a skip; the embedding scales and shifts the second norm, or is added before it."""

    def __init__(self, cin: int, cout: int, config: UNetConfig):
        super().__init__()
        self.scale_shift = config.use_scale_shift_norm
        emb = 4 * config.model_channels
        self.in_layers = nn.Sequential(GroupNorm(cin), nn.SiLU(), nn.Conv2d(cin, cout, 3, padding=1))
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(emb, 2 * cout if self.scale_shift else cout))
        last = nn.Conv2d(cout, cout, 3, padding=1)  # zero at init: a block starts as its skip
        self.out_layers = nn.Sequential(GroupNorm(cout), nn.SiLU(), nn.Dropout(config.dropout), last)
        self.skip_connection = nn.Conv2d(cin, cout, 1) if cin != cout else nn.Identity()

    def forward(self, x, emb):  # (N, cin, H, W), (N, 4 * model_channels) -> (N, cout, H, W)
        h = self.in_layers(x)
        emb = self.emb_layers(emb)[:, :, None, None]  # (N, cout or 2 cout, 1, 1)
        if self.scale_shift:
            norm, act, dropout, conv = self.out_layers
            scale, shift = emb.chunk(2, dim=1)
            h = conv(dropout(act(norm(h) * (1 + scale) + shift)))
        else:
            h = self.out_layers(h + emb)
        return self.skip_connection(x) + h


class AttentionBlock(nn.Module):
    """Self-attention over all positions, beside a skip; all reshapes are views under channels_last."""

    def __init__(self, channels: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.norm = GroupNorm(channels)
        self.qkv = nn.Linear(channels, 3 * channels)  # published as Conv1d of width 1
        self.proj_out = nn.Linear(channels, channels)  # zero at init

    def forward(self, x):  # (N, C, H, W)
        N, C, H, W = x.shape
        h = self.norm(x).flatten(2).transpose(1, 2)  # (N, T, C), T = H*W
        qkv = self.qkv(h).view(N, H * W, self.num_heads, 3, C // self.num_heads)  # the published order: head, q|k|v
        # fp32 on CPU: its bf16 kernel takes 1.4 (T=256) to 10 (T=16) times as long backward.
        dtype = torch.promote_types(qkv.dtype, torch.float32) if x.device.type == "cpu" else qkv.dtype
        with no_autocast(x):
            q, k, v = qkv.to(dtype).permute(3, 0, 2, 1, 4)  # each (N, nh, T, hs)
            h = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(N, H * W, C).to(x.dtype)
        return x + self.proj_out(h).transpose(1, 2).view(N, C, H, W)


class Level(nn.Sequential):
    """Layers in a row, of which the residual blocks also take the embedding."""

    def forward(self, x, emb, skip=None):
        x = x if skip is None else torch.cat([x, skip], dim=1)
        for layer in self:
            x = layer(x, emb) if isinstance(layer, ResBlock) else layer(x)
        return x


class UNet(nn.Module):
    """`model(x_t, t, y=None, low_res=None)` -> (N, out_channels, H, W) fp32.

    x_t (N, in_channels, H, W); t (N,) float in [0, 1000]; y (N,) int64, with num_classes for "no label"; low_res
    (N, in_channels, h, w) of any size for a super-resolution model. `init_weights` or `load_state_dict` sets the
    weights; build on device "meta" to have none before that. Raises UserError where y or low_res is missing.
    """

    def __init__(self, config: UNetConfig):
        super().__init__()
        self.config = c = config
        width, emb = c.model_channels, 4 * c.model_channels
        self.time_embed = nn.Sequential(nn.Linear(width, emb), nn.SiLU(), nn.Linear(emb, emb))
        if c.num_classes:
            table = torch.empty(c.num_classes + c.null_class, emb)  # not drawn here, as in dit.py
            self.label_emb = nn.Embedding.from_pretrained(table, freeze=False)

        def blocks(cin, cout, factor, heads):
            res = ResBlock(cin, cout, c)
            return [res, AttentionBlock(cout, heads)] if factor in c.attention_factors else [res]

        self.input_blocks = nn.ModuleList(
            [Level(nn.Conv2d(c.in_channels * (1 + bool(c.low_res)), width, 3, padding=1))]
        )
        ch, skips, last = width, [width], len(c.channel_mult) - 1  # skips: channels of each input block's output
        for level, mult in enumerate(c.channel_mult):
            for _ in range(c.num_res_blocks):
                self.input_blocks.append(Level(*blocks(ch, mult * width, 2**level, c.num_heads)))
                ch = mult * width
                skips.append(ch)
            if level != last:
                self.input_blocks.append(Level(Downsample(ch, c.conv_resample)))
                skips.append(ch)
        self.middle_block = Level(ResBlock(ch, ch, c), AttentionBlock(ch, c.num_heads), ResBlock(ch, ch, c))
        self.output_blocks = nn.ModuleList()
        for level, mult in reversed(list(enumerate(c.channel_mult))):
            for i in range(c.num_res_blocks + 1):
                layers = blocks(ch + skips.pop(), mult * width, 2**level, c.num_heads_upsample)
                ch = mult * width
                if level and i == c.num_res_blocks:
                    layers.append(Upsample(ch, c.conv_resample))
                self.output_blocks.append(Level(*layers))
        self.out = nn.Sequential(GroupNorm(ch), nn.SiLU(), nn.Conv2d(ch, c.out_channels, 3, padding=1))  # zero at init

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """torch's own rules (uniform within 1/sqrt(fan_in); labels N(0, 1)), and zero where the published model has it.

        Numbers are drawn on the generator's device, so that a CPU generator gives every device the same weights.
        """
        draw = lambda rule, p: rule(p.shape, generator=generator, device=generator.device)
        for m in self.modules():
            if isinstance(m, nn.GroupNorm):
                m.reset_parameters()  # scale 1, shift 0
            elif isinstance(m, nn.Embedding):
                m.weight.copy_(draw(torch.randn, m.weight))
            elif isinstance(m, nn.Linear | nn.Conv2d):
                bound = m.weight[0].numel() ** -0.5
                for p in m.parameters(recurse=False):
                    p.copy_((2 * draw(torch.rand, p) - 1) * bound)
        for name, p in self.named_parameters():
            if "out_layers.3." in name or "proj_out." in name or name.startswith("out.2."):
                p.zero_()

    def forward(self, x_t, t, y=None, low_res=None):
        c = self.config
        if c.low_res and low_res is None:
            raise UserError("low_res=None; accepted: the image to enlarge, as the model is built for super-resolution")
        if c.num_classes and y is None:
            raise UserError(f"y=None; accepted: (N,) labels below {c.num_classes + c.null_class}")
        if c.low_res:
            x_t = torch.cat([x_t, F.interpolate(low_res.to(x_t.dtype), x_t.shape[-2:], mode="bilinear")], dim=1)
        with no_autocast(x_t):  # the published fp16 model, too, keeps the embedding and the output layer in fp32
            emb = self.time_embed(timestep_embedding(t, c.model_channels))  # (N, 4 * model_channels)
            emb = emb + self.label_emb(y) if c.num_classes else emb
        h, skips = x_t, []
        for block in self.input_blocks:
            h = self._run(block, h, emb)
            skips.append(h)
        h = self._run(self.middle_block, h, emb)
        for block in self.output_blocks:
            h = self._run(block, h, emb, skips.pop())
        with no_autocast(x_t):
            return self.out(h.float())

    def _run(self, block, *args):
        if not (self.config.checkpointing and self.training and torch.is_grad_enabled()):
            return block(*args)
        return checkpoint(block, *args, use_reentrant=False, preserve_rng_state=self.config.dropout > 0)

    def estimate_flops(self) -> int:
        """FLOPs (2 per multiply-add) of one image, forward + backward = 3x forward; products only, no norms."""
        size, flops = self.config.image_size, 2 * sum(m.weight.numel() for m in self.time_embed[::2])
        for layer in (m for level in [*self.input_blocks, self.middle_block, *self.output_blocks] for m in level):
            size = size // 2 if isinstance(layer, Downsample) else 2 * size if isinstance(layer, Upsample) else size
            weights = [(name, p.numel()) for name, p in layer.named_parameters() if p.ndim > 1]
            flops += sum(2 * n * (1 if "emb_layers" in name else size**2) for name, n in weights)
            if isinstance(layer, AttentionBlock):
                flops += 2 * 2 * size**4 * layer.proj_out.in_features  # q k^T and its product with v
        return 3 * (flops + 2 * self.out[-1].weight.numel() * size**2)


# Published checkpoints (openai/improved-diffusion, *_uncond_50M_500K.pt, ema_0.9999_500000.pt)


def is_improved_diffusion(state_dict: dict) -> bool:
    """Whether these are the names and shapes of the published code's plain (EMA) state dict."""
    keys = {"time_embed.0.weight", "out.2.weight", "middle_block.1.qkv.weight"}
    return keys <= state_dict.keys() and state_dict["middle_block.1.qkv.weight"].ndim == 3


def from_improved_diffusion(state_dict: dict) -> dict:
    """The published state dict -> ours: same names; attention's Conv1d weights (out, in, 1) become (out, in)."""
    return {name: p.squeeze(-1) if p.ndim == 3 else p for name, p in state_dict.items()}


def to_improved_diffusion(state_dict: dict, config: UNetConfig) -> dict:
    """The inverse of `from_improved_diffusion`; the null class is left out, for which their table has no row."""
    conv1d = ("qkv.weight", "proj_out.weight")
    theirs = {name: p[..., None] if name.endswith(conv1d) else p for name, p in state_dict.items()}
    if config.num_classes:
        theirs["label_emb.weight"] = theirs["label_emb.weight"][: config.num_classes].clone()  # of a view all is saved
    return theirs


def config_from_state_dict(state_dict: dict, image_size: int = 0, **known) -> UNetConfig:
    """The UNetConfig that a state dict (published or ours) was made with, read from its names and shapes.

    image_size=0: such that attention starts at 16 pixels, as in all published models. Not to be read, so published
    defaults unless given in `known`: num_heads, num_heads_upsample, dropout, null_class (False), checkpointing. Six
    input channels are taken for RGB super-resolution. Raises UserError when the names are not those of this UNet.
    """
    shapes = {name: tuple(p.shape) for name, p in state_dict.items()}
    if not {"input_blocks.0.0.weight", "time_embed.0.weight", "out.2.weight"} <= shapes.keys():
        raise UserError(f"state dict begins with {list(shapes)[:3]}; accepted: improved-diffusion's UNet, plain or EMA")
    width, cin = shapes["input_blocks.0.0.weight"][:2]
    mult, num_res_blocks, level, attention = [], 0, 0, set()
    last = max(int(name.split(".")[1]) for name in shapes if name.startswith("input_blocks."))
    if last > 2 * len(shapes):  # not every block has tensors, but every other
        raise UserError(f"state dict has input block {last:,}, and {len(shapes):,} tensors")
    for i in range(1, 1 + last):
        conv = shapes.get(f"input_blocks.{i}.0.in_layers.2.weight")
        if conv is None:  # a downsampling, which has no parameters at all where conv_resample=False
            level += 1
            continue
        num_res_blocks += level == 0
        mult[level:] = [conv[0] // width]
        if f"input_blocks.{i}.1.qkv.weight" in shapes:
            attention.add(level)
    if not (image_size or attention):
        raise UserError("image_size=0: this state dict has no attention to tell it by; accepted: the size in pixels")
    image_size = image_size or 16 << min(attention)
    emb, conv = (shapes[f"input_blocks.1.0.{name}.weight"] for name in ("emb_layers.1", "in_layers.2"))
    found = {
        "image_size": image_size,
        "in_channels": 3 if cin == 6 else cin,
        "low_res": image_size // 4 if cin == 6 else 0,
        "out_channels": shapes["out.2.weight"][0],
        "model_channels": width,
        "num_res_blocks": num_res_blocks,
        "attention_resolutions": tuple(image_size >> level for level in sorted(attention)),
        "channel_mult": tuple(mult),
        "num_classes": shapes.get("label_emb.weight", (0,))[0] - known.get("null_class", False),
        "null_class": False,
        "use_scale_shift_norm": emb[0] == 2 * conv[0],
        "conv_resample": len(mult) == 1 or any(name.endswith(".op.weight") for name in shapes),
    }
    return UNetConfig(**found | known)
