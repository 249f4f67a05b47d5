"""Map settings to a backbone's shape and back; build and compile it. formats/ builds one from a checkpoint."""

import contextlib
import sys
from dataclasses import fields

import torch
from torch import nn

from nanodiff.common import Settings, Tensors, UserError, get_dist, print0
from nanodiff.conditions import SET_FIELDS, DataInfo, some_conditions
from nanodiff.device import why_not_compiled
from nanodiff.models.dit import DiT, DiTConfig
from nanodiff.models.unet import NORM_GROUPS, UNet, UNetConfig

ModelConfig = DiTConfig | UNetConfig
# arch -> the config and the module of a backbone. A new one needs its file and a row here
BACKBONES = {
    "dit": (DiTConfig, DiT),
    "dit_classic": (DiTConfig, DiT),
    "unet": (UNetConfig, UNet),
}
# Fields of a model's config that the data decide, and those that others or the architecture do. The rest have a setting
FROM_DATA = ("image_size", "in_channels", "out_channels", *SET_FIELDS)
DERIVED = ("mlp_ratio", "channel_mult", "null_class", "flow_map")
# Field -> its setting in base_train, where the names differ
SETTINGS = {"block": "arch", "model_channels": "depth", "num_heads": "heads", "low_res": "low_res_size"}


def setting_fields(kind: type) -> dict[str, str]:
    """{field: setting} of a DiTConfig or UNetConfig: the only mapping between settings and a model's shape."""
    names = [field.name for field in fields(kind) if field.name not in FROM_DATA + DERIVED]
    return {name: SETTINGS.get(name, name) for name in names}


def from_setting(field: str, value):
    """Convert a setting's value to its config field's."""
    if field == "block":
        return "classic" if value == "dit_classic" else "modern"
    if field == "num_heads":
        return value or 4
    if field == "attention_resolutions":
        try:
            return tuple(int(resolution) for resolution in value.split(",") if resolution)
        except ValueError:
            raise UserError(f"{field}={value!r}; accepted: integers, comma-separated") from None
    return value


def to_setting(field: str, value):
    """The inverse of from_setting."""
    if field == "block":
        return "dit_classic" if value == "classic" else "dit"
    if field == "model_channels":
        return value // NORM_GROUPS
    if field == "attention_resolutions":
        return ",".join(map(str, value))
    return value


def model_settings(model_config: ModelConfig) -> dict:
    """The settings of base_train that give a model of this shape on the same data."""
    arch = next(arch for arch, (kind, _) in BACKBONES.items() if kind is type(model_config))
    return {"arch": arch} | {  # a DiT's block says which of its two
        setting: to_setting(field, getattr(model_config, field))
        for field, setting in setting_fields(type(model_config)).items()
    }


def make_model_config(config: Settings, data: DataInfo, process) -> ModelConfig:
    """The shape that the settings `config` ask for."""
    low_res = config["low_res_size"]
    if low_res >= data.resolution:
        raise UserError(f"low_res_size={low_res}; accepted: less than the images' {data.resolution} pixels")
    if low_res and data.given_channels:
        raise UserError(f"low_res_size={low_res}: the data hold second images already; accepted: 0")
    kind, _ = BACKBONES[config["arch"]]
    if process.is_map and not hasattr(kind, "flow_map"):
        raise UserError(f"objective={config['objective']}: a flow map needs arch=dit or dit_classic")
    shape = {
        "image_size": data.resolution,
        "in_channels": data.channels,
        "out_channels": process.num_outputs * data.channels,
    }
    for name in SET_FIELDS:
        shape[name] = getattr(data, name)
    if not config["class_cond"]:
        shape["num_classes"] = 0
    if low_res:
        shape["given_channels"] = data.channels
    for field, setting in setting_fields(kind).items():
        if setting != "depth":
            shape[field] = from_setting(field, config[setting])
    if process.is_map:
        shape["flow_map"] = 1 + 2 * config["depth"] // 3  # see FlowMap
    model_config = kind.from_depth(config["depth"], **shape)
    unit = model_config.side_unit
    for height, width, _ in data.sizes or ():
        if height % unit or width % unit:
            raise UserError(f"the data hold {height}x{width}; the model accepts multiples of {unit} (arch, patch_size)")
    return model_config


def stored_config(meta: dict) -> ModelConfig:
    """The model's config in the metadata of a file of weights."""
    kind, _ = BACKBONES[meta["arch"]]
    fields = meta["model_config"] | {"checkpointing": False}
    for name, value in fields.items():
        if isinstance(value, list):
            fields[name] = tuple(value)  # JSON has no tuples
    return kind(**fields)


