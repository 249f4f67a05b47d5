"""Latent autoencoders in plain torch, read from their published files: Stable Diffusion's VAE and the tiny TAESD.

Both are frozen: a diffusion model learns their normalised latents (data/codec.py).
"""

import hashlib
import json
import re
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from nanodiff.common import UserError
from nanodiff.files import load_tensors, reading
from nanodiff.safetensors import load_safetensors

# Pixels per forward pass. The SD VAE's decoder takes 4.2 KB per pixel: 4 GB on a GPU. A CPU is fastest with one 256 px
# image at a time (tiny encoder: 3.7 s for 8 images instead of 6.6 s).
MAX_PIXELS = {"cpu": 2**16, "cuda": 2**20, "mps": 2**18}


class Autoencoder(nn.Module):
    """Base class; a subclass has `moments(x) -> (mean, std)` and `reconstruct(z) -> x`."""

    downsample = 8  # pixels per latent pixel, along a side
    scale, shift = 1.0, 0.0  # published normalisation: (z - shift) * scale
    parts = 2  # mean and std; 1 = mean alone, std is zero
    name = sha256 = ""  # the weight file's

    @torch.no_grad()
    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Images (N, 3, H, W) in [-1, 1] -> mean and std of the latents, each (N, C, H/8, W/8) in fp32."""
        H, W = x.shape[2:]
        if H % self.downsample or W % self.downsample:
            raise UserError(f"image of {W}x{H} px: {self.name} needs multiples of {self.downsample} px")
        x = x.contiguous(memory_format=torch.channels_last)
        batch = max(1, MAX_PIXELS[x.device.type] // (H * W))
        means, stds = zip(*[self.moments(part) for part in x.split(batch)])
        return torch.cat(means).float(), torch.cat(stds).float()

    @torch.no_grad()
    def decode(self, z: torch.Tensor) -> torch.Tensor:
        """Latents (N, C, h, w) -> images (N, 3, 8h, 8w) in fp32; about [-1, 1], not clamped."""
        pixels = z.shape[2] * z.shape[3] * self.downsample**2
        batch = max(1, MAX_PIXELS[z.device.type] // pixels)
        return torch.cat([self.reconstruct(part).float() for part in z.split(batch)])


# ---------------------------------------------------------------------------------------------------------------------
# AutoencoderKL: Rombach et al. 2022 (latent diffusion). Module names are diffusers'.


def conv3(c_in: int, c_out: int, padding: int = 1, **kwargs) -> nn.Conv2d:
    return nn.Conv2d(c_in, c_out, 3, padding=padding, **kwargs)


def named(**layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(layers))


class ResnetBlock(nn.Module):
    def __init__(self, c_in: int, c_out: int, groups: int):
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, c_in, eps=1e-6)
        self.conv1 = conv3(c_in, c_out)
        self.norm2 = nn.GroupNorm(groups, c_out, eps=1e-6)
        self.conv2 = conv3(c_out, c_out)
        self.conv_shortcut = nn.Conv2d(c_in, c_out, 1) if c_in != c_out else nn.Identity()

    def forward(self, x):
        h = self.conv1(F.silu(self.norm1(x)))
        return self.conv_shortcut(x) + self.conv2(F.silu(self.norm2(h)))


class Attention(nn.Module):
    """Self-attention over all positions, with one head."""

    def __init__(self, channels: int, groups: int):
        super().__init__()
        self.group_norm = nn.GroupNorm(groups, channels, eps=1e-6)
        self.to_q = nn.Linear(channels, channels)
        self.to_k = nn.Linear(channels, channels)
        self.to_v = nn.Linear(channels, channels)
        self.to_out = nn.Sequential(nn.Linear(channels, channels))

    def forward(self, x):
        h = self.group_norm(x).flatten(2).mT[:, None]  # (N, 1 head, H*W, C)
        h = F.scaled_dot_product_attention(self.to_q(h), self.to_k(h), self.to_v(h))
        return x + self.to_out(h)[:, 0].mT.reshape(x.shape)


class MidBlock(nn.Module):
    def __init__(self, channels: int, groups: int):
        super().__init__()
        self.attentions = nn.ModuleList([Attention(channels, groups)])
        self.resnets = nn.ModuleList(ResnetBlock(channels, channels, groups) for _ in range(2))

    def forward(self, x):
        return self.resnets[1](self.attentions[0](self.resnets[0](x)))


def levels(widths, blocks: int, groups: int, name: str, resample) -> nn.Sequential:
    """`blocks` residual blocks per width; after each width but the last, `resample(width)` under `name`."""
    out = nn.Sequential()
    c_in = widths[0]
    for i, width in enumerate(widths):
        resnets = nn.Sequential()
        for _ in range(blocks):
            resnets.append(ResnetBlock(c_in, width, groups))
            c_in = width
        level = named(resnets=resnets)
        if i < len(widths) - 1:
            level.add_module(name, nn.Sequential(resample(width)))
        out.append(level)
    return out


class AutoencoderKL(Autoencoder):
    """The VAE of Stable Diffusion; by default that of SD 1 and 2, 83.7 M parameters."""

    scale = 0.18215  # 1 / deviation of the latents, Rombach et al. 2022, appendix G

    def __init__(
        self,
        widths=(128, 256, 512, 512),
        blocks=2,
        latent_channels=4,
        groups=32,
        quant_conv=True,
    ):
        super().__init__()
        self.latent_channels = latent_channels
        self.downsample = 2 ** (len(widths) - 1)
        down = lambda c: named(pad=nn.ZeroPad2d((0, 1, 0, 1)), conv=conv3(c, c, stride=2, padding=0))
        up = lambda c: named(upsample=nn.Upsample(scale_factor=2), conv=conv3(c, c))
        first, last = widths[0], widths[-1]
        self.encoder = named(
            conv_in=conv3(3, first),
            down_blocks=levels(widths, blocks, groups, "downsamplers", down),
            mid_block=MidBlock(last, groups),
            conv_norm_out=nn.GroupNorm(groups, last, eps=1e-6),
            act=nn.SiLU(),
            conv_out=conv3(last, 2 * latent_channels),
        )
        self.decoder = named(
            conv_in=conv3(latent_channels, last),
            mid_block=MidBlock(last, groups),
            up_blocks=levels(widths[::-1], blocks + 1, groups, "upsamplers", up),
            conv_norm_out=nn.GroupNorm(groups, first, eps=1e-6),
            act=nn.SiLU(),
            conv_out=conv3(first, 3),
        )
        conv1 = lambda c: nn.Conv2d(c, c, 1) if quant_conv else nn.Identity()  # SD 3 and FLUX do without
        self.quant_conv = conv1(2 * latent_channels)
        self.post_quant_conv = conv1(latent_channels)

    def moments(self, x):
        mean, logvar = self.quant_conv(self.encoder(x)).chunk(2, dim=1)
        return mean, torch.exp(0.5 * logvar.float().clamp(-30, 20))

    def reconstruct(self, z):
        return self.decoder(self.post_quant_conv(z))


# ---------------------------------------------------------------------------------------------------------------------
# TinyAutoencoder: Bohan 2023, https://github.com/madebyollin/taesd. Module names are diffusers', without `layers`.


class TinyBlock(nn.Module):
    """Three convolutions and a skip, behind FLUX.2's normalised 1x1 bottleneck if `pool`."""

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
    """TAESD: 1.2 M parameters each way, distilled from a large VAE; std is zero, latents are normalised already.

    4 latent channels (SD, SDXL), 16 (SD 3, FLUX.1) or 32 with `mid_pool` (FLUX.2).
    """

    parts = 1

    def __init__(self, latent_channels: int = 4, mid_pool: bool = False):
        super().__init__()
        self.latent_channels = latent_channels
        width = 64
        blocks = lambda pool: [TinyBlock(width, pool) for _ in range(3)]
        encoder = [conv3(3, width), TinyBlock(width)]
        for pool in (False, False, mid_pool):
            encoder.append(conv3(width, width, stride=2, bias=False))
            encoder += blocks(pool)
        self.encoder = nn.Sequential(*encoder, conv3(width, latent_channels))
        decoder = [conv3(latent_channels, width), nn.ReLU()]
        for pool in (mid_pool, False, False):
            decoder += [*blocks(pool), nn.Upsample(scale_factor=2), conv3(width, width, bias=False)]
        self.decoder = nn.Sequential(*decoder, TinyBlock(width), conv3(width, 3))

    def moments(self, x):
        mean = self.encoder(x * 0.5 + 0.5)
        return mean, torch.zeros_like(mean)

    def reconstruct(self, z):
        z = torch.tanh(z / 3) * 3  # smoothly into (-3, 3), where the decoder was trained
        return self.decoder(z) * 2 - 1


