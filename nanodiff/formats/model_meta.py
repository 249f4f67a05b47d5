"""What a model's file says of it, checked before anything is made of it: a file may come from anywhere."""

import dataclasses

from nanodiff.common import UserError
from nanodiff.data.dataset import check_latents
from nanodiff.models.dit import DiTConfig
from nanodiff.models.unet import UNetConfig

MAX_SIZE = 2**20  # of any whole number in a model's config
MAX_TABLE = 2**26  # numbers in a DiT's table of positions: 256 x 256 tokens of width 1024


def fits(value, kind) -> bool:
    """Whether a value from JSON is one for a field of a model's config."""
    if kind is int:
        return type(value) is int and 0 <= value <= MAX_SIZE
    if kind is float:
        return type(value) in (int, float) and 0 <= value <= MAX_SIZE
    if kind in (bool, str):
        return type(value) is kind
    return isinstance(value, list | tuple) and len(value) <= 32 and all(fits(x, int) for x in value)  # tuple[int, ...]


def read_model_config(meta: dict, source, num_tensors: int) -> DiTConfig | UNetConfig:
    """The backbone's config that `meta` (step, arch, config, model_config, data) describes; UserError, named `source`,
    for what is missing, unknown or absurd: more layers than the file has tensors, or data of another shape."""

    def require(condition, what):
        if not condition:
            raise UserError(f"{source}: {what}")

    for key, kind in dict(step=int, arch=str, config=dict, model_config=dict, data=dict).items():
        require(isinstance(meta.get(key), kind), f"{key!r} is missing or not a {kind.__name__}")
    require(0 <= meta["step"] < 2**63, f"step={meta['step']}; accepted: >= 0")
    given, data, config = dict(meta["model_config"]), meta["data"], meta["config"]
    if given.get("low_res") is True:  # older checkpoints hold a bool
        given["low_res"] = config.get("low_res_size", 1)
    elif given.get("low_res") is False:
        given["low_res"] = 0
    unet = meta["arch"] == "unet"
    make = UNetConfig if unet else DiTConfig
    kinds = {field.name: field.type for field in dataclasses.fields(make)}
    for key, value in given.items():
        require(key in kinds, f"model_config has {key!r}, which this version does not know")
        require(fits(value, kinds[key]), f"model_config has {key}={value!r:.100}, which is not accepted")
    try:
        model_config = make(**{key: tuple(x) if isinstance(x, list) else x for key, x in given.items()})
    except (TypeError, ZeroDivisionError) as e:  # fields are missing, or a size is 0
        raise UserError(f"{source}: model_config does not describe a model: {e}") from e
    except UserError as e:
        raise UserError(f"{source}: {e}") from None
    layers = model_config.num_res_blocks * len(model_config.channel_mult) if unet else model_config.depth
    require(layers <= num_tensors, f"model_config has {layers:,} layers, and there are {num_tensors:,} tensors")
    if not unet:
        tokens, width = model_config.num_tokens, model_config.width
        require(tokens * width <= MAX_TABLE, f"model_config has {tokens:,} tokens of width {width:,}")

    check_data(data, source, model_config)
    require(model_config.num_classes in (0, data["num_classes"]), "the model's classes are not those of the data set")
    low_res, drop = config.get("low_res_size"), config.get("label_drop")
    require(fits(low_res, int) and low_res == model_config.low_res, "low_res_size does not fit the model")
    require(fits(drop, float) and drop < 1, "label_drop is missing or not in [0, 1)")
    require(fits(config.get("num_timesteps", 0), int), f"num_timesteps={config.get('num_timesteps')!r:.100}")
    return model_config


def check_data(data: dict, source, model_config: DiTConfig | UNetConfig) -> None:
    """UserError, named `source`, unless these are a codec's facts, of images or latents of the model's shape."""

    def require(condition, what):
        if not condition:
            raise UserError(f"{source}: {what}")

    names = data.get("class_names")
    named = isinstance(names, list) and all(isinstance(name, str) and name.isprintable() for name in names)
    require(named, "class_names is not a list of printable strings")
    require(data.get("num_classes") == len(names), f"num_classes does not count the {len(names):,} class_names")
    require(isinstance(data.get("name"), str), "the data set has no name")
    require(data.get("kind") in ("images", "latents"), "the data set is of a kind that this version does not know")
    sizes, told = (model_config.in_channels, model_config.image_size), (data.get("channels"), data.get("resolution"))
    require(sizes == told, "the data set's channels and resolution are not those of the model")
    if "latents" in data:
        check_latents(data["latents"], source, "offset", "scale")
        require(len(data["latents"]["offset"]) == sizes[0], "the numbers of latents do not fit channels")
