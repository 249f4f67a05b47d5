"""Build a backbone from settings (formats/load.py: from a checkpoint)."""

import contextlib
import sys

import torch

from nanodiff.common import UserError, print0
from nanodiff.device import why_not_compiled
from nanodiff.models.dit import DiT, DiTConfig
from nanodiff.models.unet import UNet, UNetConfig


def make_model_config(config: dict, facts: dict, out_channels: int) -> DiTConfig | UNetConfig:
    """The shape that the settings `config` ask for, on data with these `facts` (a codec's)."""
    low_res = config["low_res_size"]
    if low_res >= facts["resolution"]:
        raise UserError(f"low_res_size={low_res}; accepted: less than the images' {facts['resolution']} pixels")
    shape = dict(
        image_size=facts["resolution"],
        in_channels=facts["channels"],
        out_channels=out_channels,
        num_classes=facts["num_classes"] if config["class_cond"] else 0,
        low_res=low_res,
        checkpointing=config["checkpointing"],
    )
    if config["arch"] == "unet":
        given = config["attention_resolutions"]
        try:
            resolutions = tuple(int(r) for r in given.split(",") if r)
        except ValueError:
            raise UserError(f"attention_resolutions={given!r}; accepted: integers, comma-separated") from None
        shape |= {name: config[name] for name in ("num_res_blocks", "use_scale_shift_norm", "dropout")}
        shape |= dict(attention_resolutions=resolutions, num_heads=config["heads"] or 4)
        model_config = UNetConfig.from_depth(config["depth"], **shape)
    else:
        shape |= {name: config[name] for name in ("patch_size", "width", "heads")}
        block = "classic" if config["arch"] == "dit_classic" else "modern"
        model_config = DiTConfig.from_depth(config["depth"], block=block, **shape)
    check_sizes(model_config, facts)
    return model_config


def check_sizes(model_config: DiTConfig | UNetConfig, facts: dict) -> None:
    """UserError unless the model takes all sizes of the data."""
    unit = model_config.side_unit
    for height, width, _ in facts.get("sizes", []):
        if height % unit or width % unit:
            raise UserError(f"the data hold {height}x{width}; the model accepts multiples of {unit} (arch, patch_size)")
        if model_config.low_res:
            raise UserError(f"low_res_size={model_config.low_res}: the data hold {height}x{width}; accepted: squares")


def empty_model(model_config: DiTConfig | UNetConfig) -> torch.nn.Module:
    """The backbone on "meta": shapes without memory."""
    kind = UNet if isinstance(model_config, UNetConfig) else DiT
    with torch.device("meta"):
        return kind(model_config)


def build_model(model_config: DiTConfig | UNetConfig, device, seed: int) -> torch.nn.Module:
    """The backbone on `device`, initialised from `seed`."""
    model = empty_model(model_config).to_empty(device=device)
    model.init_weights(torch.Generator().manual_seed(seed))
    return model


def compile_model(model: torch.nn.Module, whole: bool = False, backend: str = "inductor") -> torch.nn.Module:
    """Compile the whole model, or its blocks in place, one by one; blocks of one shape share a graph at any depth."""
    from torch import _dynamo  # here, as it takes seconds
    from torch._inductor import config

    # By default compiling stops at the ninth graph of one forward(): a UNet has more block shapes, and images in
    # aspect buckets have up to seven shapes, in training and in evaluation
    _dynamo.config.recompile_limit = _dynamo.config.accumulated_recompile_limit = 1000
    if config.cpp.vec_isa_ok is None:
        config.cpp.vec_isa_ok = True  # skips 10 s of test programs that check the C++ compiler on this CPU
    if whole:
        return torch.compile(model, backend=backend, dynamic=False)
    for part in model.parts():
        part.compile(backend=backend, dynamic=False)
    return model


def uncompiled():
    """A context in which compiled models run eagerly: compiling for the few batches of an evaluation takes longer."""
    if "torch._dynamo" not in sys.modules:  # nothing was compiled; its import takes seconds
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")


COMPILE_WHOLE = 3000  # steps of a run


def compiled(model: torch.nn.Module, device: torch.device, num_steps: int) -> torch.nn.Module:
    """The model, compiled where torch.compile works here: block by block, or as a whole if the run is long enough.

    As a whole, at depth 3 on two CPU cores, the first step takes 28 s more, the others 9 to 18 ms less.
    """
    obstacle = why_not_compiled(device)
    if device.type == "cpu" and isinstance(model, UNet):
        obstacle = "a UNet takes minutes to compile on a CPU and gets no faster"
    if obstacle:
        print0(f"not compiled: {obstacle}")
        return model
    whole = num_steps >= COMPILE_WHOLE
    print0(f"torch.compile {'as a whole' if whole else 'by blocks'} ({COMPILE_WHOLE:,} steps or more: as a whole)")
    return compile_model(model, whole)
