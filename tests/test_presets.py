"""Presets: settings that the scripts know, and models of the published sizes."""

import ast

import pytest
from conftest import ROOT, base_train_settings

from nanodiff.diffusion.process import make_process
from nanodiff.models.build import empty_model, make_model_config

RUNS = ROOT / "runs"
PRESETS = sorted(path.name for path in RUNS.glob("*.py"))
IMAGES = dict(kind="images", channels=3, resolution=32, num_classes=10)
IMAGENET64 = IMAGES | dict(resolution=64, num_classes=1000)
LATENTS = dict(kind="latents", channels=4, resolution=32, num_classes=1000)


def settings(preset):
    """base_train's settings with those of a preset, as its --help and command line read them."""
    return base_train_settings(str(RUNS / preset))


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_accepted_and_says_what_it_is(preset):
    config = settings(preset)
    assert config["model_tag"] == preset.removesuffix(".py")  # so that the run folder is where the docs say
    assert ast.get_docstring(ast.parse((RUNS / preset).read_text()))


@pytest.mark.parametrize(
    "preset, data, parameters",
    [
        ("dit_imagenet256.py", LATENTS, 675_129_632 - 256 * 1152),  # theirs counts the fixed table of positions
        ("iddpm_cifar10.py", IMAGES, 52_546_438),  # Nichol & Dhariwal 2021: 52.5 M
        ("iddpm_imagenet64.py", IMAGENET64, 121_063_942),  # 120 M
    ],
)
def test_published_sizes(preset, data, parameters):
    config = settings(preset)
    process = make_process(config, data)
    model = empty_model(make_model_config(config, data, process.num_outputs * data["channels"]))
    assert sum(p.numel() for p in model.parameters()) == parameters
