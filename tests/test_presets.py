"""The presets in runs/: settings that base_train knows, and models of the published sizes."""

import ast
from pathlib import Path

import pytest

from configurator import configure
from nanodiff.diffusion.process import make_process
from nanodiff.models.build import empty_model, make_model_config

RUNS = Path(__file__).parents[1] / "runs"
PRESETS = sorted(path.name for path in RUNS.glob("*.py"))
IMAGES = dict(kind="images", channels=3, resolution=32, num_classes=10)
IMAGENET64 = IMAGES | dict(resolution=64, num_classes=1000)
LATENTS = dict(kind="latents", channels=4, resolution=32, num_classes=1000)


def settings(preset):
    """base_train's defaults, read from its source, with those of a preset."""
    script, names = RUNS.parent / "scripts" / "base_train.py", {}
    for node in ast.parse(script.read_text()).body:
        if isinstance(node, ast.Assign):
            if isinstance(node.value, ast.Call):  # the settings end
                break
            names[node.targets[0].id] = ast.literal_eval(node.value)
    return configure(names | {"__file__": str(script)}, argv=[str(RUNS / preset)])


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
    model = empty_model(make_model_config(config, data, process.out_channels(data["channels"])))
    assert sum(p.numel() for p in model.parameters()) == parameters
