"""Starting a run from other weights (own runs: test_base_train; here published files), and the one mapping between
settings and a model's shape."""

from dataclasses import dataclass, replace

import pytest
import torch
from conftest import base_train_settings
from test_export import unet_file
from tiny_runs import make_data, randomise

from nanodiff.common import UserError
from nanodiff.formats.load import load_run
from nanodiff.formats.published import to_meta
from nanodiff.models import build
from nanodiff.models.build import build_model, make_model_config, model_settings
from nanodiff.models.dit import DiTConfig

FACTS = dict(resolution=32, channels=3, num_classes=8)
DIT = DiTConfig.from_depth(1, 16, in_channels=3, out_channels=6, num_classes=8, width=64, heads=2, block="classic")
UNET = dict(channel_mult=(1, 2, 2), attention_resolutions=(16,), num_classes=8, num_heads=2)
TRAIN = (
    "--data=tiny --total_batch_size=8 --num_iterations=0 --eval_every=-1 --sample_every=-1 --device_type=cpu "
    "--objective=eps --compile=False --label_drop=0 --depth=3"
).split()  # fmt: skip


@pytest.mark.parametrize(
    "args",
    [
        "--depth=3",
        "--depth=5 --width=192 --heads=3 --patch_size=4 --arch=dit_classic --low_res_size=8",
        "--arch=unet --depth=2 --attention_resolutions=8 --num_res_blocks=1 --use_scale_shift_norm=False --heads=1",
    ],
)
def test_settings_to_a_shape_and_back(args):
    settings = base_train_settings(*args.split())
    shape = make_model_config(settings, FACTS, 3)
    found = model_settings(shape)
    assert make_model_config(dict(settings) | found, FACTS, 3) == shape
    given = {arg[2:].split("=")[0] for arg in args.split()}
    assert all(found[name] == settings[name] for name in given)


def test_an_option_of_a_model_without_a_setting_fails_loudly(monkeypatch):
    @dataclass(frozen=True)
    class Config(DiTConfig):
        sandwich: bool = False

    monkeypatch.setattr(build, "DiTConfig", Config)
    with pytest.raises(UserError, match="Config.sandwich has no setting"):
        make_model_config(base_train_settings(), FACTS, 3)
    settings = dict(base_train_settings()) | {"sandwich": True}
    shape = make_model_config(settings, FACTS, 3)
    assert shape.sandwich and model_settings(shape)["sandwich"] is True


def start(run_script, path, *args):
    """base_train from that file, with the settings that its refusal names; the run's globals and these settings."""
    args = (*TRAIN, f"--init_from={path}", *args)
    with pytest.raises(UserError, match="another shape; to start from it: ") as refusal:
        run_script("base_train", *args)
    settings = str(refusal.value).split("start from it: ")[1].split()
    return run_script("base_train", *args, *settings), settings


def assert_same_outputs(model, published):
    x, t, y = torch.randn(3, 3, 16, 16), torch.tensor([10.0, 500.0, 990.0]), torch.tensor([0, 3, 7])
    torch.testing.assert_close(model.eval()(x, t, y), published(x, t, y))


def test_metas_file_is_what_the_run_starts_as(base, run_script, tmp_path, capsys):
    """Without a false warning: at T = 1000 rescaling t changes nothing."""
    make_data()
    weights = randomise(build_model(DIT, "cpu", 0).state_dict())
    torch.save(to_meta(weights, DIT), tmp_path / "dit.pt")
    done, _ = start(run_script, tmp_path / "dit.pt", "--noise_schedule=linear", "--heads=2")
    out = capsys.readouterr().out
    assert "by order: 8 of 8" in out and "warning" not in out
    assert_same_outputs(done["raw_model"], load_run(str(tmp_path / "dit.pt"), "cpu", published={"num_heads": 2}).model)


@pytest.mark.parametrize("heads", [1, 2])
def test_a_published_unet_has_the_heads_that_the_setting_says(base, run_script, tmp_path, capsys, heads):
    """The file does not hold their number."""
    make_data()
    model = unet_file(tmp_path / "unet.pt", **UNET)
    done, settings = start(run_script, tmp_path / "unet.pt", "--arch=unet", f"--heads={heads}", "--num_timesteps=4000")
    assert not any("heads" in setting for setting in settings)
    assert "warning: " in capsys.readouterr().out  # of fixed_large, say
    assert done["raw_model"].config.num_heads == heads
    told = load_run(str(tmp_path / "unet.pt"), "cpu", published={"num_heads": heads}).model
    assert_same_outputs(done["raw_model"], told)
    if heads == 2:
        assert_same_outputs(done["raw_model"], model)
        assert told.config == replace(model.config, checkpointing=False)
