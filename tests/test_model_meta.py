"""What a model's file says of it is checked before anything is made of it: unknown, missing and absurd values."""

import contextlib
import copy
import dataclasses
import json
import time
from pathlib import Path

import pytest
import torch

from nanodiff.common import UserError
from nanodiff.formats.load import load_run, restore
from nanodiff.formats.published import to_improved_diffusion, to_meta
from nanodiff.models.build import build_model
from nanodiff.models.dit import DiTConfig
from nanodiff.models.unet import UNetConfig
from nanodiff.training.checkpoint import save_checkpoint

DATA = dict(name="toy", kind="images", channels=3, resolution=8, num_classes=2, class_names=["a", "b"])
CONFIG = dict(objective="eps", noise_schedule="cosine", num_timesteps=10, variance="fixed_small", loss="mse")
CONFIG |= dict(rescale_timesteps=True, label_drop=0.1, low_res_size=0, flow_prediction="v")
DIT = DiTConfig.from_depth(1, 8, 3, 3, 2, width=8, heads=1)
UNET = UNetConfig(8, 3, 3, 32, 1, (4,), (1, 1), 1, num_classes=2)
STATES = {config: build_model(config, "cpu", 0).state_dict() for config in (DIT, UNET)}
LATENTS = dict(autoencoder="kl", sha256="0" * 64, path="", source="x", downsample=8, parts=2, copies=1)
LATENTS |= dict(offset=[0.0] * 3, scale=[1.0] * 3)


def describe(model_config, **changes):
    """A valid meta.json of that model with changes: {"data.kind": "sounds"}; ... stands for leaving it out."""
    arch = "unet" if model_config is UNET else "dit"
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
    return restore(describe(model_config, **changes), dict(STATES[model_config]), "cpu", "x", weights="raw",
                   weights_path=Path("x"))  # fmt: skip


@pytest.mark.parametrize("model_config", [DIT, UNET])
def test_what_is_valid_is_taken(model_config):
    assert make(model_config).model.config == model_config
    assert make(model_config, **{"data.kind": "latents", "data.latents": LATENTS}).data["latents"] == LATENTS
    # A model that knows nothing of the classes of its data; its file is another
    with pytest.raises(UserError, match="unknown tensor"):
        make(model_config, **{"model_config.num_classes": 0})


