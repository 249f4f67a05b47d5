"""A user's mistake gets one line that names it and exit code 2, and leaves nothing half-written."""

import gc
import gzip
import json
import shutil

import numpy as np
import pytest
import torch
from image_helpers import idx, make_folder, write_mnist
from processes import on_ranks, run_process
from tiny_runs import TINY, make_data

from nanodiff.common import UserError
from nanodiff.data.dataset import DatasetWriter

TRAIN = ("base_train", *TINY)
UNET = ("base_train", *(arg for arg in TINY if "patch_size" not in arg), "--arch=unet")
SAMPLE = ("sample", "--device_type=cpu", "--num_images=2", "--steps=1")
EVAL = ("base_eval", "--device_type=cpu")
PREPARE = ("prepare_data", "--workers=1")


def damage_sets(root):
    """Copies of the tiny set, each with one fault."""
    data = root / "data"
    for name in ("garbled", "future", "short", "bits", "shuffled"):
        shutil.copytree(data / "tiny", data / name)
    (data / "garbled" / "meta.json").write_text("{")
    meta = json.loads((data / "tiny" / "meta.json").read_text())
    (data / "future" / "meta.json").write_text(json.dumps(meta | {"format": 99}))
    shard = data / "short" / "val_images_000.npy"
    shard.write_bytes(shard.read_bytes()[:-1])
    shard = data / "bits" / "train_images_000.npy"
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    labels = data / "shuffled" / "train_labels.npy"
    labels.write_bytes(labels.read_bytes()[:-8] + (77).to_bytes(8, "little"))
    with DatasetWriter("alone") as writer:
        writer.append("train", np.zeros((4, 3, 16, 16), np.uint8))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The base folder and current folder: a set, runs of one step, and files that are wrong in many ways."""
    root = tmp_path_factory.mktemp("place")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANODIFF_BASE_DIR", str(root))
        patch.chdir(root)
        make_data()
        with DatasetWriter("single") as writer:
            writer.append("train", np.zeros((1, 3, 16, 16), np.uint8))
            writer.append("val", np.zeros((1, 3, 16, 16), np.uint8))
        for tag, *args in (("a",), ("gauss", "--objective=eps", "--num_timesteps=30"), ("plain", "--class_cond=False")):
            run_process(*TRAIN, "--num_iterations=1", f"--model_tag={tag}", *args)
        shutil.copytree(root / "runs" / "a", root / "runs" / "broken")
        model = root / "runs" / "broken" / "checkpoints" / "step_000001" / "model.pt"
        data = model.read_bytes()
        model.write_bytes(data[:5000] + b"?" + data[5001:])
        (root / "runs" / "empty" / "checkpoints").mkdir(parents=True)
        (root / "file").write_text("no folder")
        (root / "typo.py").write_text("depht = 2\n")
        make_folder(root / "mixed", sizes=((8, 8), (9, 9)))
        np.savez(root / "objects.npz", arr_0=np.array([{}], dtype=object))
        (root / "idx3-ubyte.gz").write_bytes(gzip.compress(b"\0\0\x08\x03" + b"\0" * 5))
        damage_sets(root)
        flat = ("pos_embed", "x_embedder.proj.weight", "final_layer.linear.weight", "blocks.0.mlp.fc1.weight")
        torch.save({name: torch.zeros(1) for name in flat}, root / "flat.pt")  # almost a published model
        write_mnist(root / "mnist")
        (root / "mnist" / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(np.zeros(5, np.uint8))))
        yield root


MISTAKES = [
    # settings
    ((*TRAIN, "--dept=3"), "dept"),
    ((*TRAIN, "typo.py"), "depht"),
    ((*TRAIN, "--ema_rates=0.9,2"), "ema_rates"),
    ((*TRAIN, "--total_batch_size=7", "--device_batch_size=2"), "total_batch_size=7"),
    ((*TRAIN, "--num_iterations=-1", "--target_param_data_ratio=-1"), "no horizon"),
    ((*TRAIN, "--patch_size=5"), "patch_size=5"),
    ((*TRAIN, "--timesteps=loss-second-moment"), "loss-second-moment"),
    ((*TRAIN, "--bpd_every=1"), "bpd_every"),
    ((*TRAIN, "--objective=eps", "--num_timesteps=10", "--noise_schedule=linear"), "num_timesteps=10"),
    ((*TRAIN, "--objective=eps", "--num_timesteps=20", "--sample_steps=21", "--sample_every=0"), "21"),
    ((*TRAIN, "--cfg_interval=0.3,1.5", "--sample_every=0"), "0.3,1.5"),
    ((*TRAIN, "--low_res_size=16"), "low_res_size=16"),
    ((*UNET, "--attention_resolutions=a"), "attention_resolutions"),
    # data sets
    ((*TRAIN, "--data=unheard"), "unheard"),
    ((*TRAIN, "--data=garbled"), "meta.json"),
    ((*TRAIN, "--data=future"), "99"),
    ((*TRAIN, "--data=short"), "val_images_000.npy"),
    # runs
    ((*TRAIN, "--model_tag=a", "--resume=7"), "step 7"),
    ((*TRAIN, "--model_tag=a", "--resume=never"), "resume=never"),
    ((*TRAIN, "--model_tag=broken"), "broken"),
    ((*TRAIN, f"--model_tag={'x' * 300}"), "model_tag"),
    ((*SAMPLE, "--model=broken"), "broken"),
    ((*SAMPLE, f"--model={'x' * 300}"), "xxx"),
    ((*SAMPLE, "--model=~nobody/x"), "~nobody/x"),
    ((*SAMPLE, "--model=empty"), "empty"),
    ((*SAMPLE, "--model=a", "--ema=0.5"), "0.5"),
    ((*SAMPLE, "--model=a", "--checkpoint_step=9"), "step 9"),
    ((*SAMPLE, "--model=a", "--cfg_interval=0.8,0.1"), "0.8,0.1"),
    ((*SAMPLE, "--model=a", "--sampler=ddpm"), "ddpm"),
    ((*SAMPLE, "--model=gauss", "--respacing=ddim17"), "ddim17"),
    ((*SAMPLE, "--model=a", "--eta=0.5"), "eta"),
    ((*SAMPLE, "--model=a", "--respacing=10"), "respacing"),
    ((*SAMPLE, "--model=a", "--out=file/x"), "see out"),
    ((*SAMPLE, "--model=flat.pt"), "flat.pt"),
    ((*EVAL, "--model=plain", "--metric=loss", "--data=alone"), "'val'"),
    ((*EVAL, "--model=plain", "--metric=class_accuracy"), "class_accuracy"),
    ((*EVAL, "--model=a", "--metric=bpd"), "bpd"),
    ((*EVAL, "--model=a", "--metric=fd_classifier", "--cfg_interval=0.3"), "'0.3'"),
    # preparing data
    (PREPARE, "path"),
    ((*PREPARE, "--path=mixed"), "resolution"),
    ((*PREPARE, "--path=objects.npz"), "objects.npz"),
    ((*PREPARE, "--source=idx", "--path=idx3-ubyte.gz"), "idx3-ubyte.gz"),
    ((*PREPARE, "--source=shapes", "--name=a/b"), "a/b"),
    ((*PREPARE, "--source=shapes", "--name=tiny"), "tiny"),
    ((*PREPARE, "--verify=unheard"), "unheard"),
    ((*PREPARE, "--verify=bits"), "train_images_000.npy"),
    ((*PREPARE, "--path=mnist"), "11 labels for 26 images"),
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


def test_more_ranks_than_images(place, run_script):
    def work(rank):
        with pytest.raises(UserError, match=r"more ranks \(2\) than images \(1\)"):
            run_script(*TRAIN, "--data=single", "--num_iterations=1")

    on_ranks(work)


def test_a_base_folder_that_cannot_be_written(place, run_script, monkeypatch):
    monkeypatch.setenv("NANODIFF_BASE_DIR", str(place / "file" / "under"))
    for arguments in ((*TRAIN, "--data=shapes"), (*PREPARE, "--source=shapes", "--name=mine")):
        with pytest.raises(UserError, match="under"):
            run_script(*arguments)
