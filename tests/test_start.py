"""Runs that start from published files, and the one mapping between settings and a model's shape."""

import pytest
import torch
from conftest import refused, script_settings
from figures import inputs
from tiny_runs import TINY, load, make_data, make_run, randomise

from nanodiff.conditions import DataInfo
from nanodiff.diffusion.flow import FlowMatching
from nanodiff.formats.load import load_run
from nanodiff.formats.published import to_meta
from nanodiff.formats.start import start_from
from nanodiff.models.build import build_model, empty_model, make_model_config, model_settings
from nanodiff.models.dit import DiTConfig
from nanodiff.training.checkpoint import load_meta, save_checkpoint

DATA = DataInfo(kind="images", resolution=32, channels=3, num_classes=8, class_names=[*"abcdefgh"])
DIT = DiTConfig.from_depth(
    1,
    16,
    in_channels=3,
    out_channels=6,
    num_classes=8,
    width=64,
    heads=2,
    block="classic",
)
TRAIN = [arg for arg in TINY if not arg.startswith(("--depth", "--patch_size"))]


@pytest.mark.parametrize(
    "args",
    [
        "--depth=3",
        "--depth=5 --width=192 --heads=3 --patch_size=4 --arch=dit_classic --low_res_size=8",
        "--arch=unet --depth=2 --attention_resolutions=8 --num_res_blocks=1 --use_scale_shift_norm=False --heads=1",
    ],
)
def test_settings_to_a_shape_and_back(args):
    settings = script_settings("base_train", *args.split())
    shape = make_model_config(settings, DATA, FlowMatching())
    found = model_settings(shape)
    assert make_model_config(dict(settings) | found, DATA, FlowMatching()) == shape
    given = {arg[2:].split("=")[0] for arg in args.split()}
    for name in given:
        assert found[name] == settings[name]


@pytest.mark.filterwarnings("ignore:for .*no-op:UserWarning")
def test_a_published_file_brings_shape_and_process(base, run_script, tmp_path, capsys):
    """What it does not hold is said, and can be told; without a false warning."""
    make_data()
    weights = randomise(build_model(DIT, "cpu", 0).state_dict())
    torch.save(to_meta(weights, DIT), tmp_path / "dit.pt")
    done = run_script("base_train", *TRAIN, f"--init_from={tmp_path / 'dit.pt'},heads=2", "--model_tag=told")
    out = capsys.readouterr().out
    assert "it knows 8 of 8 classes" in out
    assert "hold heads" not in out
    taken = "label_drop=0.1, noise_schedule=linear, num_timesteps=1000, rescale_timesteps=False"
    assert f"(8 classes) does not hold {taken}" in out
    x, t, y = inputs()
    published = load_run(f"{tmp_path / 'dit.pt'},heads=2", "cpu")
    config = done["config"]
    started = done["raw_model"].eval()
    torch.testing.assert_close(started(x, t, y), published.model(x, t, y))
    start_from(empty_model(DIT), published, config, published.class_names)  # one on another device, as adapters' are
    assert config["arch"] == "dit_classic"
    assert config["objective"] == "eps"
    assert config["variance"] == "learned_range"
    others = ("--objective=x0", "--noise_schedule=cosine", "--model_tag=x0")
    run_script("base_train", *TRAIN, f"--init_from={tmp_path / 'dit.pt'},heads=2", *others)
    out = capsys.readouterr().out
    for setting in ("objective=eps", "noise_schedule=linear"):
        assert f"it was trained with {setting}" in out
    next(published.model.parameters()).data[0] = torch.nan
    line = r"init_from: .*dit.pt.* has NaN or infinity in \w+"
    refused(line, start_from, empty_model(DIT), published, config, published.class_names)
    # Our own export of it holds its heads
    run_script("export", "--model=told", "--form=meta", f"--out={tmp_path / 'again.pt'}", "--ema=raw")
    capsys.readouterr()
    assert load_run(str(tmp_path / "again.pt"), "cpu").model.config.heads == 2
    assert "does not hold" not in capsys.readouterr().out