ABSURD = {  # where -> values, and what the line must say
    "step": [(-1, "step"), ("1", "step"), (..., "step")],
    "arch": [(3, "arch"), ("unet", "does not know")],
    "config": [([], "config")],
    "model_config.depth": [(10**9, "depth=10"), (2, "lacks tensor"), (10**4, "layers"), ("1", "depth='1'")],
    "model_config.width": [(10**6, "shape"), (10**12, "width=10"), (-8, "width=-8"), (8.0, "width=8.0")],
    "model_config.heads": [(0, "width=8"), (10**5, "width=8")],
    "model_config.image_size": [(16, "resolution"), (2**62, "image_size="), (0, ""), (None, "image_size=None")],
    "model_config.patch_size": [(10**6, "patch_size"), (0, "patch_size=0"), (1, "shape")],
    "model_config.num_classes": [(10**12, "num_classes="), (-1, "num_classes=-1"), (7, "classes")],
    "model_config.mlp_ratio": [(1e308, "mlp_ratio"), (float("inf"), "mlp_ratio"), (float("nan"), "mlp_ratio")],
    "model_config.block": [("postmodern", "accepted"), (["modern"], "block")],
    "model_config.magic": [(1, "'magic'")],
    "model_config.in_channels": [(..., "in_channels"), (4, "channels")],
    "model_config.out_channels": [(6, "out_channels=6")],
    "config.num_timesteps": [(10**12, "num_timesteps"), (0, "num_timesteps"), ("10", "num_timesteps"), (1.5,
    "num_timesteps")],
    "config.objective": [("telepathy", "telepathy"), (..., "objective")],
    "config.noise_schedule": [([], "schedule"), ("steep", "steep")],
    "config.label_drop": [("0.1", "label_drop"), (2, "label_drop"), (..., "label_drop")],
    "config.low_res_size": [(4, "low_res_size"), (None, "low_res_size")],
    "data.kind": [("sounds", "kind")], "data.name": [(..., "name")], "data.channels": [(10**9, "channels")],
    "data.resolution": [(10**9, "resolution")], "data.num_classes": [(10**9, "num_classes")],
    "data.class_names": [("ab", "class_names"), ([1, 2], "class_names"), (["a\n", "b"], "printable"), (["a"], "class")],
    "data.latents": [
        ({}, "latents"), (LATENTS | {"scale": [0.0] * 3}, "scale"), (LATENTS | {"offset": [10**400] * 3}, "offset"),
        (LATENTS | {"downsample": 10**9}, "downsample"), (LATENTS | {"offset": [0.0] * 4, "scale": [1.0] * 4}, "fit"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("where", ABSURD)
def test_what_is_absurd_is_told_at_once(where):
    for value, words in ABSURD[where]:
        start = time.process_time()
        with pytest.raises(UserError) as caught:
            make(DIT, **{where: value})
        assert str(caught.value).startswith("x") and words in str(caught.value), (value, str(caught.value))
        assert time.process_time() - start < 10


@pytest.mark.parametrize(
    "where, value",
    [
        ("channel_mult", [10**9, 1]), ("channel_mult", [1] * 300), ("channel_mult", [0, 1]), ("channel_mult", ["1"]),
        ("num_res_blocks", 10**6), ("attention_resolutions", ["4"]), ("dropout", 3), ("num_heads", 0),
        ("model_channels", 10**5), ("conv_resample", 1), ("image_size", 0),
    ],
)  # fmt: skip
def test_an_absurd_unet(where, value):
    with pytest.raises(UserError, match="^x"):
        make(UNET, **{f"model_config.{where}": value})


@pytest.mark.parametrize("model_config", [DIT, UNET])
def test_every_value_made_extreme(model_config):
    """One at a time: what is taken all the same predicts, and soon."""
    extremes = (
        0,
        -1,
        5,
        10**5,
        10**9,
        2**63,
        10**400,
        0.5,
        1e308,
        float("nan"),
        float("inf"),
        None,
        "x",
        [],
        {},
        [10**9],
    )
    valid = describe(model_config)
    for where in [f"{part}.{key}" for part in ("model_config", "config", "data") for key in valid[part]]:
        for value in extremes:
            start = time.process_time()
            with contextlib.suppress(UserError), torch.no_grad():
                model = make(model_config, **{where: value}).model
                labels = torch.zeros(1, dtype=torch.int64)
                assert model(torch.zeros(1, 3, 8, 8), torch.zeros(1), labels).shape == (1, 3, 8, 8)
            assert time.process_time() - start < 10, (where, value)


def test_a_table_of_positions_larger_than_memory():
    sizes = {"model_config.image_size": 65536, "data.resolution": 65536}
    with pytest.raises(UserError, match="x: model_config has 1,073,741,824 tokens of width 8"):
        make(DIT, **sizes)


def write_run(base, tag, **changes):
    return save_checkpoint(base / "runs" / tag, 1, {"model": STATES[DIT]}, describe(DIT, ema_rates=[], **changes))


def test_adapters_of_adapters_without_end(base):
    write_run(base, "a", lora=dict(base=dict(run="b", step=1, ema="raw")))
    write_run(base, "b", lora=dict(base=dict(run="a", step=1, ema="raw")))
    with pytest.raises(UserError, match="which weights its adapters are for"):
        load_run("a", "cpu")


@pytest.mark.parametrize(
    "lora", [None, [], {}, {"base": 3}, {"base": {}}, {"base": {"run": 3}}, {"base": {"run": "a", "device": "cuda"}},
             {"base": {"run": "a", "step": "1"}}, {"base": {"run": "a", "within": []}}]
)  # fmt: skip
def test_adapters_of_nothing(base, lora):
    write_run(base, "a", lora=lora)
    with pytest.raises(UserError, match="which weights its adapters are for"):
        load_run("a", "cpu")


# ---------------------------------------------------------------------------------------------------------------------
# Weights


def endless(x):
    """A tensor of 4 TB, of which a file holds one number."""
    return x.flatten()[0].expand(10**6, 10**6)


@pytest.mark.parametrize("change", [endless, lambda x: x.to("meta"), lambda x: x.to_sparse(), lambda x: 1j * x])
def test_tensors_that_are_not_all_there(tmp_path, change):
    state = STATES[UNET] | {"time_embed.0.weight": change(STATES[UNET]["time_embed.0.weight"])}
    torch.save(to_improved_diffusion(STATES[UNET] | state, UNET), tmp_path / "unet.pt")
    with pytest.raises(UserError, match="no dictionary of tensors"):
        load_run(str(tmp_path / "unet.pt"), "cpu", image_size=8)


def test_a_table_of_positions_of_any_size(tmp_path):
    config = dataclasses.replace(DIT, block="classic")
    state = to_meta(build_model(config, "cpu", 0).state_dict(), config)
    torch.save(state | {"pos_embed": endless(state["pos_embed"])[None]}, tmp_path / "dit.pt")
    with pytest.raises(UserError, match="no dictionary of tensors"):
        load_run(str(tmp_path / "dit.pt"), "cpu")


@pytest.mark.parametrize("name", ["input_blocks.99999999999.0.x", "input_blocks.x.0"])
def test_a_unet_of_any_number_of_blocks(tmp_path, name):
    torch.save(STATES[UNET] | {name: torch.zeros(1)}, tmp_path / "unet.pt")
    with pytest.raises(UserError, match=r"unet\.pt"):
        load_run(str(tmp_path / "unet.pt"), "cpu")


def test_a_dit_of_any_number_of_blocks(tmp_path):
    config = dataclasses.replace(DIT, block="classic")
    state = to_meta(build_model(config, "cpu", 0).state_dict(), config)
    torch.save(state | {"blocks.99999999999.x": torch.zeros(1)}, tmp_path / "dit.pt")
    with pytest.raises(UserError, match="depth=100000000000"):
        load_run(str(tmp_path / "dit.pt"), "cpu")
