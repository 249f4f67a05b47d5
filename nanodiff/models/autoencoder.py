"""Latent autoencoders in plain torch, read from their published files: Stable Diffusion's VAE and the tiny TAESD.

Both are frozen: a diffusion model learns their normalised latents (data/codec.py).
"""

import json
import re
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanodiff.common import Tensors, UserError, at
from nanodiff.files import reading, sha256_of
from nanodiff.models.unet import conv3, named
from nanodiff.safetensors import read_tensors

# Pixels per forward pass. The SD VAE's decoder takes 4.2 KB per pixel: 4 GB on a GPU. A CPU is fastest with one 256 px
# image at a time (tiny encoder: 3.7 s for 8 images instead of 6.6 s).
MAX_PIXELS = {"cpu": 2**16, "cuda": 2**20, "mps": 2**18}


class Autoencoder(nn.Module):
    """Base class. A subclass has a `decoder`, and an `encoder` that gives mean and log variance, or the mean alone."""

    downsample = 8  # pixels per latent pixel, along a side
    scale = 1.0  # published normalisation: (z - shift) * scale
    shift = 0.0
    parts = 2  # mean and std; 1 = mean alone, std is zero
    name = ""  # of the weight file
    sha256 = ""

    @torch.no_grad()
    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Images (N, 3, H, W) in [-1, 1], sides multiples of `downsample` -> mean and std of the latents, each
        (N, C, H/downsample, W/downsample) in fp32."""
        x = x.contiguous(memory_format=torch.channels_last)
        out = in_slices(self.encoder, x, x[0, 0].numel())
        if self.parts == 1:
            return out, torch.zeros_like(out)
        mean, logvar = out.chunk(2, dim=1)
        return mean, torch.exp(0.5 * logvar.clamp(-30, 20))

    @torch.no_grad()
    def decode(self, z: Tensor) -> Tensor:
        """The inverse of encode, to fp32 images of about [-1, 1], not clamped."""
        return in_slices(self.decoder, z, z[0, 0].numel() * self.downsample**2)


def in_slices(network: nn.Module, x: Tensor, pixels: int) -> Tensor:
    """network(x) in fp32, MAX_PIXELS at a time; a row of x stands for an image of `pixels`."""
    batch = max(1, MAX_PIXELS[x.device.type] // pixels)
    return torch.cat([network(part).float() for part in x.split(batch)])


# ---------------------------------------------------------------------------------------------------------------------
# AutoencoderKL: Rombach et al. 2022 (latent diffusion)


def layer(c_in: int, c_out: int, groups: int) -> nn.Sequential:
    return nn.Sequential(
        nn.GroupNorm(groups, c_in, eps=1e-6),
        nn.SiLU(),
        conv3(c_in, c_out),
    )


class ResnetBlock(nn.Module):
    def __init__(self, c_in: int, c_out: int, groups: int):
        super().__init__()
        self.layer1 = layer(c_in, c_out, groups)
        self.layer2 = layer(c_out, c_out, groups)
        self.shortcut = nn.Conv2d(c_in, c_out, 1) if c_in != c_out else nn.Identity()

    def forward(self, x):
        return self.shortcut(x) + self.layer2(self.layer1(x))


class Attention(nn.Module):
    """Self-attention over all positions, with one head."""

    def __init__(self, channels: int, groups: int):
        super().__init__()
        self.norm = nn.GroupNorm(groups, channels, eps=1e-6)
        self.q = nn.Linear(channels, channels)
        self.k = nn.Linear(channels, channels)
        self.v = nn.Linear(channels, channels)
        self.out = nn.Linear(channels, channels)

    def forward(self, x):
        h = self.norm(x).flatten(2).mT[:, None]  # (N, 1 head, H*W, C)
        h = F.scaled_dot_product_attention(self.q(h), self.k(h), self.v(h))
        return x + self.out(h)[:, 0].mT.reshape(x.shape)


def middle(channels: int, groups: int) -> nn.Sequential:
    return nn.Sequential(
        ResnetBlock(channels, channels, groups),
        Attention(channels, groups),
        ResnetBlock(channels, channels, groups),
    )


def levels(widths, blocks: int, groups: int, resample) -> nn.Sequential:
    """`blocks` residual blocks per width; after each width but the last, `resample(width)`."""
    out = nn.Sequential()
    c_in = widths[0]
    for i, width in enumerate(widths):
        level = nn.Sequential()
        for _ in range(blocks):
            level.append(ResnetBlock(c_in, width, groups))
            c_in = width
        if i < len(widths) - 1:
            level.add_module("resample", resample(width))
        out.append(level)
    return out


class AutoencoderKL(Autoencoder):
    """Stable Diffusion's VAE. In SD 1 and 2: widths 128, 256, 512, 512, 2 blocks each, 83.7 M parameters."""

    scale = 0.18215  # 1 / deviation of the latents, Rombach et al. 2022, appendix G

    def __init__(self, widths, blocks: int, latent_channels: int, groups: int, quant_conv: bool):
        super().__init__()
        self.latent_channels = latent_channels
        self.downsample = 2 ** (len(widths) - 1)

        def down(c):
            return nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(c, c, 3, stride=2))

        def up(c):
            return nn.Sequential(nn.Upsample(scale_factor=2), conv3(c, c))

        def conv1(c):
            if quant_conv:
                return nn.Conv2d(c, c, 1)
            return nn.Identity()  # SD 3 and FLUX

        first = widths[0]
        last = widths[-1]
        self.encoder = named(
            conv_in=conv3(3, first),
            down_blocks=levels(widths, blocks, groups, down),
            middle=middle(last, groups),
            out=layer(last, 2 * latent_channels, groups),
            quant_conv=conv1(2 * latent_channels),
        )
        self.decoder = named(
            quant_conv=conv1(latent_channels),
            conv_in=conv3(latent_channels, last),
            middle=middle(last, groups),
            up_blocks=levels(widths[::-1], blocks + 1, groups, up),
            out=layer(first, 3, groups),
        )


