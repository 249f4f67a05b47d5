"""The UNet of IDDPM (Nichol & Dhariwal 2021, arXiv:2102.09672). Modules carry the published names."""

import math
from collections import OrderedDict
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from nanodiff.common import UserError
from nanodiff.conditions import Conditioned, input_channels, null_rows, with_images
from nanodiff.models.dit import embedder, run_block, timestep_embedding

# Width of each level as a multiple of model_channels: IDDPM's for 32, 64 and 256 pixels, ADM's (2021) for 128
CHANNEL_MULT = {
    32: (1, 2, 2, 2),
    64: (1, 2, 3, 4),
    128: (1, 1, 2, 3, 4),
    256: (1, 1, 2, 2, 4, 4),
}
NORM_GROUPS = 32


@dataclass(frozen=True)
class UNetConfig(Conditioned):
    """Shape of a UNet."""

    image_size: int
    in_channels: int  # channels of x_t, without the second image's
    out_channels: int  # 2 * in_channels if the variance is learned
    model_channels: int
    channel_mult: tuple[int, ...]
    num_heads: int
    null_class: bool = True  # one more row in the class table, which published tables lack
    dropout: float = 0.0
    checkpointing: bool = False  # recompute each block in backward, to save memory
    # Only arch=unet
    num_heads_upsample: int = 0  # >= 0: attention heads on the way up; 0 = heads
    num_res_blocks: int = 3  # >= 1: residual blocks per resolution
    attention_resolutions: tuple[int, ...] = (16, 8)  # feature map sizes with attention, in pixels, comma-separated
    use_scale_shift_norm: bool = True  # t scales and shifts the norms, rather than being added

    def __post_init__(self):
        if self.vector_len:
            raise UserError(
                "arch=unet takes one vector per image, but the data hold sequences; accepted: dit, dit_classic"
            )
        if self.image_size % self.side_unit:
            raise UserError(
                f"image_size={self.image_size}; accepted: a multiple of {self.side_unit}, by channel_mult's length"
            )
        widths = [self.model_channels * m for m in self.channel_mult]
        for heads in (self.num_heads, self.num_heads_upsample or self.num_heads):
            if any(width % heads for width in widths):
                raise UserError(f"num_heads={heads}; accepted: a divisor of every level's width {widths}")

    @classmethod
    def from_depth(cls, depth: int, image_size: int, **fields) -> "UNetConfig":
        """The one dial: model_channels = 32 * depth; depth 4 at 32 pixels is the published CIFAR-10 model.

        Levels are those of CHANNEL_MULT for this size or the next larger. They stop before a side would be fractional
        or under 4 pixels.
        """
        mult = CHANNEL_MULT[min((size for size in CHANNEL_MULT if size >= image_size), default=256)]
        levels = 1
        while levels < len(mult) and image_size % 2**levels == 0 and image_size >= 4 * 2**levels:
            levels += 1
        return cls(image_size, model_channels=NORM_GROUPS * depth, channel_mult=mult[:levels], **fields)

    @property
    def num_tokens(self) -> int:
        """Number of 2 x 2 patches, so that target_param_data_ratio counts images up to 32 pixels as for a DiT."""
        return (self.image_size // 2) ** 2

    @property
    def side_unit(self) -> int:
        """Image sides must be multiples of this."""
        return 2 ** (len(self.channel_mult) - 1)

    @property
    def attention_levels(self) -> set[int]:
        """Levels nearest to attention_resolutions by ratio: at 28 pixels, (16, 8) selects the levels of 14 and 7."""
        return {round(math.log2(self.image_size / res)) for res in self.attention_resolutions if res > 0}


def no_autocast(x):
    return torch.autocast(x.device.type, enabled=False)


def conv3(c_in: int, c_out: int, **kwargs) -> nn.Conv2d:
    return nn.Conv2d(c_in, c_out, 3, padding=1, **kwargs)


def named(**layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(layers))


class GroupNorm(nn.GroupNorm):
    """Group normalisation that keeps the dtype of x; autocast would write fp32."""

    def __init__(self, channels: int):
        super().__init__(NORM_GROUPS, channels)

    def forward(self, x):
        with no_autocast(x):
            weight = self.weight.to(x.dtype)
            bias = self.bias.to(x.dtype)
            return F.group_norm(x, self.num_groups, weight, bias, self.eps)


class Upsample(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.conv = conv3(channels, channels)

    def forward(self, x):
        with no_autocast(x):  # autocast on the CPU would copy pixels in fp32
            x = F.interpolate(x, scale_factor=2.0)
        return self.conv(x)


class ResBlock(nn.Module):
    """Two convolutions and a skip. The embedding scales and shifts the second norm, or is added before it."""

    def __init__(self, cin: int, cout: int, config: UNetConfig):
        super().__init__()
        self.scale_shift = config.use_scale_shift_norm
        emb = 4 * config.model_channels
        emb_out = 2 * cout if self.scale_shift else cout
        self.in_layers = nn.Sequential(
            GroupNorm(cin),
            nn.SiLU(),
            conv3(cin, cout),
        )
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(emb, emb_out))
        self.out_layers = nn.Sequential(
            GroupNorm(cout),
            nn.SiLU(),
            nn.Dropout(config.dropout),
            conv3(cout, cout),  # zero at init, so a block starts as its skip
        )
        self.skip_connection = nn.Conv2d(cin, cout, 1) if cin != cout else nn.Identity()

    def forward(self, x, emb):  # (N, cin, H, W), (N, 4 * model_channels) -> (N, cout, H, W)
        h = self.in_layers(x)
        emb = self.emb_layers(emb)[:, :, None, None]  # (N, cout or 2 cout, 1, 1)
        if self.scale_shift:
            norm, act, dropout, conv = self.out_layers
            scale, shift = emb.chunk(2, dim=1)
            h = norm(h) * (1 + scale) + shift
            h = conv(dropout(act(h)))
        else:
            h = self.out_layers(h + emb)
        return self.skip_connection(x) + h


class AttentionBlock(nn.Module):
    """Self-attention over all positions, and a skip."""

    def __init__(self, channels: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.norm = GroupNorm(channels)
        self.qkv = nn.Linear(channels, 3 * channels)  # published as Conv1d of width 1
        self.proj_out = nn.Linear(channels, channels)  # zero at init

    def forward(self, x):  # (N, C, H, W)
        h = self.norm(x).flatten(2).mT  # (N, T, C), T = H W
        qkv = self.qkv(h).unflatten(2, (self.num_heads, 3, -1))  # the published order: head, q|k|v
        if x.device.type == "cpu":  # half-precision kernels take 1.4 to 10 times as long in backward as fp32 ones
            qkv = qkv.float()
        with no_autocast(x):
            q, k, v = qkv.permute(3, 0, 2, 1, 4)  # each (N, nh, T, hs)
            h = F.scaled_dot_product_attention(q, k, v)
            h = h.transpose(1, 2).flatten(2).to(x.dtype)  # (N, T, C)
        return x + self.proj_out(h).mT.view(x.shape)  # mT: (N, C, T)


class Level(nn.Sequential):
    """Layers in sequence; residual blocks also take the embedding."""

    def forward(self, x, emb, skip=None):
        if skip is not None:
            x = torch.cat([x, skip], dim=1)
        for layer in self:
            x = layer(x, emb) if isinstance(layer, ResBlock) else layer(x)
        return x


class UNet(nn.Module):
    """`model(x_t, t, **cond)` -> prediction. Build on "meta", then `.to_empty(...)` and `init_weights`."""

    def __init__(self, config: UNetConfig):
        super().__init__()
        self.config = c = config
        width = c.model_channels
        emb = 4 * width
        self.time_embed = embedder(width, emb)
        if c.num_classes:
            # Not drawn here: see dit.py
            table = torch.empty(c.num_classes + c.null_class, emb)
            self.label_emb = nn.Embedding.from_pretrained(table, freeze=False)
        if c.vector_dim:
            self.vector_emb = nn.Linear(c.vector_dim, emb, bias=False)
            self.vector_null = nn.Parameter(torch.empty(emb))

        def blocks(cin, cout, level, heads=c.num_heads):
            layers = [ResBlock(cin, cout, c)]
            if level in c.attention_levels:
                layers.append(AttentionBlock(cout, heads))
            return layers

        ch = width
        self.input_blocks = nn.ModuleList([Level(conv3(input_channels(c), ch))])
        skips = [ch]  # channels of each input block's output
        for level, mult in enumerate(c.channel_mult):
            cout = mult * width
            if level:
                self.input_blocks.append(Level(named(op=conv3(ch, ch, stride=2))))
                skips.append(ch)
            for _ in range(c.num_res_blocks):
                self.input_blocks.append(Level(*blocks(ch, cout, level)))
                ch = cout
                skips.append(ch)
        self.middle_block = Level(
            ResBlock(ch, ch, c),
            AttentionBlock(ch, c.num_heads),
            ResBlock(ch, ch, c),
        )
        self.output_blocks = nn.ModuleList()
        heads_up = c.num_heads_upsample or c.num_heads
        for level, mult in reversed(list(enumerate(c.channel_mult))):
            cout = mult * width
            for i in range(c.num_res_blocks + 1):
                layers = blocks(ch + skips.pop(), cout, level, heads_up)
                ch = cout
                if level and i == c.num_res_blocks:
                    layers.append(Upsample(ch))
                self.output_blocks.append(Level(*layers))
        self.out = nn.Sequential(
            GroupNorm(ch),
            nn.SiLU(),
            conv3(ch, c.out_channels),  # zero at init
        )

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator) -> None:
        """Uniform within 1/sqrt(fan_in), class table N(0, 1), last layers 0. Drawn on the CPU, so equal everywhere."""
        for m in self.modules():
            if isinstance(m, nn.GroupNorm):
                m.reset_parameters()  # scale 1, shift 0
            elif isinstance(m, nn.Embedding):
                m.weight.copy_(torch.randn(m.weight.shape, generator=generator))
            elif isinstance(m, nn.Linear | nn.Conv2d):
                bound = m.weight[0].numel() ** -0.5
                for p in m.parameters(recurse=False):
                    u = torch.rand(p.shape, generator=generator)
                    p.copy_((2 * u - 1) * bound)
        for name, p in self.named_parameters():
            if "out_layers.3." in name or "proj_out." in name or name.startswith(("out.2.", "vector_")):
                p.zero_()

    def forward(self, x_t, t, y=None, vectors=None, **images):
        """x_t (N, C, H, W), t (N,) float as the process gives it, y (N,) int64, vectors (N, D), images for with_images
        -> (N, out_channels, H, W).

        The null class, if any, is label num_classes. The output is fp32, also under autocast.
        """
        c = self.config
        x_t = with_images(c, x_t, **images)
        device = x_t.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x_t.dtype
        with no_autocast(x_t):  # as published, the embedding and the output layer stay in fp32
            emb = self.time_embed(timestep_embedding(t, c.model_channels))  # (N, 4 * model_channels)
            if c.num_classes:
                emb = emb + self.label_emb(y)
            if c.vector_dim:
                vectors, is_null = null_rows(vectors)
                emb = emb + self.vector_emb(vectors) + is_null * self.vector_null
            # Also the first layer, unlike published: bf16 is coarser near +-1 than the last steps' noise, which costs
            # 0.06 bits/dim on MNIST
            h = self.input_blocks[0](x_t, emb).to(dtype)
        skips = [h]
        for block in self.input_blocks[1:]:
            h = run_block(c, block, h, emb)
            skips.append(h)
        h = run_block(c, self.middle_block, h, emb)
        for block in self.output_blocks:
            h = run_block(c, block, h, emb, skips.pop())
        with no_autocast(x_t):
            return self.out(h.float())

    def parts(self) -> list[nn.Module]:
        """Modules that torch.compile compiles separately."""
        blocks = [m for m in self.modules() if isinstance(m, ResBlock | AttentionBlock)]
        return [*blocks, self.out]
