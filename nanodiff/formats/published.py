"""Key maps of published weights: Meta's DiT, diffusers' DiTTransformer2DModel, OpenAI's improved-diffusion UNet.

`from_*` gives our config, read off names and shapes, and our state dict, or raises one of FAULTS; `to_*` gives theirs.
"""

import math

import torch

from nanodiff.common import UserError
from nanodiff.models.dit import DiTConfig, sincos_table
from nanodiff.models.unet import UNetConfig

# (our part of a name, theirs), applied in this order, and in reverse on the way back
META = (
    ("final.", "final_layer."), (".ada.", ".adaLN_modulation.1."), (".fc", ".mlp.fc"), (".proj.", ".attn.proj."),
    (".qkv.", ".attn.qkv."), ("y_embed.", "y_embedder.embedding_table."), ("t_embed.", "t_embedder.mlp."),
    ("patch_embed.", "x_embedder.proj."),
)  # fmt: skip
DIFFUSERS = (
    (".proj.", ".attn1.to_out.0."), (".fc1.", ".ff.net.0.proj."), (".fc2.", ".ff.net.2."),
    ("final.ada.", "proj_out_1."), ("final.linear.", "proj_out_2."), (".ada.", ".norm1.linear."),
    ("blocks.", "transformer_blocks."), ("patch_embed.", "pos_embed.proj."),
    ("t_embed.0.", "timestep_embedder.linear_1."), ("t_embed.2.", "timestep_embedder.linear_2."),
    ("y_embed.", "class_embedder.embedding_table."),
)  # fmt: skip
META_HEADS = {384: 6, 768: 12, 1024: 16, 1152: 16}  # by width: DiT-S, B, L, XL


def rename(name: str, pairs) -> str:
    for old, new in pairs:
        name = name.replace(old, new)
    return name


