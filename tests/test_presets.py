"""Presets and commands: settings that the scripts know, and models of the published sizes."""

import ast
import re
import shlex

import pytest
from conftest import ROOT, base_train_settings, script_settings

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
    model = empty_model(make_model_config(config, data, process.out_channels(data["channels"])))
    assert sum(p.numel() for p in model.parameters()) == parameters


def commands(path, short=False):
    """[(script, [argument, ...])] of the commands in a document, in its order; `short`: `base_train --flip`, too."""
    text = path.read_text().replace("\\\n", " ")
    names = "|".join(path.stem for path in (ROOT / "scripts").glob("*.py"))
    return [
        (match[1], [arg for arg in shlex.split(match[2], comments=True) if arg != "--"])
        for match in re.finditer(rf"(?:-m scripts\.{'|`' if short else ''})({names})\b([^`\n|>)]*)", text)
        if match[1] != "report"  # takes no settings
    ]


PAGES = [ROOT / "README.md", RUNS / "GUIDE.md"]
DOCUMENTS = [*PAGES, *sorted(RUNS.glob("*.sh")), *sorted(set(RUNS.glob("*.md")) - set(PAGES))]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_the_commands_that_we_tell_users_are_accepted(path):
    """Scripts, presets, names and values; what the commands do has tests of its own."""
    for script, args in commands(path, short=path in PAGES):
        settings = [arg for arg in args if arg.startswith("--") or arg.endswith(".py")]
        settings = [arg for arg in settings if "$" not in arg and "..." not in arg]
        config = script_settings(script, *settings)
        assert all(arg.partition("=")[0][2:] in config for arg in settings if arg.startswith("--")), (script, args)
    for story in re.findall(r"bash (runs/\w+\.sh)", path.read_text()):
        assert (ROOT / story).is_file()


def test_the_pages_make_sets_and_models_before_they_use_them():
    """README, then the guide. A model is in capitals, a file, trained by a preset or above."""
    sets, models = {"shapes"}, {preset.removesuffix(".py") for preset in PRESETS}
    for script, args in commands(PAGES[0]) + commands(PAGES[1]):
        values = dict(arg[2:].split("=", 1) for arg in args if "=" in arg)
        if script == "base_train" and "init_from" not in values:
            config = base_train_settings(*[arg for arg in args if arg.startswith("--") or arg.endswith(".py")])
            assert config["data"] in sets, f"{script} {args}: this set is made later, or never"
            models.add(config["model_tag"] or f"{config['data']}_{config['arch']}_d{config['depth']}")
        elif data := values.get("data"):
            assert data in sets, f"{script} {args}: this set is made later, or never"
        if script in ("prepare_data", "cache_latents") and "name" in values:
            sets.add(values["name"])
        model = values.get("model", "")
        assert not re.fullmatch(r"[a-z]\w*", model) or model in models, f"{script} {args}: no such model"