# ---------------------------------------------------------------------------------------------------------------------
# TinyAutoencoder: Bohan 2023, https://github.com/madebyollin/taesd


class TinyBlock(nn.Module):
    """Three convolutions and a skip; before them, if `pool`, FLUX.2's 1x1 convolutions with a norm."""

    def __init__(self, width: int, pool: bool = False):
        super().__init__()
        self.conv = nn.Sequential(
            conv3(width, width),
            nn.ReLU(),
            conv3(width, width),
            nn.ReLU(),
            conv3(width, width),
        )
        self.pool = None
        if pool:
            self.pool = nn.Sequential(
                nn.Conv2d(width, 4 * width, 1, bias=False),
                nn.GroupNorm(4, 4 * width),
                nn.ReLU(),
                nn.Conv2d(4 * width, width, 1, bias=False),
            )

    def forward(self, x):
        if self.pool is not None:
            x = x + self.pool(x)
        return F.relu(self.conv(x) + x)


class TinyAutoencoder(Autoencoder):
    """TAESD: 1.2 M parameters each way, distilled from a large VAE. Its latents have std 0 and are already normalised.

    4 latent channels (SD, SDXL), 16 (SD 3, FLUX.1) or 32 with `mid_pool` (FLUX.2).
    """

    parts = 1

    def __init__(self, latent_channels: int, mid_pool: bool):
        super().__init__()
        self.latent_channels = latent_channels
        width = 64
        blocks = lambda pool: [TinyBlock(width, pool) for _ in range(3)]
        encoder = [conv3(3, width), TinyBlock(width)]
        for pool in (False, False, mid_pool):
            encoder += [conv3(width, width, stride=2, bias=False), *blocks(pool)]
        self.encoder = nn.Sequential(*encoder, conv3(width, latent_channels))
        decoder = [conv3(latent_channels, width), nn.ReLU()]
        for pool in (mid_pool, False, False):
            decoder += [*blocks(pool), nn.Upsample(scale_factor=2), conv3(width, width, bias=False)]
        self.decoder = nn.Sequential(*decoder, TinyBlock(width), conv3(width, 3))

    def encode(self, x):
        return super().encode(x * 0.5 + 0.5)

    def decode(self, z):
        z = torch.tanh(z / 3) * 3  # smoothly into (-3, 3), where the decoder was trained
        return super().decode(z) * 2 - 1


# ---------------------------------------------------------------------------------------------------------------------
# Weight files

RENAMES = {  # from the names of CompVis, TAESD, diffusers, and diffusers before 0.18 (SD 1.5's VAE) to those above
    r"^first_stage_model\.": "",  # in a whole SD checkpoint
    r"^decoder\.(\d+)": lambda m: f"decoder.{int(m[1]) - 1}",  # TAESD counts the clamp of z as layer 0
    r"^(encoder|decoder)\.layers\.": r"\1.",
    r"^quant_conv\.": "encoder.quant_conv.",
    r"^post_quant_conv\.": "decoder.quant_conv.",
    r"\.(down|up)\.": r".\1_blocks.",
    r"_blocks\.(\d)\.(block|resnets)\.": r"_blocks.\1.",
    r"\.(down|up)sample(rs\.0)?\.conv\.": ".resample.1.",
    r"\.(mid\.block_1|mid_block\.resnets\.0)\.": ".middle.0.",
    r"\.(mid\.attn_1|mid_block\.attentions\.0)\.": ".middle.1.",
    r"\.(mid\.block_2|mid_block\.resnets\.1)\.": ".middle.2.",
    r"\.group_norm\.": ".norm.",
    r"\.(?:to_)?([qkv])(?:uery|ey|alue)?\.": r".\1.",
    r"\.(proj_attn|proj_out|to_out\.0)\.": ".out.",
    r"\.(nin|conv)_shortcut\.": ".shortcut.",
    r"\.norm([12])\.": r".layer\1.0.",
    r"\.conv([12])\.": r".layer\1.2.",
    r"\.(conv_)?norm_out\.": ".out.0.",
    r"\.conv_out\.": ".out.2.",
}


