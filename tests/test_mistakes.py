"""A user's mistake gets one line that names it and exit code 2, and leaves nothing half-written."""

import gc
import shutil

import numpy as np
import pytest
import torch
from processes import run_process
from tiny_runs import TINY, make_data

from nanodiff.common import UserError
from nanodiff.data.dataset import DatasetWriter

TRAIN = ("base_train", *TINY)
UNET = ("base_train", *(arg for arg in TINY if "patch_size" not in arg), "--arch=unet")
SAMPLE = ("sample", "--device_type=cpu", "--num_images=2", "--steps=1")
EVAL = ("base_eval", "--device_type=cpu")
PREPARE = ("prepare_data", "--workers=1")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The base folder and current folder: a set, runs of one step, and files that are wrong in many ways."""
    root = tmp_path_factory.mktemp("place")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANODIFF_BASE_DIR", str(root))
        patch.chdir(root)
        make_data()
        for tag, *args in (("a",), ("plain", "--class_cond=False")):
            run_process(*TRAIN, "--num_iterations=1", f"--model_tag={tag}", *args)
        shutil.copytree(root / "runs" / "a", root / "runs" / "broken")
        model = root / "runs" / "broken" / "checkpoints" / "step_000001" / "model.safetensors"
        data = model.read_bytes()
        model.write_bytes(data[:5000] + b"?" + data[5001:])
        (root / "runs" / "empty" / "checkpoints").mkdir(parents=True)
        (root / "file").write_text("no folder")
        np.savez(root / "objects.npz", arr_0=np.array([{}], dtype=object))
        with DatasetWriter("alone") as writer:
            writer.append("train", np.zeros((4, 3, 16, 16), np.uint8))
        flat = ("pos_embed", "x_embedder.proj.weight", "final_layer.linear.weight", "blocks.0.mlp.fc1.weight")
        torch.save({name: torch.zeros(1) for name in flat}, root / "flat.pt")  # almost a published model
        yield root


MISTAKES = [
    # settings
    ((*TRAIN, "--dept=3"), "dept"),
    ((*TRAIN, "--num_iterations=-1", "--target_param_data_ratio=-1"), "no horizon"),
    ((*TRAIN, "--patch_size=5"), "patch_size=5"),
    ((*TRAIN, "--timesteps=loss-second-moment"), "loss-second-moment"),
    ((*TRAIN, "--bpd_every=1"), "bpd_every"),
    ((*TRAIN, "--objective=eps", "--num_timesteps=20", "--sample_steps=21", "--sample_every=0"), "21"),
    ((*TRAIN, "--cfg_interval=0.3,1.5", "--sample_every=0"), "0.3,1.5"),
    ((*TRAIN, "--low_res_size=16"), "low_res_size=16"),
    ((*UNET, "--attention_resolutions=a"), "attention_resolutions"),
    ((*TRAIN, "--guided_from=0.5", "--label_drop=0"), "guided_from=0.5 needs classes or vectors, label_drop > 0"),
    ((*TRAIN, "--guided_from=0.5", "--class_cond=False"), "guided_from=0.5 needs classes"),
    ((*TRAIN, "--guided_from=0.5", "--cfg_scale=1"), "cfg_scale > 1"),
    ((*TRAIN, "--guided_from=0.5", "--objective=eps"), "guided_from"),
    ((*TRAIN, "--objective=flow_map"), "flow_map tunes a flow run"),
    ((*UNET, "--objective=flow_map"), "flow map needs arch=dit"),
    # settings that would do nothing
    ((*TRAIN, "--dropout=0.3"), "dropout"),
    ((*TRAIN, "--arch=unet"), "patch_size"),
    ((*TRAIN, "--optimizer=adamw", "--muon_lr=0.1"), "muon_lr"),
    ((*TRAIN, "--objective=eps", "--timestep_shift=3"), "timestep_shift"),
    ((*TRAIN, "--timesteps=uniform", "--timestep_std=0.7"), "timestep_std"),
    # data sets
    ((*TRAIN, "--data=unheard"), "unheard"),
    # runs
    ((*TRAIN, "--model_tag=a", "--resume=never"), "resume=never"),
    ((*TRAIN, "--model_tag=broken"), "broken"),
    ((*TRAIN, f"--model_tag={'x' * 300}"), "model_tag"),
    ((*SAMPLE, f"--model={'x' * 300}"), "xxx"),
    ((*SAMPLE, "--model=~nobody/x"), "~nobody/x"),
    ((*SAMPLE, "--model=empty"), "empty"),
    ((*SAMPLE, "--model=a", "--ema=0.5"), "0.5"),
    ((*SAMPLE, "--model=a", "--out=file/x"), "see out"),
    ((*SAMPLE, "--model=flat.pt"), "flat.pt"),
    ((*EVAL, "--model=plain", "--metric=loss", "--data=alone"), "'val'"),
    ((*EVAL, "--model=plain", "--metric=class_accuracy"), "class_accuracy"),
    ((*EVAL, "--model=a", "--metric=bpd"), "bpd"),
    # preparing data
    (PREPARE, "path"),
    ((*PREPARE, "--path=objects.npz"), "objects.npz"),
    ((*PREPARE, "--source=shapes", "--name=tiny"), "tiny"),
]


def whole(root):
    """What a mistake must not touch: data sets, checkpoints, and the files beside them."""
    kept = [*root.glob("*"), *root.glob("data/*/*"), *root.glob("runs/*/checkpoints/*/*")]
    return sorted((str(p), p.stat().st_size if p.is_file() else None) for p in kept)


@pytest.mark.parametrize(
    ("arguments", "named"), MISTAKES, ids=lambda v: " ".join(v[-2:]) if isinstance(v, tuple) else v
)
def test_a_mistake_is_one_line_and_leaves_nothing(place, run_script, capsys, arguments, named):
    before = whole(place)
    try:
        run_script(*arguments)
        pytest.fail("nothing was wrong?")
    except UserError as e:  # which the excepthook prints after "error: "
        message, code = f"error: {e}", 2
    except SystemExit as e:
        message, code = capsys.readouterr().err.strip(), e.code
    gc.collect()  # the frames of the error hold the run's lock, as the process would until its end
    assert code == 2 and message.startswith("error: ") and "\n" not in message and named in message, message
    assert whole(place) == before
    assert not list(place.rglob(".tmp*"))


@pytest.mark.slow
def test_as_the_user_sees_it(place):
    done = run_process(*SAMPLE, "--model=unheard", check=False)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and line.startswith("error: ") and "unheard" in line


def test_a_base_folder_that_cannot_be_written(place, run_script, monkeypatch):
    monkeypatch.setenv("NANODIFF_BASE_DIR", str(place / "file" / "under"))
    for arguments in ((*TRAIN, "--data=shapes"), (*PREPARE, "--source=shapes", "--name=mine")):
        with pytest.raises(UserError, match="under"):
            run_script(*arguments)
