"""Published weights: Meta's DiT, SiT, REPA, diffusers' DiTTransformer2DModel, OpenAI's improved-diffusion UNet.

`from_*` returns our config, inferred from names and shapes, and our state dict; a foreign dict raises any exception.
`to_*` returns the published state dict.
"""

import math
import re
from dataclasses import asdict, replace
from pathlib import Path

import torch

from nanodiff.common import Tensors, UserError, print0
from nanodiff.conditions import DataInfo
from nanodiff.files import read_json
from nanodiff.models.build import model_settings
from nanodiff.models.dit import DiTConfig, position_table
from nanodiff.models.unet import UNetConfig

# Part of our name -> of the published one. Replaced in this order, and in reverse on the way back
META = dict(
    pair.split("=")
    for pair in """
    final.=final_layer.
    .ada.=.adaLN_modulation.1.
    .fc=.mlp.fc
    .proj.=.attn.proj.
    .qkv.=.attn.qkv.
    y_embed.=y_embedder.embedding_table.
    t_embed.=t_embedder.mlp.
    patch_embed.=x_embedder.proj.
    """.split()
)
DIFFUSERS = dict(
    pair.split("=")
    for pair in """
    .proj.=.attn1.to_out.0.
    .fc1.=.ff.net.0.proj.
    .fc2.=.ff.net.2.
    final.ada.=proj_out_1.
    final.linear.=proj_out_2.
    .ada.=.norm1.linear.
    blocks.=transformer_blocks.
    patch_embed.=pos_embed.proj.
    t_embed.0.=timestep_embedder.linear_1.
    t_embed.2.=timestep_embedder.linear_2.
    y_embed.=class_embedder.embedding_table.
    """.split()
)
GAUSSIAN = {
    "noise_schedule": "linear",
    "num_timesteps": 1000,
    "rescale_timesteps": False,
    "variance": "fixed_large",
}
OPTIONS = {  # the settings that each form lacks (options.py), and what the published models have; 0 = by the weights
    "meta": {"heads": 0, "label_drop": 0.1, **GAUSSIAN, "objective": "eps"},
    "sit": {"heads": 0, "label_drop": 0.1, "objective": "flow", "time_input": "1-t"},
    "diffusers": GAUSSIAN,
    "openai": {"heads": 0, "num_heads_upsample": 0, "image_size": 0, **GAUSSIAN},
}
NO_MODEL = "holds no model or adapters of ours and no published model, or not all of one"
HEADS = {384: 6, 768: 12, 1024: 16, 1152: 16}  # by width: DiT-S, B, L, XL
# Fields of diffusers' configs that our model and process fix, and their only accepted values
ACCEPTED = """
    _class_name=DiTTransformer2DModel _class_name=Transformer2DModel activation_fn=gelu-approximate
    norm_type=ada_norm_zero norm_eps=1e-05 norm_eps=1e-06 norm_elementwise_affine=False attention_bias=True
    prediction_type=epsilon num_train_timesteps=1000 beta_schedule=linear beta_schedule=squaredcos_cap_v2
    beta_start=0.0001 beta_end=0.02 trained_betas=None rescale_betas_zero_snr=False
    """.split()
# One name of each form, after a prefix such as DDP's
FIRST = re.compile(r"(?m)^(.*\.|)(x_embedder\.proj|pos_embed\.proj|input_blocks\.0\.0)\.weight$")
SIT = re.compile("(?i)(?<![a-z])(sit|repa)(?![a-z])(?!.*(?<![a-z])dit(?![a-z]))")  # in a path, with no DiT after it
# Fields of a config that no published form holds: they change nothing, or names of weights show them
NOT_HELD = "checkpointing dropout null_class attention_resolutions given_channels".split()


def renamed(tensors: Tensors, old_parts, new_parts) -> Tensors:
    for old, new in zip(old_parts, new_parts):
        tensors = {name.replace(old, new): x for name, x in tensors.items()}
    return tensors


# ---------------------------------------------------------------------------------------------------------------------
# Forms: from_* gets all options of a file and ignores those of other forms


def from_meta(
    state_dict: Tensors,
    heads: int = 0,
    label_drop: float = 0.1,
    **unused,
) -> tuple[DiTConfig, Tensors]:
    """Config and state dict from `DiT-XL-2-256x256.pt`. heads=0: by width, as in DiT-S to XL."""
    tensors = renamed(state_dict, reversed(META.values()), reversed(META))
    if not label_drop and "y_embed.weight" in tensors:  # add the null class that our table has; it is never asked for
        classes = tensors["y_embed.weight"]
        tensors["y_embed.weight"] = torch.cat([classes, classes.mean(0, keepdim=True)])
    pos_embed = tensors.pop("pos_embed")[0]  # (tokens, C)
    config, tensors = from_classic(tensors, math.isqrt(len(pos_embed)), heads)
    # It may have been stored in bf16 before
    tolerance = max(1e-2, torch.finfo(pos_embed.dtype).eps)
    if not torch.allclose(pos_embed.float(), position_table(config, config.grid, config.grid), atol=tolerance):
        raise ValueError("pos_embed is not the fixed sin-cos table of the published DiT, the only one accepted")
    return config, tensors