def empty_model(model_config: ModelConfig) -> nn.Module:
    """The backbone on "meta": shapes without memory."""
    modules = dict(BACKBONES.values())
    with torch.device("meta"):
        return modules[type(model_config)](model_config)


def build_model(model_config: ModelConfig, device, seed: int) -> nn.Module:
    """The backbone on `device`, initialised from `seed`."""
    model = empty_model(model_config).to_empty(device=device)
    model.init_weights(torch.Generator().manual_seed(seed))
    return model


def load_weights(model: nn.Module, tensors: Tensors, source, assign: bool = False) -> None:
    """Strict load_state_dict. `assign`: the model keeps these tensors instead of copying them."""
    try:
        model.load_state_dict(tensors, assign=assign)
    except RuntimeError as error:
        raise UserError(f"{source} does not fit this model: {' '.join(str(error).split())[:300]}") from None


@torch.no_grad()
def estimate_flops(model: nn.Module) -> int:
    """FLOPs per image, forward + backward = 3 x forward: matrix products, convolutions and attention, 2 per
    multiply-add, counted on one image. torch's FlopCounterMode would import the compiler, which takes seconds."""
    counts = []

    def count(module, args, out):
        if isinstance(module, nn.Linear | nn.Conv2d):
            counts.append(2 * out.numel() * module.weight[0].numel())
        elif hasattr(module, "qkv"):  # q k^T and weights @ v: 2 T T C each
            counts.append(4 * args[0].numel() ** 2 // module.qkv.in_features)

    config = model.config
    p = next(model.parameters())
    x_t = p.new_zeros(1, config.in_channels, config.image_size, config.image_size)
    hook = nn.modules.module.register_module_forward_hook(count)
    model(x_t, x_t.new_zeros(1), **some_conditions(config, 1, p.device))
    hook.remove()
    return 3 * sum(counts)


def compile_model(model: nn.Module, whole: bool) -> nn.Module:
    """Compile the whole model, or its blocks in place; blocks of one shape share a graph."""
    from torch import _dynamo  # here, as it takes seconds
    from torch._inductor import config

    # By default compiling stops at the ninth graph of one forward(). A UNet has more block shapes; aspect buckets have
    # up to seven image shapes, each with and without gradients
    _dynamo.config.recompile_limit = 1000
    _dynamo.config.accumulated_recompile_limit = 1000
    if config.cpp.vec_isa_ok is None:
        config.cpp.vec_isa_ok = True  # skips 10 s of test programs that check the C++ compiler on this CPU
    if whole:
        return torch.compile(model, dynamic=False)
    for part in model.parts():
        part.forward = torch.compile(part.forward, dynamic=False)  # not its hooks, as part.compile would
    return model


def uncompiled():
    """A context in which compiled models run eagerly: for the few batches of an evaluation, compiling would not pay."""
    if "torch._dynamo" not in sys.modules:  # nothing was compiled; its import takes seconds
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")


COMPILE_WHOLE = 3000  # steps from which compiling the whole model pays


def compiled(model: nn.Module, device: torch.device, num_steps: int, compile: bool) -> nn.Module:
    """The model, compiled if `compile`, where torch.compile works here.

    Blocks are compiled one by one. Only a run of one rank on a CPU, of COMPILE_WHOLE steps or more, compiles the whole
    model: at depth 3 on two cores the first step takes 28 s more, each later one 9 to 18 ms less. On an H100 it saves
    nothing (d12: 197.6 ms per step, by blocks 197.4). With several ranks, compiled blocks let the exchange of gradients
    start before backward ends.
    """
    if not compile:
        return model
    obstacle = why_not_compiled(device)
    if device.type == "cpu" and isinstance(model, UNet):
        obstacle = "a UNet takes minutes to compile on a CPU and gets no faster"
    if obstacle:
        print0(f"not compiled: {obstacle}")
        return model
    whole = device.type == "cpu" and num_steps >= COMPILE_WHOLE and get_dist()[2] == 1
    print0(f"compiling {'as a whole' if whole else 'by blocks'}: the first step takes 5 to 60 s")
    fast = compile_model(model, whole)
    if getattr(model.config, "dropout", 0):
        print0("compiled code is not checked: with dropout eager code draws other masks")
        return fast
    from nanodiff.models.checked import Checked  # lazy

    return Checked(model, fast)