def test_a_damaged_description_of_the_newest_checkpoint_is_skipped(base, run_script, capsys):
    """A run with init_from takes its settings from its newest intact checkpoint."""
    make_data()
    make_run(run_script, "old")
    tuned = (*TINY, "--init_from=old", "--model_tag=new", "--save_every=1")
    run_dir = run_script("base_train", *tuned, "--num_iterations=2")["run_dir"]
    for damaged in ('{"changes": 1}', '{"config": [], "model_config": {}}'):
        (run_dir / "checkpoints" / "step_000002" / "meta.json").write_text(damaged)
        assert run_script("base_train", *tuned, "--num_iterations=2")["start_step"] == 1
        assert "corrupt checkpoint skipped: " in capsys.readouterr().out


def test_another_source_is_another_run(base, run_script):
    """A run of whole weights that resumes reads its source no more; so the weights would stay those of the first."""
    make_data()
    for tag in ("a", "b"):
        make_run(run_script, tag)
    tuned = ("base_train", *TINY, "--model_tag=tuned", "--num_iterations=1")
    run_script(*tuned, "--init_from=a")
    refused(r"init_from='b' \(was 'a'\); use another model_tag", run_script, *tuned, "--init_from=b")


def test_labels_that_the_source_lacks_are_said_to_be_ignored(base, run_script, capsys):
    make_data()
    make_run(run_script, "old", "--class_cond=False")
    tuned = (*TINY, "--init_from=old", "--num_iterations=1")
    for more, is_said in (
        ("--model_tag=a", True),
        ("--model_tag=b --class_cond", False),
    ):
        capsys.readouterr()
        run_script("base_train", *tuned, *more.split())
        assert ("labels are ignored" in capsys.readouterr().out) == is_said


def test_a_maps_teacher_cannot_be_exchanged(base, run_script):
    """By its weights, not its name; a map of an earlier version, which holds only the name, goes on."""
    make_data()
    teacher = make_run(run_script, "old") / "checkpoints" / "step_000001"
    its_map = (*TINY, "--init_from=old", "--objective=flow_map", "--model_tag=map", "--resume=changed")
    run_dir = run_script("base_train", *its_map, "--num_iterations=1")["run_dir"]
    tensors = {p.stem: load(p) for p in teacher.iterdir() if p.suffix != ".json"}
    tensors["ema_0.999"] = randomise(tensors["ema_0.999"], seed=5)
    save_checkpoint(teacher.parents[1], 1, tensors, load_meta(teacher))
    exchanged = ("base_train", *its_map, "--num_iterations=2")
    refused("old/.*has other weights than when this run began", run_script, *exchanged)
    checkpoint = run_dir / "checkpoints" / "step_000001"
    back = (*TINY, "--init_from=map", "--objective=flow", "--num_iterations=1")
    refused("is a flow map; accepted:", run_script, "base_train", *back)
    meta = load_meta(checkpoint)
    assert meta["teacher"] == "old,step=1,ema=0.999"
    assert meta.pop("teacher_sha256")
    tensors = {p.stem: load(p) for p in checkpoint.iterdir() if p.suffix != ".json"}
    save_checkpoint(run_dir, 1, tensors, meta)
    assert run_script(*exchanged)["step"] == 2


def test_new_models_see_t_slowly_and_older_ones_as_before(base, run_script):
    """Resumed, tuned, as a teacher."""
    make_data()
    run_dir = make_run(run_script, "old")
    checkpoint = run_dir / "checkpoints" / "step_000001"
    meta = load_meta(checkpoint)
    assert meta["config"].pop("time_input") == "62.5t"  # the setting is younger than some runs
    tensors = {p.stem: load(p) for p in checkpoint.iterdir() if p.suffix != ".json"}
    save_checkpoint(run_dir, 2, tensors, meta | {"step": 2})
    tuned = ("--init_from=old", "--num_iterations=1")
    for more, time_input in (
        (["--model_tag=old"], "1000t"),
        (tuned, "1000t"),
        ((*tuned, "--objective=flow_map", "--model_tag=map"), "1000t"),
        (["--arch=dit_classic"], "1000t"),
        (["--model_tag=new"], "62.5t"),
    ):
        assert run_script("base_train", *TINY, *more)["time_input"] == time_input
    assert load_run("map", "cpu").process.time_input == "1000t"


def test_the_tag_keeps_the_dots_of_its_source(base, run_script):
    make_data()
    make_run(run_script, "v1.5")
    assert run_script("base_train", *TINY, "--init_from=v1.5")["run_dir"].name == "v1.5_tiny"
