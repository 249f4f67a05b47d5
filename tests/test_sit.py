"""SiT's and REPA's files: their own code's velocity, and a process that keeps their time wherever it goes."""

from argparse import Namespace

import numpy as np
import pytest
import torch
from conftest import golden, refused
from figures import assert_figures, rule_weights, wave
from tiny_runs import TINY, make_autoencoder, make_data, randomise
from torch.testing import assert_close

from nanodiff.formats.load import load_run
from nanodiff.formats.published import to_meta
from nanodiff.models.dit import DiT, DiTConfig, position_table

PUBLISHED = golden("sit.json")


def published(path, kind):
    """The golden weights, as these repositories save them; returns the path."""
    parameters = PUBLISHED[kind]["parameters"]
    if isinstance(parameters, str):
        parameters = golden("dit.json")["parameters"]
    weights = rule_weights(parameters)
    for name in ("t_embedder.mlp.0.weight", "t_embedder.mlp.2.weight"):
        weights[name] *= 16
    config = DiTConfig(8, 4, 8, 2, 64, 2, 4)
    weights["pos_embed"] = position_table(config, config.grid, config.grid)[None]  # the rule keeps it
    torch.save({"ema": weights, "model": {}}, path)
    return str(path)


@pytest.mark.parametrize(
    "kind, time_input",
    [
        ("sit", "1-t"),
        ("repa", "t"),
    ],
)
def test_the_velocity_is_the_published_one(tmp_path, capsys, kind, time_input):
    """SiT's t is 1 at the image, where ours is 0, and its v points there."""
    file = published(tmp_path / "last.pt", kind)
    loaded = load_run(f"{file},objective=flow,heads=4", "cpu")
    assert f"time_input={time_input}: taken as published" in capsys.readouterr().out
    t = torch.tensor(PUBLISHED["inputs"]["t"])
    y = torch.tensor(PUBLISHED["inputs"]["y"])
    sign = 1
    if kind == "sit":
        t = 1 - t
        sign = -1
    x_t = wave((3, 4, 8, 8))
    v = loaded.process.velocity(loaded.model, x_t, t, y=y)
    assert_figures(sign * v, PUBLISHED[kind]["forward"], tolerance=1e-5)


def test_sit_and_dit_are_not_taken_for_each_other(tmp_path):
    """Their files are alike but for the name; REPA's has projectors."""
    file = published(tmp_path / "SiT-S-4.pt", "sit")
    checkpoints = tmp_path / "000-SiT-XL-2-Linear-velocity-None" / "checkpoints"
    checkpoints.mkdir(parents=True)
    trained = published(checkpoints / "0050000.pt", "sit")
    for name in (file, trained, published(tmp_path / "last.pt", "repa")):
        refused(r"\.pt,objective=\.\.\.; accepted: objective=flow \(SiT, REPA\)", load_run, name, "cpu")
    saved = torch.load(trained, weights_only=True)
    for kind in ("Linear", "GVP"):  # what SiT's own training saves beside
        args = Namespace(path_type=kind, prediction="velocity", num_classes=4)
        torch.save(saved | {"args": args}, trained)
        if kind == "Linear":
            assert load_run(f"{trained},heads=4", "cpu").config["objective"] == "flow"
    refused("of GVP, velocity; accepted: Linear", load_run, f"{trained},heads=4", "cpu")
    vae = str(make_autoencoder(tmp_path / "vae", latent_channels=4))
    drawn = []
    for objective in ("flow", "eps"):
        loaded = load_run(f"{file},objective={objective},heads=4", "cpu")
        images = loaded.sample(num_images=2, steps=4, cfg_scale=2, classes="1", autoencoder=vae)
        drawn.append(images.astype(float))
    assert np.abs(drawn[0] - drawn[1]).max() > 0.1
    told = f"{file},objective=flow,num_timesteps=100"
    refused("read without num_timesteps=100; accepted: heads, label_drop, objective, time_input", load_run, told, "cpu")
    path = published(tmp_path / "composition.pt", "sit")  # no SiT, despite its name
    load_run(f"{path},heads=4", "cpu")
    pos_embed = saved["ema"]["pos_embed"].to(torch.float8_e4m3fn)
    torch.save(saved["ema"] | {"pos_embed": pos_embed}, path)
    load_run(f"{path},heads=4", "cpu")
    torch.save(saved["ema"] | {"z": 1}, path)
    refused("holds no model", load_run, f"{path},heads=4", "cpu")


def test_a_run_keeps_the_time_of_what_it_started_from(base, run_script, tmp_path):
    """Full training, its resume and export, adapters, and a flow map with its teacher."""
    make_data()
    config = DiTConfig(16, 3, 6, 4, 64, 1, 1, num_classes=8, block="classic")
    weights = randomise(DiT(config).state_dict())
    torch.save(to_meta(weights, config), tmp_path / "SiT.pt")
    file = f"{tmp_path / 'SiT.pt'},objective=flow,heads=1"
    source = load_run(file, "cpu")
    tiny = [arg for arg in TINY if "depth" not in arg and "patch" not in arg]
    train = ("base_train", *tiny, f"--init_from={file}")
    x = torch.randn(2, 3, 16, 16)
    t = torch.tensor([0.2, 0.9])
    y = torch.tensor([1, 2])
    v = source.process.velocity(source.model, x, t, y=y)
    for tag, args in (
        ("full", []),
        ("lora", ["--lora_rank=2"]),
        ("map", ["--objective=flow_map"]),
    ):
        run_script(*train, *args, f"--model_tag={tag}")
        done = run_script(*train, *args, f"--model_tag={tag}", "--num_iterations=1", "--resume=changed")
        assert done["config"]["time_input"] == "1-t"
        assert done["step"] == 1
        found = load_run(f"{tag},step=0", "cpu")
        assert_close(found.process.velocity(found.model, x, t, y=y), v)
    path = run_script("export", "--model=full", "--checkpoint_step=0")["path"]
    found = load_run(str(path), "cpu")
    assert_close(found.process.velocity(found.model, x, t, y=y), v)
    teacher = done["process"].teacher
    assert_close(teacher.process.velocity(teacher.model, x, t, y=y), v)