def to_meta(state_dict: Tensors, config: DiTConfig) -> Tensors:
    """Turn the state dict of a classic DiT into that of facebookresearch/DiT."""
    tensors = renamed(state_dict, META, META.values())
    patches = tensors["x_embedder.proj.weight"].unflatten(1, (-1, config.patch_size, config.patch_size))
    pos_embed = position_table(config, config.grid, config.grid)[None]
    return {"pos_embed": pos_embed} | tensors | {"x_embedder.proj.weight": patches}


def from_sit(state_dict: Tensors, time_input: str, **options) -> tuple[DiTConfig, Tensors]:
    """Config and state dict from `SiT-XL-2-256x256.pt` or REPA's. If the network sees 1-t, its v points to the image.

    Only the first half of SiT's output channels was trained. REPA's projectors are used only in training.
    """
    sit = {name: x for name, x in state_dict.items() if "projectors." not in name}
    config, tensors = from_meta(sit, **options)
    for name in ("final.linear.weight", "final.linear.bias"):
        pixels = tensors[name].unflatten(0, (config.patch_size**2, -1))  # (p p, out_channels, ...)
        rows = pixels[:, : config.in_channels].flatten(0, 1)
        tensors[name] = -rows if time_input == "1-t" else rows
    return replace(config, out_channels=config.in_channels), tensors


def from_classic(tensors: Tensors, tokens: int, heads: int) -> tuple[DiTConfig, Tensors]:
    """Config and state dict of a published DiT with `tokens` per side, from its weights under our names. The patch
    embedding, a convolution (C, ch, p, p), becomes a linear layer.
    """
    patches = tensors["patch_embed.weight"]
    width, in_channels, patch_size, _ = patches.shape
    heads = heads or HEADS.get(width)
    if not heads:
        raise UserError(f"a DiT of width {width} is not one of the published ({HEADS}): add its heads, FILE,heads=...")
    config = DiTConfig(
        image_size=tokens * patch_size,
        in_channels=in_channels,
        out_channels=len(tensors["final.linear.weight"]) // patch_size**2,
        patch_size=patch_size,
        width=width,
        depth=sum(name.endswith(".qkv.weight") for name in tensors),
        heads=heads,
        num_classes=len(tensors.get("y_embed.weight", [0])) - 1,  # without the null class
        block="classic",
        mlp_ratio=len(tensors["blocks.0.fc1.weight"]) / width,
    )
    return config, tensors | {"patch_embed.weight": patches.flatten(1)}