# ---------------------------------------------------------------------------------------------------------------------
# Weight files

SUFFIXES = (".safetensors", ".bin", ".pth", ".pt", ".ckpt")
RENAMES = [  # from CompVis' names, TAESD's, and diffusers' before 0.18 (SD 1.5's VAE), to the names above
    (r"^decoder\.(\d+)", lambda m: f"decoder.{int(m[1]) - 1}"),  # TAESD counts the clamp of z as layer 0
    (r"^(encoder|decoder)\.layers\.", r"\1."),
    (r"\.(down|up)\.(\d+)\.block\.", r".\1_blocks.\2.resnets."),
    (r"\.(down|up)\.(\d+)\.\1sample\.", r".\1_blocks.\2.\1samplers.0."),
    (r"\.mid\.block_(\d)\.", lambda m: f".mid_block.resnets.{int(m[1]) - 1}."),
    (r"\.mid\.attn_1\.", ".mid_block.attentions.0."),
    (r"\.attentions\.0\.norm\.", ".attentions.0.group_norm."),
    (r"\.attentions\.0\.(q|k|v)(uery|ey|alue)?\.", r".attentions.0.to_\1."),
    (r"\.attentions\.0\.proj_(attn|out)\.", ".attentions.0.to_out.0."),
    (r"\.nin_shortcut\.", ".conv_shortcut."),
    (r"\.norm_out\.", ".conv_norm_out."),
]