def open_autoencoder(path: str | Path) -> Autoencoder:
    """The frozen autoencoder at `path`, in fp32 on the CPU; its shape is read off the weights.

    `path`: a weight file with the names of diffusers or CompVis (or a whole SD checkpoint), either file of a TAESD pair
    `*encoder.*`, `*decoder.*`, or diffusers' folder. A config.json beside the weights sets scale, shift and the norms'
    groups. A pair's sha256 is the hash of `cat encoder decoder`.
    """
    path = at(path)
    file = max(path.glob("diffusion_pytorch_model.*"), default=path)  # .safetensors if any
    if file.is_dir():
        raise UserError(f"{path} holds no diffusion_pytorch_model.*; accepted: diffusers' folder, or a file")
    encoder = file.with_name(file.name.replace("decoder", "encoder"))
    decoder = file.with_name(file.name.replace("encoder", "decoder"))
    files = {"": file}
    if encoder != decoder and encoder.is_file() and decoder.is_file():
        files = {"encoder.": encoder, "decoder.": decoder}
    settings = file.with_name("config.json")
    weights = {}
    with reading(path, "holds neither an SD VAE nor both halves of a TAESD"):
        for prefix, part in files.items():
            tensors, _ = read_tensors(part)
            for name, w in tensors.get("state_dict", tensors).items():
                weights[prefix + name] = w
        weights = rename(weights)
        config = json.loads(settings.read_text()) if settings.is_file() else {}
        with torch.device("meta"):
            ae = build(weights, config.get("norm_num_groups", 32))
        ae.load_state_dict(weights, assign=True)
        if not config and ae.parts == 2 and ae.latent_channels > 4:  # FLUX and SD 3 differ; 4: SD 1 and 2
            raise UserError(f"{path}: what is its scale? accepted: its config.json, with scaling_factor, beside it")
        ae.scale = float(config.get("scaling_factor") or ae.scale)  # null in some files
        ae.shift = float(config.get("shift_factor") or ae.shift)
    ae.name = path.resolve().name
    if file == path:
        ae.name = re.sub("[-_.](en|de)coder$", "", path.stem)
    ae.sha256 = sha256_of(*files.values())
    return ae.eval().requires_grad_(False)


def rename(weights: Tensors) -> Tensors:
    """Copy weights of any published layout, in fp32, under the names above; drop other networks' weights."""
    levels_up = {name.split("decoder.up.")[1][0] for name in weights if "decoder.up." in name}
    finest = len(levels_up) - 1
    tensors = {}
    for name, w in weights.items():
        # CompVis counts the decoder's levels from the finest, diffusers from the coarsest
        name = re.sub(r"\.up\.(\d+)\.", lambda m: f".up.{finest - int(m[1])}.", name)
        for pattern, new in RENAMES.items():
            name = re.sub(pattern, new, name)
        if ".middle.1." in name and w.ndim == 4:  # CompVis': 1x1 convolutions
            w = w.flatten(1)
        if name.startswith(("encoder.", "decoder.")):
            tensors[name] = w.to(torch.float32, copy=True)  # no view of the file
    return tensors


def build(weights: Tensors, groups: int) -> Autoencoder:
    """An autoencoder whose shape is read off the weights."""
    if "encoder.0.weight" in weights:
        mid_pool = any(".pool." in name for name in weights)
        return TinyAutoencoder(weights["decoder.0.weight"].shape[1], mid_pool)
    latent_channels = weights["decoder.conv_in.weight"].shape[1]
    pattern = r"encoder\.down_blocks\.\d\.\d\.layer1\.2\.weight"
    convs = [name for name in sorted(weights) if re.fullmatch(pattern, name)]
    widths = [len(weights[name]) for name in convs if ".0.layer1." in name]
    has_quant_conv = "encoder.quant_conv.weight" in weights
    blocks = len(convs) // len(widths)
    return AutoencoderKL(widths, blocks, latent_channels, groups, has_quant_conv)
