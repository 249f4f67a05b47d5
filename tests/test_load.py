"""From a file to a model: what is valid loads, old checkpoints load, and corrupt or absurd files are refused."""

import copy
import dataclasses
import json
import time
from pathlib import Path

import pytest
import torch
from tiny_runs import randomise

from nanodiff.common import UserError
from nanodiff.formats.load import build, load_run
from nanodiff.formats.published import to_improved_diffusion, to_meta
from nanodiff.models.build import build_model
from nanodiff.models.dit import DiTConfig
from nanodiff.models.unet import UNetConfig
from nanodiff.training.checkpoint import save_checkpoint

DATA = dict(name="toy", kind="images", channels=3, resolution=8, num_classes=2, class_names=["a", "b"])
CONFIG = dict(objective="eps", noise_schedule="cosine", num_timesteps=10, variance="fixed_small", loss="mse")
CONFIG |= dict(rescale_timesteps=True, label_drop=0.1, low_res_size=0)
DIT = DiTConfig.from_depth(1, 8, in_channels=3, out_channels=3, num_classes=2, width=8, heads=1)
CLASSIC = dataclasses.replace(DIT, block="classic")
UNET = UNetConfig(8, 3, 3, 32, 1, (4,), (1, 1), num_heads=1, num_classes=2)
UPSAMPLER = dataclasses.replace(DIT, low_res=4)
STATES = {config: build_model(config, "cpu", 0).state_dict() for config in (DIT, CLASSIC, UNET, UPSAMPLER)}
LATENTS = dict(autoencoder="kl", sha256="0" * 64, path="", source="x", downsample=8, parts=2, copies=1)
LATENTS |= dict(offset=[0.0] * 3, scale=[1.0] * 3)


def describe(model_config, **changes):
    """A valid meta.json of that model with changes: {"data.kind": "sounds"}; ... leaves the field out."""
    arch = "unet"
    if isinstance(model_config, DiTConfig):
        arch = "dit_classic" if model_config.block == "classic" else "dit"
    meta = dict(step=1, arch=arch, config=CONFIG, model_config=dataclasses.asdict(model_config), data=DATA)
    meta = json.loads(json.dumps(meta | dict(ema_rates=[0.99], loop={})))
    for key, value in changes.items():
        *path, last = key.split(".")
        place = meta
        for part in path:
            place = place[part]
        place[last] = copy.deepcopy(value)
        if value is ...:
            del place[last]
    return meta


def make(model_config, **changes):
    """What loads of a changed meta.json and the weights of that model."""
    return build(describe(model_config, **changes), dict(STATES[model_config]), "cpu", "x", "raw", Path("x"))


def write_run(base, tag, model_config=DIT, **changes):
    """A checkpoint of that model with random weights, raw and averaged, and of that meta.json with changes."""
    state = build_model(model_config, "cpu", 0).state_dict()
    tensors = {"model": randomise(state, 0), "ema_0.99": randomise(state, 1)}
    return save_checkpoint(base / "runs" / tag, 1, tensors, describe(model_config, **changes))


@pytest.mark.parametrize("model_config", [DIT, UNET])
def test_a_valid_description_loads(model_config):
    assert make(model_config).model.config == model_config
    make(model_config, **{"data.kind": "latents", "data.latents": LATENTS})


ABSURD = {  # where -> values, and what the line must say
    "step": [("1", "step"), (..., "step")],
    "arch": [(3, "arch"), ("unet", "no model")],
    "config": [([], "config")],
    "model_config.depth": [(10**9, "depth=10"), (2, "blocks.1"), (10**4, "layers"), ("1", "no model")],
    "model_config.width": [(10**6, "size mismatch"), (10**12, "width=10"), (-8, "width=-8"), (8.0, "x")],
    "model_config.image_size": [(16, "resolution"), (2**62, "image_size="), (0, "x"), (None, "no model")],
    "model_config.patch_size": [(10**6, "patch_size"), (0, "patch_size=0"), (1, "size mismatch")],
    "model_config.num_classes": [(10**12, "num_classes="), (-1, "num_classes=-1"), (7, "classes")],
    "model_config.mlp_ratio": [(1e308, "mlp_ratio"), (float("inf"), "mlp_ratio"), (float("nan"), "mlp_ratio")],
    "model_config.magic": [(1, "'magic'")],
    "model_config.low_res": [(True, "older version")],
    "config.flow_prediction": [("x0", "older version")],
    "model_config.in_channels": [(..., "in_channels"), (4, "channels")],
    "model_config.out_channels": [(6, "out_channels=6")],
    "config.objective": [(..., "objective")],
    "config.label_drop": [("0.1", "label_drop"), (..., "label_drop")],
    "data.name": [(..., "name")],
    "data.channels": [(10**9, "channels")],
    "data.class_names": [("ab", "class_names"), (["a"], "classes")],
    "data.sizes": [(3, "sizes"), ([8], "size 8"), ([[8, 0, 1]], "size [8, 0"), ([[8, 33, 1]], "up to 32")],
    "data.latents": [({}, "latents"), (LATENTS | {"scale": [0.0] * 3}, "scale")],
}