def open_autoencoder(path: str | Path) -> Autoencoder:
    """The frozen autoencoder at `path`, in fp32 on the CPU; its shape is read off the weights.

    `path`: a weight file with diffusers' or CompVis' names (a whole SD checkpoint too), either file of a TAESD pair
    `*encoder.*`, `*decoder.*`, or a folder with one of these (if several, `diffusion_pytorch_model.*`). A config.json
    beside it sets scale, shift and the norms' groups. A pair's sha256 is that of `cat encoder decoder`.
    """
    path = Path(path)
    files = find_weights(path)
    first = next(iter(files.values()))
    settings = first.with_name("config.json")
    weights = {}
    digest = hashlib.sha256()
    with reading(path, "holds neither an SD VAE nor both halves of a TAESD"):
        for prefix, file in files.items():
            tensors = load_safetensors(file)[0] if file.suffix == ".safetensors" else load_tensors(file)
            tensors = tensors.get("state_dict", tensors)
            weights |= {prefix + name: w for name, w in tensors.items()}
            digest.update(np.memmap(file, np.uint8, "r"))
        weights = {name: w.to(torch.float32, copy=True) for name, w in rename(weights).items()}  # no views of the file
        config = json.loads(settings.read_text()) if settings.is_file() else {}
        with torch.device("meta"):
            ae = build(weights, config.get("norm_num_groups", 32))
        ae.load_state_dict(weights, assign=True)
        ae.scale = float(config.get("scaling_factor") or ae.scale)  # null in some files
        ae.shift = float(config.get("shift_factor") or ae.shift)
    ae.name = path.resolve().name
    if path.is_file():
        ae.name = re.sub(r"[-_.]encoder$", "", first.stem)
    ae.sha256 = digest.hexdigest()
    return ae.eval().requires_grad_(False)


def find_weights(path: Path) -> dict[str, Path]:
    """{"": file} or {"encoder.": file, "decoder.": file}, found as open_autoencoder says."""
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
        preferred = [file for file in files if file.stem == "diffusion_pytorch_model"]
        files = preferred[-1:] or files  # .safetensors if any
    if files:
        first = files[0]
        encoder = first.with_name(first.name.replace("decoder", "encoder"))
        decoder = first.with_name(first.name.replace("encoder", "decoder"))
        found = {"": first}
        if encoder != decoder and encoder.is_file() and decoder.is_file():
            found = {"encoder.": encoder, "decoder.": decoder}
        if set(files) <= set(found.values()):
            return found
    names = ", ".join(file.name for file in files) or f"no file ending in {', '.join(SUFFIXES)}"
    raise UserError(f"{path}: expected one weight file or one pair of encoder and decoder, found {names}")


def rename(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rename weights of any published layout to the names above; drop those of other networks."""
    weights = {name.removeprefix("first_stage_model."): w for name, w in weights.items()}
    levels_up = {name.split(".")[2] for name in weights if name.startswith("decoder.up.")}
    finest = len(levels_up) - 1
    renamed = {}
    for name, w in weights.items():
        if not name.startswith(("encoder.", "decoder.", "quant_conv.", "post_quant_conv.")):
            continue
        # CompVis counts the decoder's levels from the finest, diffusers from the coarsest
        name = re.sub(r"\.up\.(\d+)\.", lambda m: f".up.{finest - int(m[1])}.", name)
        for pattern, ours in RENAMES:
            name = re.sub(pattern, ours, name)
        if ".attentions.0.to_" in name and w.ndim == 4:  # CompVis': 1x1 convolutions
            w = w.flatten(1)
        renamed[name] = w
    return renamed


def build(weights: dict[str, torch.Tensor], groups: int) -> Autoencoder:
    """An autoencoder of the shape that the weights show."""
    if "encoder.0.weight" in weights:
        latent_channels = weights["decoder.0.weight"].shape[1]
        has_pool = any(".pool." in name for name in weights)
        return TinyAutoencoder(latent_channels, has_pool)
    latent_channels = weights["decoder.conv_in.weight"].shape[1]
    pattern = r"encoder\.down_blocks\.(\d)\.resnets\.(\d)\.conv1\.weight"
    convs = [name for name in sorted(weights) if re.fullmatch(pattern, name)]
    widths = [len(weights[name]) for name in convs if ".resnets.0." in name]
    blocks = len(convs) // len(widths)
    return AutoencoderKL(widths, blocks, latent_channels, groups, quant_conv="quant_conv.weight" in weights)