def from_meta(state_dict: dict, heads: int = 0, tokens: int = 0) -> tuple[DiTConfig, dict]:
    """For `DiT-XL-2-256x256.pt`. heads=0: by width, as in DiT-S to XL, or width / 64; tokens=0 a side: by pos_embed."""
    width, in_channels, patch_size, _ = state_dict["x_embedder.proj.weight"].shape
    classes = state_dict.get("y_embedder.embedding_table.weight")  # (num_classes + 1, width)
    config = DiTConfig(
        image_size=(tokens or math.isqrt(state_dict["pos_embed"].shape[1])) * patch_size,
        in_channels=in_channels,
        out_channels=state_dict["final_layer.linear.weight"].shape[0] // patch_size**2,
        patch_size=patch_size,
        width=width,
        depth=1 + max(int(name.split(".")[1]) for name in state_dict if name.startswith("blocks.")),
        heads=heads or META_HEADS.get(width, max(1, width // 64)),
        num_classes=0 if classes is None else len(classes) - 1,
        block="classic",
        mlp_ratio=state_dict["blocks.0.mlp.fc1.weight"].shape[0] / width,
    )
    to_ours = [(theirs, ours) for ours, theirs in reversed(META)]
    ours = {rename(name, to_ours): value for name, value in state_dict.items()}
    ours["patch_embed.weight"] = ours["patch_embed.weight"].flatten(1)  # (C, ch, p, p) -> (C, ch*p*p)
    if not tokens and not torch.allclose(ours.pop("pos_embed")[0].float(), sincos_table(config), atol=1e-4):
        raise UserError("pos_embed is not the fixed sin-cos table of the published DiT, the only one accepted")
    return config, ours


def to_meta(state_dict: dict, config: DiTConfig) -> dict:
    """The state dict of facebookresearch/DiT for a classic DiT."""
    theirs = {rename(name, META): value for name, value in unfold_patches(state_dict, config).items()}
    return {"pos_embed": sincos_table(config)[None]} | theirs


def unfold_patches(state_dict: dict, config: DiTConfig) -> dict:
    """The patch embedding as a convolution: (C, ch*p*p) -> (C, ch, p, p)."""
    weight = state_dict["patch_embed.weight"].unflatten(1, (-1, config.patch_size, config.patch_size))
    return state_dict | {"patch_embed.weight": weight}


def to_diffusers(state_dict: dict, config: DiTConfig) -> tuple[dict, dict]:
    """(config.json, state dict) for a classic DiT with classes and without low_res.

    diffusers embeds t with frequencies 10000^(-i/127), the published DiT and we with 10000^(-i/128): outputs are equal
    after `block.norm1.emb.time_proj.downscale_freq_shift = 0` in each of its blocks.
    """
    if config.mlp_hidden != 4 * config.width:
        raise UserError(f"mlp_ratio={config.mlp_ratio:g}; diffusers' DiT accepts only 4")
    theirs = {}
    for ours, value in unfold_patches(state_dict, config).items():
        name = rename(ours, DIFFUSERS)
        if ours.startswith(("t_embed.", "y_embed.")):  # each of their blocks holds a copy
            for i in range(config.depth):
                theirs[f"transformer_blocks.{i}.norm1.emb.{name}"] = value
        elif ".qkv." in ours:  # three matrices of theirs
            for part, rows in zip("qkv", value.chunk(3)):
                theirs[name.replace(".qkv.", f".attn1.to_{part}.")] = rows
        else:
            theirs[name] = value
    settings = dict(
        _class_name="DiTTransformer2DModel",
        num_attention_heads=config.heads,
        attention_head_dim=config.width // config.heads,
        in_channels=config.in_channels,
        out_channels=config.out_channels,
        num_layers=config.depth,
        sample_size=config.image_size,
        patch_size=config.patch_size,
        num_embeds_ada_norm=config.num_classes,
        norm_eps=1e-6,  # as published; their default is 1e-5
    )
    return settings, theirs


def from_diffusers(state_dict: dict, settings: dict) -> tuple[DiTConfig, dict]:
    """For a DiTTransformer2DModel and its config.json; t is embedded as published."""
    theirs = {}
    for name, value in state_dict.items():
        name = name.split(".norm1.emb.")[-1]
        if not torch.equal(value, theirs.setdefault(name, value)):
            raise UserError(f"{name} differs between blocks; accepted: copies of one")
    for name in [name for name in theirs if ".attn1.to_q." in name]:
        matrices = [theirs.pop(name.replace("to_q", f"to_{part}")) for part in "qkv"]
        theirs[name.replace("attn1.to_q", "qkv")] = torch.cat(matrices)
    pairs = [(new, old) for old, new in reversed(DIFFUSERS)]
    theirs = {rename(name, (*pairs, *META)): value for name, value in theirs.items()}
    return from_meta(theirs, settings["num_attention_heads"], settings["sample_size"] // settings["patch_size"])


def from_improved_diffusion(state_dict: dict, image_size: int = 0, num_heads: int = 0) -> tuple[UNetConfig, dict]:
    """For `ema_0.9999_500000.pt`. The names are ours, but attention is Conv1d there.

    image_size=0: attention starts at 16 pixels, as published. num_heads=0: 4, or LSUN's 1. Six input channels mean
    super-resolution from a quarter of the size.
    """
    shapes = {name: tuple(p.shape) for name, p in state_dict.items()}
    width, channels = shapes["input_blocks.0.0.weight"][:2]
    widths = [[]]  # of each level's residual blocks
    attention = set()  # levels
    for number in range(1, len(shapes)):
        if f"input_blocks.{number}.0.op.weight" in shapes:  # downsamples
            widths.append([])
        elif conv := shapes.get(f"input_blocks.{number}.0.in_layers.2.weight"):
            widths[-1].append(conv[0])
        if f"input_blocks.{number}.1.qkv.weight" in shapes:
            attention.add(len(widths) - 1)
    if not (image_size or attention):
        raise UserError("image_size=0: this state dict has no attention to infer it from; accepted: the size in pixels")
    image_size = image_size or 16 << min(attention)
    scale_shift = shapes["input_blocks.1.0.emb_layers.1.weight"][0] == 2 * widths[0][0]
    config = UNetConfig(
        image_size=image_size,
        in_channels=3 if channels == 6 else channels,
        out_channels=shapes["out.2.weight"][0],
        model_channels=width,
        num_res_blocks=len(widths[0]),
        attention_resolutions=tuple(image_size >> level for level in sorted(attention)),
        channel_mult=tuple(level[0] // width for level in widths),
        num_heads=num_heads or (4 if scale_shift else 1),
        num_classes=shapes.get("label_emb.weight", (0,))[0],
        null_class=False,
        use_scale_shift_norm=scale_shift,
        low_res=image_size // 4 if channels == 6 else 0,
    )
    return config, {name: p.squeeze(-1) if p.ndim == 3 else p for name, p in state_dict.items()}


def to_improved_diffusion(state_dict: dict, config: UNetConfig) -> dict:
    """The state dict of openai/improved-diffusion, without the null class, which its table lacks."""
    theirs = {}
    for name, p in state_dict.items():
        theirs[name] = p[..., None] if name.endswith(("qkv.weight", "proj_out.weight")) else p
    if config.num_classes:
        theirs["label_emb.weight"] = theirs["label_emb.weight"][: config.num_classes].clone()  # saving a view saves all
    return theirs
