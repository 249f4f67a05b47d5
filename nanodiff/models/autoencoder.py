"""Latent autoencoders in plain torch: the SD VAE (`AutoencoderKL`) and the tiny one (`TinyAutoencoder`, TAESD).

`open_autoencoder(path)` opens either from its published weight files. Both are frozen: a diffusion model is trained on
`normalize(mean + std * eps)` of what `encode` returns, and its samples go through `decode(unnormalize(z))`.
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
from nanodiff.safetensors import load_safetensors

# Of one forward; larger batches are sliced. The SD VAE in fp32 on a CPU: decoding one image of 512 px takes 1.04 GB,
# 4.2 KB a pixel, so that a slice on a GPU takes about 4 GB, and nothing needs to be cut into tiles. On a CPU one image
# of 256 px at a time is best: the tiny encoder took 4.5 s for 8 of them rather than 6.6 s, with channels last 3.7 s.
MAX_PIXELS = {"cpu": 2**16, "cuda": 2**20, "mps": 2**18}


class Autoencoder(nn.Module):
    """What both share: `encode`, `decode`, `normalize`, `unnormalize`, and their facts.

    `downsample` (pixels per latent along a side), `latent_channels`, `scale`, `shift`, `parts` (2 = mean and std of a
    latent, 1 = mean alone, std being zero); after `open_autoencoder` also
    `name` and `sha256` of the weights. A subclass gives `moments(x) -> (mean, std)` and `reconstruct(z) -> x`.
    """

    downsample, latent_channels, scale, shift, parts, name, sha256 = 8, 4, 1.0, 0.0, 2, "", ""

    @torch.no_grad()
    def encode(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Images (N, 3, H, W) in [-1, 1] -> mean and std of the latents, each (N, C, H/8, W/8) in fp32.

        Raises UserError where a side is no multiple of `downsample`. Slices the batch to bound the memory.
        """
        if x.shape[2] % self.downsample or x.shape[3] % self.downsample:
            raise UserError(
                f"image of {x.shape[3]}x{x.shape[2]} px: {self.name} needs multiples of {self.downsample} px"
            )
        x = x.contiguous(memory_format=torch.channels_last)
        batch = max(1, MAX_PIXELS[x.device.type] // (x.shape[2] * x.shape[3]))
        parts = [self.moments(part) for part in x.split(batch)]
        return tuple(torch.cat(each).float() for each in zip(*parts))

    @torch.no_grad()
    def decode(self, z: torch.Tensor) -> torch.Tensor:
        """Latents (N, C, h, w) -> images (N, 3, 8h, 8w) in fp32; about [-1, 1], not clamped."""
        pixels = z.shape[2] * z.shape[3] * self.downsample**2
        return torch.cat(
            [self.reconstruct(part).float() for part in z.split(max(1, MAX_PIXELS[z.device.type] // pixels))]
        )

    def normalize(self, z: torch.Tensor) -> torch.Tensor:
        """Latents as encoded -> latents of about unit deviation, which a diffusion model is trained on."""
        return (z - self.shift) * self.scale

    def unnormalize(self, z: torch.Tensor) -> torch.Tensor:
        """The inverse of `normalize`."""
        return z / self.scale + self.shift


# ---------------------------------------------------------------------------------------------------------------------
# AutoencoderKL: Rombach et al. 2022 (latent diffusion). Module names are diffusers'.


def conv3(c_in: int, c_out: int, **kwargs) -> nn.Conv2d:
    return nn.Conv2d(c_in, c_out, 3, **{"padding": 1, **kwargs})


def named(**layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(layers))


class ResnetBlock(nn.Module):
    def __init__(self, c_in: int, c_out: int, groups: int):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(groups, c_in, eps=1e-6), conv3(c_in, c_out)
        self.norm2, self.conv2 = nn.GroupNorm(groups, c_out, eps=1e-6), conv3(c_out, c_out)
        self.conv_shortcut = nn.Conv2d(c_in, c_out, 1) if c_in != c_out else nn.Identity()

    def forward(self, x):
        h = self.conv1(F.silu(self.norm1(x)))
        return self.conv_shortcut(x) + self.conv2(F.silu(self.norm2(h)))


class Attention(nn.Module):
    """Self-attention of one head over all positions."""

    def __init__(self, channels: int, groups: int):
        super().__init__()
        self.group_norm = nn.GroupNorm(groups, channels, eps=1e-6)
        self.to_q, self.to_k, self.to_v = (nn.Linear(channels, channels) for _ in range(3))
        self.to_out = nn.Sequential(nn.Linear(channels, channels))

    def forward(self, x):
        h = self.group_norm(x).flatten(2).mT[:, None]  # (N, 1 head, H*W, C)
        h = F.scaled_dot_product_attention(self.to_q(h), self.to_k(h), self.to_v(h))
        return x + self.to_out(h)[:, 0].mT.reshape(x.shape)


class MidBlock(nn.Module):
    def __init__(self, channels: int, groups: int):
        super().__init__()
        self.attentions = nn.ModuleList([Attention(channels, groups)])
        self.resnets = nn.ModuleList([ResnetBlock(channels, channels, groups) for _ in range(2)])

    def forward(self, x):
        return self.resnets[1](self.attentions[0](self.resnets[0](x)))


def levels(widths, blocks: int, groups: int, **resampler) -> nn.Sequential:
    """`blocks` residual blocks at each width in turn; after all but the last width a `resampler`, name=function."""
    out = nn.Sequential()
    for i, (c_in, width) in enumerate(zip((widths[0], *widths), widths)):
        resnets = nn.Sequential(*(ResnetBlock(width if j else c_in, width, groups) for j in range(blocks)))
        change = {name: nn.Sequential(make(width)) for name, make in resampler.items() if i < len(widths) - 1}
        out.append(named(resnets=resnets, **change))
    return out


class AutoencoderKL(Autoencoder):
    """The VAE of Stable Diffusion. The defaults are SD 1's and 2's: 83.7 M parameters, f=8, 4 channels, 0.18215."""

    scale = 0.18215  # 1 / deviation of the latents, Rombach et al. 2022, appendix G

    def __init__(self, widths=(128, 256, 512, 512), blocks=2, latent_channels=4, groups=32, quant_conv=True):
        super().__init__()
        self.latent_channels, self.downsample = latent_channels, 2 ** (len(widths) - 1)
        down = lambda c: named(pad=nn.ZeroPad2d((0, 1, 0, 1)), conv=conv3(c, c, stride=2, padding=0))
        up = lambda c: named(upsample=nn.Upsample(scale_factor=2), conv=conv3(c, c))
        first, last = widths[0], widths[-1]
        self.encoder = named(
            conv_in=conv3(3, first),
            down_blocks=levels(widths, blocks, groups, downsamplers=down),
            mid_block=MidBlock(last, groups),
            conv_norm_out=nn.GroupNorm(groups, last, eps=1e-6),
            act=nn.SiLU(),
            conv_out=conv3(last, 2 * latent_channels),
        )
        self.decoder = named(
            conv_in=conv3(latent_channels, last),
            mid_block=MidBlock(last, groups),
            up_blocks=levels(widths[::-1], blocks + 1, groups, upsamplers=up),
            conv_norm_out=nn.GroupNorm(groups, first, eps=1e-6),
            act=nn.SiLU(),
            conv_out=conv3(first, 3),
        )
        conv1 = lambda c: nn.Conv2d(c, c, 1) if quant_conv else nn.Identity()  # SD 3 and FLUX do without
        self.quant_conv, self.post_quant_conv = conv1(2 * latent_channels), conv1(latent_channels)

    def moments(self, x):
        mean, logvar = self.quant_conv(self.encoder(x)).chunk(2, dim=1)
        return mean, torch.exp(0.5 * logvar.float().clamp(-30, 20))

    def reconstruct(self, z):
        return self.decoder(self.post_quant_conv(z))


# ---------------------------------------------------------------------------------------------------------------------
# TinyAutoencoder: Bohan 2023, https://github.com/madebyollin/taesd. Module names are the published files'.


class TinyBlock(nn.Module):
    """Three convolutions and a skip, all of one width; `norm` adds FLUX.2's normalised 1x1 bottleneck in front."""

    def __init__(self, width: int, norm: bool = False):
        super().__init__()
        convs = [conv3(width, width) for _ in range(3)]
        self.conv = nn.Sequential(convs[0], nn.ReLU(), convs[1], nn.ReLU(), convs[2])
        up, down = (nn.Conv2d(a * width, b * width, 1, bias=False) for a, b in ((1, 4), (4, 1)))
        self.pool = nn.Sequential(up, nn.GroupNorm(4, 4 * width), nn.ReLU(), down) if norm else None

    def forward(self, x):
        x = x + self.pool(x) if self.pool else x
        return F.relu(self.conv(x) + x)


class SoftClamp(nn.Module):
    def forward(self, z):
        return torch.tanh(z / 3) * 3  # smoothly into (-3, 3), where the decoder was trained


class TinyAutoencoder(Autoencoder):
    """TAESD: 1.2 M parameters each way (1.3 M with `mid_norm`), distilled from a large VAE; std is zero.

    4 latent channels (SD, SDXL), 16 (SD 3, FLUX.1) or 32 (FLUX.2, with `mid_norm`). TAESD learnt the latents as its
    teacher's diffusion model sees them, so scale is 1.
    """

    parts = 1

    def __init__(self, latent_channels: int = 4, mid_norm: bool = False, width: int = 64):
        super().__init__()
        self.latent_channels = latent_channels
        blocks = lambda n, norm=False: [TinyBlock(width, norm) for _ in range(n)]
        encoder = [conv3(3, width), *blocks(1)]
        for i in range(3):
            encoder += [conv3(width, width, stride=2, bias=False), *blocks(3, norm=mid_norm and i == 2)]
        self.encoder = nn.Sequential(*encoder, conv3(width, latent_channels))
        decoder = [SoftClamp(), conv3(latent_channels, width), nn.ReLU()]
        for i in range(3):
            mid = mid_norm and i == 0
            decoder += [*blocks(3, mid), nn.Upsample(scale_factor=2), conv3(width, width, bias=False)]
        self.decoder = nn.Sequential(*decoder, *blocks(1), conv3(width, 3))

    def moments(self, x):
        mean = self.encoder(x * 0.5 + 0.5)
        return mean, torch.zeros_like(mean)

    def reconstruct(self, z):
        return self.decoder(z) * 2 - 1


# ---------------------------------------------------------------------------------------------------------------------
# Weight files

SUFFIXES = (".safetensors", ".bin", ".pth", ".pt", ".ckpt")
RENAMES = [  # CompVis' names, and diffusers' before 0.18, to diffusers'
    (r"\.(down|up)\.(\d+)\.block\.", r".\1_blocks.\2.resnets."),
    (r"\.(down|up)\.(\d+)\.\1sample\.", r".\1_blocks.\2.\1samplers.0."),
    (r"\.mid\.block_1\.", ".mid_block.resnets.0."),
    (r"\.mid\.block_2\.", ".mid_block.resnets.1."),
    (r"\.mid\.attn_1\.", ".mid_block.attentions.0."),
    (r"\.attentions\.0\.norm\.", ".attentions.0.group_norm."),
    (r"\.attentions\.0\.(q|k|v)(uery|ey|alue)?\.", r".attentions.0.to_\1."),
    (r"\.attentions\.0\.proj_(attn|out)\.", ".attentions.0.to_out.0."),
    (r"\.nin_shortcut\.", ".conv_shortcut."),
    (r"\.norm_out\.", ".conv_norm_out."),
]


def open_autoencoder(path: str | Path) -> Autoencoder:
    """The frozen autoencoder, in fp32 on the CPU, whose weights are at `path`; its architecture is read off them.

    `path`: a weight file (diffusers' or CompVis' names, a whole SD checkpoint too); or either file of a pair
    `*encoder.*`, `*decoder.*` side by side (TAESD); or a folder with one such file or pair (if several, with
    `diffusion_pytorch_model.*`). A diffusers config.json beside it sets scale, shift and the norms' groups.
    `.sha256` is the file's; of a pair, that of `cat encoder decoder`. Raises UserError for anything else.
    """
    path = Path(path)
    files, weights, digest = find_weights(path), {}, hashlib.sha256()
    for file, half in zip(files, ("encoder.", "decoder.") if len(files) == 2 else ("",)):
        weights |= {half + key: w for key, w in read_weights(file).items()}
        digest.update(np.memmap(file, np.uint8, "r"))
    config = read_config(files[0].parent / "config.json")
    # Copied, since safetensors come as views of the file.
    weights = {key: w.to(torch.float32, copy=True) for key, w in rename(weights).items()}
    try:
        with torch.device("meta"):
            ae = build(weights, config.get("norm_num_groups", 32))
        ae.load_state_dict(weights, assign=True)
    except (KeyError, IndexError, ValueError, ArithmeticError) as error:  # other names, other ranks, a wrong `groups`
        raise UserError(f"{path}: neither an SD VAE nor both halves of a TAESD ({error})") from None
    except RuntimeError as error:
        raise UserError(f"{path}: {' '.join(str(error).split())[:300]}") from None
    ae.scale, ae.shift = config.get("scaling_factor", ae.scale), config.get("shift_factor", ae.shift)
    own = re.sub(r"[-_.]*encoder$", "", files[0].stem) if len(files) == 2 else files[0].stem
    ae.name = files[0].resolve().parent.name if path.is_dir() or not own else own
    ae.sha256 = digest.hexdigest()
    return ae.eval().requires_grad_(False)


def find_weights(path: Path) -> list[Path]:
    """[file] or [encoder, decoder], by the rule of `open_autoencoder`."""
    if not path.exists():
        raise UserError(f"{path}: no such file or folder")
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
    files = [file for file in files if file.stem == "diffusion_pytorch_model"][-1:] or files  # .safetensors before .bin
    found = set()
    for file in files:
        pair = [re.sub("(?<![a-z])(en|de)coder(?![a-z])", half, file.name) for half in ("encoder", "decoder")]
        pair = tuple(file.with_name(name) for name in pair)
        found.add(pair if pair[0] != pair[1] and pair[0].is_file() and pair[1].is_file() else (file,))
    if len(found) != 1:
        names = ", ".join(file.name for file in files) or f"no file ending in {', '.join(SUFFIXES)}"
        raise UserError(f"{path}: expected one weight file or one pair of encoder and decoder, found {names}")
    return list(*found)


def read_weights(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of one file; never unpickles anything but tensors and plain containers."""
    if file.suffix == ".safetensors":
        return load_safetensors(file)[0]
    try:
        weights = torch.load(file, map_location="cpu", weights_only=True)
        weights = weights.get("state_dict", weights)
        return {key: w for key, w in weights.items() if isinstance(w, torch.Tensor)}
    except Exception as error:  # torch.load raises a dozen kinds on a broken file
        raise UserError(f"{file}: no weights that torch.load can read safely ({type(error).__name__})") from None


def read_config(path: Path) -> dict[str, float]:
    """scaling_factor, shift_factor and norm_num_groups from diffusers' config.json, as far as it has them."""
    try:
        config = json.loads(path.read_text()) if path.is_file() else {}
        if not str(config.get("_class_name")).startswith("Autoencoder"):
            return {}  # another program's
        kinds = {"scaling_factor": float, "shift_factor": float, "norm_num_groups": int}
        return {key: kind(config[key]) for key, kind in kinds.items() if config.get(key) is not None}
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: not the config.json of an autoencoder: {error}") from None


def rename(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Weights under this module's names, from any of the published layouts; what is no autoencoder's is left out."""
    weights = {key.removeprefix("first_stage_model."): w for key, w in weights.items()}
    top = max((int(m[1]) for key in weights if (m := re.match(r"decoder\.up\.(\d+)\.", key))), default=0)
    renamed = {}
    for key, w in weights.items():
        if not re.match(r"(encoder|decoder|quant_conv|post_quant_conv)\.", key):
            continue
        # diffusers' AutoencoderTiny gives the soft clamp no number.
        key = re.sub(r"^encoder\.layers\.", "encoder.", key)
        key = re.sub(r"^decoder\.layers\.(\d+)", lambda m: f"decoder.{int(m[1]) + 1}", key)
        # CompVis counts the decoder's levels from the finest, diffusers from the coarsest.
        key = re.sub(r"\.up\.(\d+)\.", lambda m: f".up.{top - int(m[1])}.", key)
        for pattern, name in RENAMES:
            key = re.sub(pattern, name, key)
        renamed[key] = w.flatten(1) if ".attentions.0.to_" in key and w.ndim == 4 else w  # a 1x1 convolution is linear
    return renamed


def build(weights: dict[str, torch.Tensor], groups: int) -> Autoencoder:
    """A new autoencoder of the architecture that the weights' shapes tell; KeyError where they tell of none."""
    if "encoder.0.weight" in weights:
        return TinyAutoencoder(weights["decoder.1.weight"].shape[1], any(".pool." in key for key in weights))
    widths, blocks = [weights["encoder.conv_in.weight"].shape[0]], 0
    while (key := f"encoder.down_blocks.{len(widths) - 1}.resnets.0.conv1.weight") in weights:
        widths.append(weights[key].shape[0])
    while f"encoder.down_blocks.0.resnets.{blocks}.conv1.weight" in weights:
        blocks += 1
    latent_channels = weights["decoder.conv_in.weight"].shape[1]
    return AutoencoderKL(tuple(widths[1:]), blocks, latent_channels, groups, "quant_conv.weight" in weights)