def from_diffusers(
    state_dict: Tensors,
    sample_size: int,
    patch_size: int,
    num_attention_heads: int,
    **unused,
):
    """Config and state dict from a DiTTransformer2DModel and its config.json."""
    unique = {}
    for name, value in state_dict.items():
        name = name.split(".norm1.emb.")[-1]  # each of their blocks holds a copy of emb
        if not torch.equal(value, unique.setdefault(name, value)):
            raise ValueError(f"{name} differs between blocks; accepted: copies of one")
    tensors = renamed(unique, reversed(DIFFUSERS.values()), reversed(DIFFUSERS))
    for name in [name for name in tensors if ".attn1.to_q." in name]:
        matrices = [tensors.pop(name.replace("to_q", f"to_{part}")) for part in "qkv"]
        tensors[name.replace("attn1.to_q", "qkv")] = torch.cat(matrices)
    print0(
        "note: t is embedded as in the published DiT, with frequencies 10000^(-i/128); diffusers' code has "
        "10000^(-i/127): its predictions differ from these"
    )
    return from_classic(tensors, sample_size // patch_size, num_attention_heads)


def from_openai(
    state_dict: Tensors,
    image_size: int,
    heads: int,
    num_heads_upsample: int = 0,
    **unused,
) -> tuple[UNetConfig, Tensors]:
    """Config and state dict from `ema_0.9999_500000.pt`. It has our names, but attention as Conv1d.

    image_size=0: attention starts at 16 pixels, as published. heads=0: 4, or LSUN's 1. Six input channels mean
    super-resolution from a quarter of the size.
    """
    model_channels, in_channels = state_dict["input_blocks.0.0.weight"].shape[:2]
    widths = [[]]  # widths of each level's residual blocks
    attention = set()  # levels
    for number in range(1, len(state_dict)):
        block = f"input_blocks.{number}."
        conv = state_dict.get(f"{block}0.in_layers.2.weight")
        if conv is not None:
            widths[-1].append(len(conv))
        elif f"{block}0.op.weight" in state_dict:  # downsamples
            widths.append([])
        if f"{block}1.qkv.weight" in state_dict:
            attention.add(len(widths) - 1)
    if not (image_size or attention):
        raise ValueError("image_size=0, but there is no attention to infer it from; accepted: the size in pixels")
    image_size = image_size or 16 << min(attention)
    scale_shift = len(state_dict["input_blocks.1.0.emb_layers.1.weight"]) == 2 * widths[0][0]
    low_res = 0
    if in_channels == 6:
        in_channels = 3
        low_res = image_size // 4
    config = UNetConfig(
        image_size=image_size,
        in_channels=in_channels,
        out_channels=len(state_dict["out.2.weight"]),
        model_channels=model_channels,
        num_res_blocks=len(widths[0]),
        attention_resolutions=tuple(image_size >> level for level in sorted(attention)),
        channel_mult=tuple(level[0] // model_channels for level in widths),
        num_heads=heads or (4 if scale_shift else 1),
        num_heads_upsample=num_heads_upsample,
        num_classes=len(state_dict.get("label_emb.weight", ())),
        null_class=False,
        use_scale_shift_norm=scale_shift,
        low_res=low_res,
    )
    return config, with_attention(state_dict)


def to_openai(state_dict: Tensors, config: UNetConfig) -> Tensors:
    """Turn the state dict of a UNet into that of openai/improved-diffusion, which has no null class or image."""
    tensors = with_attention(state_dict, 1)
    if config.num_classes and config.null_class:
        tensors["label_emb.weight"] = tensors["label_emb.weight"][:-1]
        print0("note: the null class is dropped, as OpenAI's UNet has none: the file's samples cannot be guided")
    if config.given_channels:
        print0("note: the null image is dropped, too: samples always need a small image")
        tensors["input_blocks.0.0.weight"] = tensors["input_blocks.0.0.weight"][:, :-1].clone()
    return tensors


def with_attention(state_dict: Tensors, *width: int) -> Tensors:
    """The state dict with attention's matrices as (out, in) or, for `width` 1, as Conv1d's (out, in, 1)."""
    tensors = dict(state_dict)
    for name, p in state_dict.items():
        if name.endswith(("qkv.weight", "proj_out.weight")):
            tensors[name] = p.reshape(*p.shape[:2], *width)
    return tensors


# ---------------------------------------------------------------------------------------------------------------------
# Files


def scheduler_settings(path: Path, config: dict) -> dict:
    """The settings that the scheduler of diffusers' pipeline holds, if any. UserError if it or config differ from what
    our form fixes."""
    scheduler = path.parent.with_name("scheduler") / "scheduler_config.json"
    settings = {}
    if scheduler.exists():
        config = {"beta_schedule": "none"} | read_json(scheduler) | config
        schedule = config["beta_schedule"].replace("squaredcos_cap_v2", "cosine")
        settings = {"num_timesteps": 1000, "noise_schedule": schedule}
    for name, value in config.items():
        values = [text for text in ACCEPTED if text.startswith(f"{name}=")]
        if values and f"{name}={value}" not in values:
            raise UserError(f"{path} comes with {name}={value}; accepted: {', '.join(values)}")
    return settings


FORMS = {"meta": from_meta, "sit": from_sit, "diffusers": from_diffusers, "openai": from_openai}


def read_published(path: Path, content: dict, options: dict) -> tuple[dict, Tensors]:
    """(meta, tensors) of Meta's DiT, SiT, REPA, diffusers' DiT or improved-diffusion's UNet.

    `content`: the state dict, or a training checkpoint with one; names may have a prefix, such as DDP's. `options`: see
    options.py; the others are those of the published models, and meta["note"] says so.
    """
    tensors = content
    averages = [key for key in content if "ema" in f"{key}".lower()]  # model_ema, state_dict_ema, ema_0.9999, ...
    for key in (*averages, "model", "state_dict"):
        part = tensors.get(key)
        if part and isinstance(part, dict):
            tensors = part
    tensors = {f"{name}".replace("_orig_mod.", ""): x for name, x in tensors.items()}  # torch.compile's
    copies = FIRST.findall("\n".join(tensors))
    if not copies:
        raise UserError(f"{path} {NO_MODEL}; it has {', '.join([*tensors][:5]) or 'nothing'}")
    prefix, first = max(copies, key=lambda copy: "ema" in copy[0])
    num_tensors = len(tensors)
    tensors = {name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)}
    note = ""
    for name, x in tensors.items():
        if not x.is_floating_point():
            raise UserError(f"{path} has {name} in {x.dtype}; accepted: floats")
    if len(tensors) < num_tensors:
        note = f"note: {path}: {len(tensors)} of its {num_tensors} tensors are read, {prefix}*\n"

    args = content.get("args")  # of Meta's training
    if len(tensors.get("y_embedder.embedding_table.weight", ())) == getattr(args, "num_classes", 1):
        options = {"label_drop": 0.0} | options  # no null class
    if hasattr(args, "path_type"):
        if f"{args.path_type}, {args.prediction}".lower() not in ("linear, velocity", "linear, v"):
            raise UserError(f"{path} is SiT's, of {args.path_type}, {args.prediction}; accepted: Linear, velocity")
        options = {"objective": "flow"} | options
    options = content.get("nanodiff", {}) | options
    form = "openai"
    sizes = {}
    is_repa = "projectors.0.0.weight" in tensors
    if first == "x_embedder.proj":
        if "objective" not in options and (is_repa or SIT.search(str(path.absolute()))):
            raise UserError(
                f"{path} does not say what it predicts: {path.name},objective=...; "
                "accepted: objective=flow (SiT, REPA), objective=eps (DiT)"
            )
        form = "sit" if options.get("objective") == "flow" else "meta"
    elif first == "pos_embed.proj":
        form = "diffusers"
        sizes = read_json(path.with_name("config.json"))
        options = scheduler_settings(path, sizes) | options
    form_options = OPTIONS[form]
    for name in options.keys() - form_options:
        raise UserError(f"{path} is read without {name}={options[name]}; accepted: {', '.join(sorted(form_options))}")
    defaults = {
        "label_drop": 0.1,
        "objective": "eps",
        "timesteps": "uniform",
        "timestep_shift": 1.0,
    } | form_options
    if is_repa:
        defaults["time_input"] = "t"
    model_config, tensors = FORMS[form](tensors, **defaults | options | sizes)
    channels = model_config.in_channels
    num_classes = model_config.num_classes
    if model_config.out_channels == 2 * channels:
        defaults["variance"] = "learned_range"
    if form == "openai":
        defaults["label_drop"] = 0.0  # the class table has no null class
        # The settings in improved-diffusion's README; only LSUN's models lack scale and shift
        if model_config.use_scale_shift_norm:
            defaults["num_timesteps"] = 4000
            if not model_config.low_res:
                defaults["noise_schedule"] = "cosine"
            defaults["rescale_timesteps"] = not num_classes
    config = defaults | options
    settings = config | asdict(model_config) | model_settings(model_config)
    missing = [f"{name}={settings[name]}" for name in form_options if name not in options]
    if missing:
        note += (
            f"note: {path} ({num_classes} classes) does not hold {', '.join(missing)}: taken as published; "
            f"to change: {path.name},NAME=..."
        )
    meta = {
        "step": 0,
        "ema": "as published",
        "arch": settings["arch"],
        "config": config,
        "model_config": model_config,
        "note": note.strip(),
        "data": DataInfo(
            kind="images" if channels <= 3 else "latents",
            channels=channels,
            resolution=model_config.image_size,
            num_classes=num_classes,
            class_names=[*map(str, range(num_classes))],
        ),
    }
    return meta, tensors


def to_published(form: str, source, tensors: Tensors) -> tuple[Tensors, dict]:
    """A Loaded model's `tensors` as the state dict of `form`, meta or openai, and the settings that the form does not
    hold (options.py). UserError if the file would be read as another model.
    """
    model_config = source.model.config
    settings = source.config | asdict(model_config) | model_settings(model_config)
    is_meta = form == "meta"
    arch = "dit_classic" if is_meta else "unet"
    if settings["arch"] != arch or (is_meta and not source.num_classes):
        raise UserError(
            f"{source.source} is {settings['arch']} of {source.num_classes} classes; "
            "accepted: form=meta for dit_classic with classes, form=openai for unet"
        )
    data = source.data
    if data.kind == "arrays" or len({*(data.latents or {}).get("scale", ())}) > 1:
        raise UserError(
            f"form={form} holds no range of arrays and no statistics of latents; "
            "accepted: 8-bit images, or latents of --latent_norm=scale"
        )
    process = f"{settings['objective']}, {settings.get('variance')}"
    if not process.startswith("eps") or process == "eps, learned":  # else sampled wrongly
        raise UserError(f"form={form} is read as objective=eps, variance fixed or learned_range, not {process}")
    result = to_meta(tensors, model_config) if is_meta else to_openai(tensors, model_config)
    if is_meta and not settings["label_drop"]:  # then the published table has no null class
        result["y_embedder.embedding_table.weight"] = result["y_embedder.embedding_table.weight"][:-1]
    options = {name: settings[name] for name in OPTIONS[form]}
    config_read, _ = FORMS[form](result, **options)
    for name, value in asdict(model_config).items():
        if name not in NOT_HELD and getattr(config_read, name) != value:
            raise UserError(f"form={form} cannot hold {model_config}: it is read as {config_read}")
    return result, options