@pytest.mark.parametrize("where", ABSURD)
def test_an_absurd_value_is_refused_at_once(where):
    for value, words in ABSURD[where]:
        start = time.process_time()
        with pytest.raises(UserError) as caught:
            make(DIT, **{where: value})
        assert str(caught.value).startswith("x") and words in str(caught.value), (value, str(caught.value))
        assert time.process_time() - start < 10


ABSURD_UNET = dict(num_res_blocks=[10**6], attention_resolutions=[["4"]], num_heads=[0], model_channels=[10**5])
ABSURD_UNET |= dict(image_size=[0], channel_mult=[[10**9, 1], [1] * 300, ["1"]])


@pytest.mark.parametrize("where", ABSURD_UNET)
def test_an_absurd_unet_is_refused(where):
    for value in ABSURD_UNET[where]:
        with pytest.raises(UserError, match="^x"):
            make(UNET, **{f"model_config.{where}": value})


def test_a_table_of_positions_larger_than_memory_is_refused():
    with pytest.raises(UserError, match="1,073,741,824 tokens of width 8"):
        make(DIT, **{"model_config.image_size": 65536, "data.resolution": 65536})


# ---------------------------------------------------------------------------------------------------------------------
# Adapters


def test_adapters_whose_base_is_their_own_fine_tune(base):
    write_run(base, "a", lora=dict(base=dict(run="b", step=1, ema="raw")))
    write_run(base, "b", lora=dict(base=dict(run="a", step=1, ema="raw")))
    with pytest.raises(UserError, match="fine-tune of itself"):
        load_run("a", "cpu")


@pytest.mark.parametrize("lora", [None, [], {}, {"base": 3}, {"base": {}}, {"base": {"run": 3}},
                                  {"base": {"run": "a", "step": "1"}}])  # fmt: skip
def test_adapters_that_do_not_say_their_base(base, lora):
    checkpoint = write_run(base, "a", lora=lora)
    with pytest.raises(UserError, match=f"{checkpoint}: '(base|run|step)' is missing or not a"):
        load_run("a", "cpu")


# ---------------------------------------------------------------------------------------------------------------------
# Weights


def endless(x):
    """A tensor of 4 TB of which a file holds one number."""
    return x.flatten()[0].expand(10**6, 10**6)


@pytest.mark.parametrize("change", [endless, lambda x: x.to("meta"), lambda x: x.to_sparse(), lambda x: 1j * x])
def test_tensors_that_are_not_all_there(tmp_path, change):
    state = STATES[UNET] | {"time_embed.0.weight": change(STATES[UNET]["time_embed.0.weight"])}
    torch.save(to_improved_diffusion(STATES[UNET] | state, UNET), tmp_path / "unet.pt")
    with pytest.raises(UserError, match="no dictionary of tensors"):
        load_run(str(tmp_path / "unet.pt"), "cpu")


@pytest.mark.parametrize(
    "valid, name",
    [(STATES[UNET], "input_blocks.99999999999.0.x"), (to_meta(STATES[CLASSIC], CLASSIC), "blocks.99999999999.x")],
)
def test_any_number_of_blocks_is_refused(tmp_path, valid, name):
    torch.save(valid | {name: torch.zeros(1)}, tmp_path / "a.pt")
    with pytest.raises(UserError, match=r"a\.pt"):
        load_run(str(tmp_path / "a.pt"), "cpu")
