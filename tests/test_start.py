"""Starting a run from other weights: own runs in test_base_train, here the published files."""

import pytest
import torch
from tiny_runs import make_data, randomise

from nanodiff.formats.load import load_run
from nanodiff.formats.published import to_improved_diffusion, to_meta
from nanodiff.models.build import build_model
from nanodiff.models.dit import DiTConfig
from nanodiff.models.unet import UNetConfig

DIT = DiTConfig.from_depth(1, 16, in_channels=3, out_channels=6, num_classes=8, width=64, heads=2, block="classic")
UNET = UNetConfig.from_depth(
    1, 16, in_channels=3, out_channels=3, num_classes=8, num_res_blocks=1, attention_resolutions=(8,), null_class=False
)
TRAIN = (
    "--data=tiny --total_batch_size=8 --num_iterations=0 --eval_every=-1 --sample_every=-1 --device_type=cpu".split()
)


@pytest.mark.parametrize("config, publish", [(DIT, to_meta), (UNET, to_improved_diffusion)])
def test_a_published_file_is_what_the_run_starts_as(base, run_script, tmp_path, capsys, config, publish):
    """The command that the refusal names gives a run whose outputs are the file's."""
    make_data()
    weights = randomise(build_model(config, "cpu", 0).state_dict())
    torch.save(publish(weights, config), tmp_path / "published.pt")
    args = (*TRAIN, f"--init_from={tmp_path / 'published.pt'}", "--objective=eps", "--compile=False")
    with pytest.raises(ValueError, match="another shape; to start from it: ") as refusal:
        run_script("base_train", *args, "--depth=3", "--heads=1")
    settings = str(refusal.value).split("start from it: ")[1].split()
    done = run_script("base_train", *args, "--depth=3", "--heads=1", *settings, "--label_drop=0")
    out = capsys.readouterr().out
    assert "warning: " in out and " was trained with " in out and "by order: 8 of 8" in out
    source = load_run(str(tmp_path / "published.pt"), "cpu")
    x, t, y = torch.randn(3, 3, 16, 16), torch.tensor([10.0, 500.0, 990.0]), torch.tensor([0, 3, 7])
    torch.testing.assert_close(done["raw_model"].eval()(x, t, y), source.model(x, t, y))
