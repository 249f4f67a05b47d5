"""An image depends on (seed, index) and its class alone, whatever else happens; published files are understood."""

import argparse
import hashlib
import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, command, kill_all
from tiny_runs import TIMELESS, TINY, make_autoencoder, make_data, make_run, randomise

from nanodiff.common import UserError
from nanodiff.data import latents as codec
from nanodiff.data.dataset import open_dataset
from nanodiff.diffusion import sampling as evaluation
from nanodiff.diffusion.flow import FlowMatching
from nanodiff.diffusion.gaussian import GaussianDiffusion
from nanodiff.diffusion.sampling import SampleSettings, network_evaluations
from nanodiff.formats.load import load_run
from nanodiff.formats.published import to_meta
from nanodiff.formats.sample_store import SampleStore
from nanodiff.models.dit import DiT, DiTConfig
from nanodiff.models.unet import UNet, UNetConfig


def sample(run_script, out, *args):
    """(images (N, H, W, C) uint8, labels (N,), protocol) as scripts/sample.py writes them."""
    Path(f"{out}.npz").unlink(missing_ok=True)  # a finished file is never replaced
    run_script("sample", *TIMELESS, "--npz", "--steps=3", f"--out={out}", *args)
    with np.load(f"{out}.npz") as file:
        return file["arr_0"], file["labels"], json.loads(str(file["protocol"]))


def assert_same(a, b, apart=1):
    """Equal up to the rounding of a sum that was taken in another order."""
    assert a.shape == b.shape and np.abs(a.astype(int) - b).max() <= apart


@pytest.fixture
def flow(base, run_script):
    make_data()
    return make_run(run_script, "flow")


GAUSSIAN = ("--objective=eps", "--num_timesteps=50", "--variance=learned_range")


@pytest.mark.parametrize(
    "training, more",
    [
        ((), ("--sampler=heun",)),
        ((), ("--sampler=sde", "--ema=raw")),
        ((), ("--sampler=euler", "--cfg_interval=0.2,0.7")),
        (GAUSSIAN, ("--sampler=ddpm",)),
        (GAUSSIAN, ("--sampler=ddim",)),
        (GAUSSIAN, ("--sampler=dpm++",)),
    ],
)
def test_batch_size_does_not_change_an_image(base, run_script, tmp_path, training, more):
    make_data()
    make_run(run_script, "a", *training)
    one, _, _ = sample(run_script, tmp_path / "a", "--num_images=7", *more)
    few, _, _ = sample(run_script, tmp_path / "b", "--num_images=5", "--batch_size=2", *more)
    assert_same(one[:5], few)  # nor how many are drawn
    assert len(np.unique(one.reshape(7, -1), axis=0)) == 7


def test_respacing_and_eta_are_those_of_the_published_code(base, run_script, tmp_path):
    """Respacing "10" is 10 evenly spaced steps; DDIM with eta=1 on all timesteps is DDPM (Song et al. 2020, eq. 16)."""
    make_data()
    make_run(run_script, "eps", "--objective=eps", "--num_timesteps=50", "--variance=fixed_small")
    draw = lambda name, *args: sample(run_script, tmp_path / name, "--num_images=4", *args)
    ten, _, _ = draw("a", "--steps=10")
    respaced, _, protocol = draw("b", "--respacing=10")
    assert (ten == respaced).all() and protocol["steps"] == "10" and protocol["network_evaluations"] == 2 * 10
    for spec, steps in (("ddim25", 25), ("5,10,15", 30)):
        other, _, protocol = draw("c", f"--respacing={spec}")
        assert protocol["network_evaluations"] == 2 * steps and (other != ten).any()
    noisy, _, _ = draw("d", "--steps=50", "--eta=1", "--cfg_scale=1")
    ddpm, _, _ = draw("e", "--steps=50", "--sampler=ddpm", "--cfg_scale=1")
    quiet, _, _ = draw("f", "--steps=50", "--cfg_scale=1")
    assert_same(noisy, ddpm)
    assert (noisy != quiet).any()


def test_seed_class_and_weights_change_an_image(flow, run_script, tmp_path):
    first, labels, protocol = sample(run_script, tmp_path / "a", "--num_images=4", "--classes=3")
    assert labels.tolist() == [3] * 4 and protocol["weights"] == "0.999" and protocol["step"] == 1
    for change in ("--seed=1", "--seed=4294967296", "--classes=4", "--ema=raw", "--checkpoint_step=0", "--cfg_scale=4"):
        other, _, _ = sample(run_script, tmp_path / "b", "--num_images=4", "--classes=3", change)
        assert (np.abs(other.astype(int) - first).max(axis=(1, 2, 3)) > 3).all(), change
    # an image keeps its noise and class when the classes around it change
    mixed, labels, _ = sample(run_script, tmp_path / "c", "--num_images=4", "--classes=3,5")
    assert labels.tolist() == [3, 5, 3, 5]
    assert_same(mixed[::2], first[::2])


def test_what_is_written(flow, run_script, tmp_path):
    Image = pytest.importorskip("PIL.Image", reason="Pillow reads the PNG")
    out = tmp_path / "new" / "cfg_1.5"  # its dot is no suffix
    images, labels, protocol = sample(run_script, out, "--num_images=20", "--seed=3", "--cfg_scale=1.5")
    assert images.shape == (20, 16, 16, 3) and images.dtype == np.uint8
    assert np.bincount(labels, minlength=8).tolist() == [3, 3, 3, 3, 2, 2, 2, 2]  # as even as can be
    with Image.open(f"{out}.png") as png:
        assert png.mode == "RGB" and png.size == (8 * 50 + 2, 3 * 50 + 2)  # three times as large, padding 2
        assert json.loads(png.text["protocol"]) == protocol
        assert (np.asarray(png)[2:50:3, 52:100:3] == images[1]).all()
    weights = flow / "checkpoints" / "step_000001" / "ema_0.999.pt"
    given = dict(checkpoint=str(weights.parent), step=1, sha256=hashlib.sha256(weights.read_bytes()).hexdigest())
    given |= dict(sampler="heun", steps=3, eta=0.0, cfg_scale=1.5, num_images=20, seed=3, dtype="float32")
    given |= dict(network_evaluations=2 * 5, guide=None, autoencoder=None, torch=torch.__version__)
    assert given.items() <= protocol.items()
    # by default beside the run, and without .npz
    run_script("sample", *TIMELESS, "--steps=1", "--num_images=1")
    name = "sample_000001_seed0_num_images=1_steps=1_dtype=float32.png"
    assert [p.name for p in (flow / "samples").iterdir()] == [name]
    with pytest.raises(UserError, match="num_images=257: a grid shows 256; --npz keeps more"):
        run_script("sample", *TIMELESS, "--num_images=257")


def test_models_without_classes_or_null_class_are_not_guided(base, run_script, tmp_path):
    make_data()
    make_run(run_script, "plain", "--class_cond=False")
    _, labels, protocol = sample(run_script, tmp_path / "a", "--run=plain", "--num_images=3", "--cfg_scale=4")
    assert labels.tolist() == [0, 0, 0] and protocol["cfg_scale"] == 1
    raw, _, _ = sample(run_script, tmp_path / "raw", "--num_images=3", "--ema=raw")
    zero, _, protocol = sample(run_script, tmp_path / "zero", "--num_images=3", "--cfg_scale=0", "--guide_ema=raw")
    assert (raw == zero).all() and protocol["cfg_scale"] == 0  # another model can still guide it
    make_run(run_script, "always", "--label_drop=0")
    _, labels, protocol = sample(run_script, tmp_path / "b", "--run=always", "--num_images=3", "--cfg_scale=4")
    assert labels.tolist() == [0, 1, 2] and protocol["cfg_scale"] == 1


def test_latents_are_decoded_by_an_autoencoder_that_is_loaded_once(base, run_script, tmp_path, monkeypatch):
    make_data()
    vae = make_autoencoder(tmp_path / "vae")
    make_run(run_script, "latent", f"--autoencoder={vae}", "--patch_size=2")
    opened, open_autoencoder = [], codec.open_autoencoder
    monkeypatch.setattr(codec, "open_autoencoder", lambda path: opened.append(path) or open_autoencoder(path))
    one, _, protocol = sample(run_script, tmp_path / "a", "--num_images=5")
    times = len(opened)
    few, _, _ = sample(run_script, tmp_path / "b", "--num_images=5", "--batch_size=2")
    assert one.shape == (5, 16, 16, 3) and len(opened) == 2 * times
    assert_same(one, few)
    expected = open_autoencoder(str(vae))
    assert (protocol["autoencoder"], protocol["autoencoder_sha256"]) == (expected.name, expected.sha256)
    vae.rename(tmp_path / "moved")  # then latents are shown as they are
    shown, _, protocol = sample(run_script, tmp_path / "c", "--num_images=5")
    assert shown.shape == (5, 4, 4, 3) and protocol["autoencoder"] is None


# ---------------------------------------------------------------------------------------------------------------------
# Guidance by another model, and what it costs


def test_autoguidance(flow, run_script, tmp_path):
    """x + s (x - x) = x; s = 0 leaves the guide alone and s = 1 the model (Karras et al. 2024, eq. 4)."""
    args = ("--num_images=4", "--checkpoint_step=1")
    draw = lambda name, *more: sample(run_script, tmp_path / name, *args, *more)
    plain, _, _ = draw("plain", "--cfg_scale=1")
    raw, _, _ = draw("raw", "--cfg_scale=1", "--ema=raw")
    itself, _, protocol = draw("itself", "--cfg_scale=7", "--guide_step=1")
    assert (itself == plain).all() and protocol["network_evaluations"] == 2 * 5
    assert protocol["guide"] == {key: protocol[key] for key in ("checkpoint", "step", "weights", "sha256")}
    zero, _, protocol = draw("zero", "--cfg_scale=0", "--guide_ema=raw")
    assert (zero == raw).all() and protocol["guide"]["weights"] == "raw"
    one, _, protocol = draw("one", "--cfg_scale=1", f"--guide_run={flow}", "--guide_step=0")
    assert (one == plain).all() and protocol["network_evaluations"] == 5 and protocol["guide"]["step"] == 0
    beyond, _, _ = draw("beyond", "--cfg_scale=3", "--guide_ema=raw")
    assert (np.abs(beyond.astype(int) - plain).max(axis=(1, 2, 3)) > 3).all()


@pytest.mark.parametrize(
    "settings, differing",
    [
        (["--class_cond=False"], "classes"),
        (["--objective=flow_x0"], "prediction"),
        (["--objective=eps"], "process, noise schedule, prediction"),
        (["--data=large"], "image size"),
    ],
)
def test_a_guide_that_does_not_fit(flow, run_script, settings, differing):
    make_data("large", resolution=32)
    make_run(run_script, "other", *settings)
    with pytest.raises(UserError, match=f"other.* cannot guide .*flow.*: they differ in {differing}$"):
        run_script("sample", *TIMELESS, "--run=flow", "--guide_run=other")
    with pytest.raises(UserError, match="no checkpoint of step 7"):
        run_script("sample", *TIMELESS, "--run=flow", "--guide_step=7")


@pytest.mark.parametrize("num_classes", [0, 5])
def test_network_evaluations(num_classes):
    """As the samplers' papers count them; guidance doubles those that it acts on."""
    model = argparse.Namespace(config=argparse.Namespace(in_channels=3, out_channels=6, num_classes=num_classes))
    eps, flow, guide = GaussianDiffusion(variance="learned_range"), FlowMatching(), object()
    for sampler in ("ddpm", "ddim", "dpm++"):
        assert network_evaluations(model, eps, SampleSettings(10, sampler)) == 10
    model.config.out_channels = 3
    for sampler, expected in (("euler", 10), ("sde", 10), ("heun", 19)):
        assert network_evaluations(model, flow, SampleSettings(10, sampler)) == expected
        assert network_evaluations(model, flow, SampleSettings(10, sampler, 2.0, weak_model=guide)) == 2 * expected
        if num_classes:
            assert network_evaluations(model, flow, SampleSettings(10, sampler, 2.0)) == 2 * expected
    # Euler asks at t = 1, 0.75, 0.5 and 0.25, of which two are in the interval
    settings = SampleSettings(4, "euler", 2.0, cfg_interval=(0.3, 0.8), weak_model=guide)
    assert network_evaluations(model, flow, settings) == 4 + 2


# ---------------------------------------------------------------------------------------------------------------------
# Runs that were stopped

LONG = (*TIMELESS, "--npz", "--num_images=42", "--batch_size=4", "--sampler=sde", "--steps=3")  # 11 parts, one of 2


def forked(args, ranks=1, before=None):
    """Run scripts/sample.py in forked processes, one thread each; their exit codes, or minus the signals.

    `before(rank)` runs first in each. When one is killed, so are the others, as torchrun does it.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pids = []
    for rank in range(ranks):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                torch.set_num_threads(1)
                if ranks > 1:  # what torchrun tells a rank
                    told = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
                    os.environ.update({name: str(value) for name, value in told.items()})
                sys.argv = ["sample", *map(str, args)]
                if before:
                    before(rank)
                runpy.run_module("scripts.sample", run_name="__main__")
                code = 0
            except SystemExit as e:
                code = e.code
            finally:
                os._exit(code)
        pids.append(pid)
    codes = {}
    while len(codes) < ranks:
        for pid in set(pids) - set(codes):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
            elif min(codes.values(), default=0) < 0:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    return [codes[pid] for pid in pids]


def after_one_part(number, of=0):
    """For forked: rank `of` gets signal `number` when it is about to write its second part."""

    def before(rank):
        write, signals = SampleStore.write, iter([0, number])

        def write_or_die(*args):
            os.kill(os.getpid(), next(signals, 0))
            write(*args)

        if rank == of:
            SampleStore.write = write_or_die

    return before


@pytest.fixture
def alone(flow, tmp_path):
    """The bytes of LONG's file, drawn by one process in one go."""
    assert forked((*LONG, f"--out={tmp_path / 'alone'}")) == [0]
    return (tmp_path / "alone.npz").read_bytes(), (tmp_path / "alone.png").read_bytes()


def test_two_ranks_make_the_file_of_one(alone, tmp_path):
    assert forked((*LONG, f"--out={tmp_path / 'two'}"), ranks=2) == [0, 0]
    assert ((tmp_path / "two.npz").read_bytes(), (tmp_path / "two.png").read_bytes()) == alone
    with np.load(tmp_path / "two.npz", allow_pickle=False) as file:
        assert file["arr_0"].shape == (42, 16, 16, 3) and (file["labels"] == np.arange(42) % 8).all()
        assert "world" not in (protocol := str(file["protocol"])) and json.loads(protocol)["batch_size"] == 4


@pytest.mark.parametrize("ranks", [(1, 1, 1, 1), (2, 1, 2, 2)])
def test_killed_three_times(alone, tmp_path, monkeypatch, ranks):
    args, drawn = (*LONG, f"--out={tmp_path / 'a'}"), tmp_path / "drawn"
    sample_images = evaluation.sample_images

    def counted(*args, **kwargs):
        with open(drawn, "a") as file:
            file.write(f"{args[2][0]}\n")  # the seed of the first image
        return sample_images(*args, **kwargs)

    monkeypatch.setattr(evaluation, "sample_images", counted)
    for n in ranks[:3]:
        assert forked(args, n, after_one_part(signal.SIGKILL))[0] == -signal.SIGKILL
        assert not (tmp_path / "a.npz").exists()
    assert forked(args, ranks[3]) == [0] * ranks[3]
    assert ((tmp_path / "a.npz").read_bytes(), (tmp_path / "a.png").read_bytes()) == alone
    assert not list(tmp_path.glob(".a*"))
    seeds = drawn.read_text().split()
    assert {int(seed) for seed in seeds} == set(range(0, 42, 4))  # every part
    assert len(seeds) <= 11 + sum(ranks[:3])  # and twice only what was in work


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_signal_ends_the_run_after_a_part(alone, tmp_path, capfd, ranks):
    args = (*LONG, f"--out={tmp_path / 'a'}")
    assert forked(args, ranks, after_one_part(signal.SIGTERM, of=ranks - 1)) == [128 + signal.SIGTERM] * ranks
    assert "stopped by signal 15 at " in capfd.readouterr().out and not (tmp_path / "a.npz").exists()
    assert len(list((tmp_path / ".a.npz.parts").glob("*.npy"))) == (2 if ranks == 1 else 6 + 2)  # all of rank 0's
    assert forked(args, ranks) == [0] * ranks
    assert f"{8 if ranks == 1 else 22 + 8} of 42 images are there already" in capfd.readouterr().out
    assert (tmp_path / "a.npz").read_bytes() == alone[0]


def test_what_is_there_is_not_drawn_again(flow, run_script, tmp_path, monkeypatch, capsys):
    first, _, _ = sample(run_script, tmp_path / "a", "--num_images=3")
    (tmp_path / "a.png").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "sample_images", None)
        run_script("sample", *TIMELESS, "--npz", "--steps=3", f"--out={tmp_path / 'a'}", "--num_images=3")
        assert f"3 images of this protocol are there already: {tmp_path / 'a.npz'}" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"a\.npz holds images of another protocol: choose another out"):
        run_script("sample", *TIMELESS, "--npz", "--steps=3", f"--out={tmp_path / 'a'}", "--num_images=3", "--seed=1")
    with np.load(tmp_path / "a.npz") as file:
        assert (file["arr_0"] == first).all()


def test_default_names_tell_what_differs(flow, run_script):
    """So a small sample does not replace a large one, and the same command finds its own file again."""
    few = (*TIMELESS, "--npz", "--steps=1")
    for args in (["--num_images=4"], ["--num_images=2"], ["--num_images=2", "--classes=ring"], ["--num_images=2"]):
        run_script("sample", *few, *args)
    sizes = {}
    for path in (flow / "samples").glob("*.npz"):
        with np.load(path) as file:
            sizes[path.name.removeprefix("sample_000001_seed0_")] = len(file["arr_0"])
    rest = "steps=1_dtype=float32.npz"
    assert sizes == {f"num_images=4_{rest}": 4, f"num_images=2_{rest}": 2, f"num_images=2_classes=ring_{rest}": 2}


def test_classes_by_name(flow, run_script, tmp_path):
    _, labels, _ = sample(run_script, tmp_path / "a", "--num_images=3", "--classes=cross,1")
    assert labels.tolist() == [4, 1, 4]
    with pytest.raises(UserError, match="classes='ring,rig': 'rig' is none, this model has 8 classes; .*circle, ring"):
        run_script("sample", *TIMELESS, "--classes=ring,rig")


def test_a_folder_is_no_output(flow, run_script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for out in (".", tmp_path):
        with pytest.raises(UserError, match="is a folder; accepted: the path of a file in it, without suffix"):
            run_script("sample", *TIMELESS, "--num_images=1", "--steps=1", f"--out={out}")


def test_images_that_are_not_finite_are_counted(flow, run_script, monkeypatch, capsys):
    """Two of five latents with NaN or infinity, in parts of two."""
    draw = evaluation.sample_images

    def spoiled(model, process, seeds, *args, **kwargs):
        x0 = draw(model, process, seeds, *args, **kwargs)
        x0[[seed % 2**32 in (1, 4) for seed in seeds], 0, 3, 3] = float("nan" if len(seeds) > 1 else "inf")
        return x0

    monkeypatch.setattr(evaluation, "sample_images", spoiled)
    run_script("sample", *TIMELESS, "--num_images=5", "--batch_size=2", "--steps=1")
    assert "warning: 2 of the images drawn are not finite" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------------------------------
# Super-resolution


def test_super_resolution(base, run_script, tmp_path, capsys):
    """Trained for two steps; the validation set, a file and a folder of its small images give the same samples."""
    Image = pytest.importorskip("PIL.Image", reason="Pillow reads the PNG")
    make_data()
    args = [arg for arg in TINY if "num_iterations" not in arg]
    run_script("base_train", *args, "--num_iterations=2", "--low_res_size=8", "--model_tag=sr")
    advised = re.search(r"python -m scripts\.sample (.+)", capsys.readouterr().out)[1].split()
    few = (*advised, "--num_images=26", "--batch_size=13")  # of 24 validation images
    images, labels, protocol = sample(run_script, tmp_path / "val", *few)
    val = open_dataset("tiny", "val")
    assert (labels == np.resize(val.labels(range(24)), 26)).all() and protocol["low_res"] == "tiny, val"
    with Image.open(tmp_path / "val.png") as png:
        grid = np.asarray(png)
    small = F.interpolate(torch.from_numpy(val.images([0])).float(), size=8, mode="area").round()[0].permute(1, 2, 0)
    assert np.abs(grid[2:50:6, 2:50:6].astype(int) - small.numpy()).max() <= 1  # pairs: small, sample
    assert (grid[2:50:3, 52:100:3] == images[0]).all()

    large = val.images(range(24)).transpose(0, 2, 3, 1)
    np.savez(tmp_path / "base.npz", large, val.labels(range(24)))  # arr_0, arr_1: as improved-diffusion writes them
    for k, label in enumerate(val.labels(range(24))):
        folder = tmp_path / "folder" / val.class_names[label]
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(large[k]).save(folder / f"{k:02d}.png")
    for where in ("base.npz", "folder"):
        out = tmp_path / f"from_{where[:4]}"
        same, labels, protocol = sample(run_script, out, *few, f"--low_res={tmp_path / where}")
        assert "SHA-256" in protocol["low_res"]
        if where == "base.npz":
            assert_same(same, images)
        else:
            assert (np.bincount(labels[:24]) == np.bincount(val.labels(range(24)))).all()


def test_small_images_that_a_model_cannot_enlarge(flow, run_script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_run(run_script, "sr", "--low_res_size=4")
    for name, size, labels in (("five", 5, [0, 1]), ("plain", 4, []), ("ninth", 4, [0, 8])):
        np.savez(f"{name}.npz", np.zeros((2, size, size, 3), np.uint8), *([np.array(labels)] if labels else []))
    for where, message in (
        ("five.npz", r"\(3, 5, 5\); accepted: .* \(3, 4, 4\) or \(3, 16, 16\)"),
        ("plain.npz", "0 classes, the model 8"),
        ("ninth.npz", "9 classes, the model 8"),
        ("absent.npz", "is not there; accepted: an .npz file, a folder of images, val"),
    ):
        with pytest.raises(UserError, match=f"low_res='{where}'.*{message}"):
            run_script("sample", *TIMELESS, "--run=sr", f"--low_res={where}")
    with pytest.raises(UserError, match="low_res='val' would do nothing: .*flow.* is no super-resolution model"):
        run_script("sample", *TIMELESS, "--run=flow", "--low_res=val")


def test_the_published_cascade(base, run_script, tmp_path):
    """improved-diffusion's base_samples.npz, arr_0 and arr_1, through its upsampler."""
    unet_file(
        tmp_path / "up.pt", channel_mult=(1,), attention_resolutions=(16,), out_channels=6, num_classes=3, low_res=4
    )
    np.savez(tmp_path / "base_samples.npz", np.full((2, 4, 4, 3), 99, np.uint8), np.array([2, 0]))
    args = (f"--run={tmp_path / 'up.pt'}", f"--low_res={tmp_path / 'base_samples.npz'}", "--num_images=3")
    images, labels, _ = sample(run_script, tmp_path / "a", *args)
    assert images.shape == (3, 16, 16, 3) and labels.tolist() == [2, 0, 2]
    with pytest.raises(UserError, match="names no data set .*give --low_res"):
        run_script("sample", *TIMELESS, args[0])


@pytest.mark.slow
def test_real_processes_killed_three_times(flow, tmp_path):
    """1,200 images by one and by two processes, killed from outside."""
    args = (*TIMELESS, "--npz", "--num_images=1200", "--batch_size=16", "--sampler=euler", "--steps=2")

    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    start = lambda name, ranks: subprocess.Popen(
        command("sample", *args, f"--out={tmp_path / name}", ranks=ranks), env=env, stderr=subprocess.DEVNULL
    )
    assert start("alone", 1).wait() == 0
    for ranks, parts in ((1, 15), (2, 30), (1, 45)):
        process = start("a", ranks)
        while len(list(tmp_path.glob(".a.npz.parts/*.npy"))) < parts and process.poll() is None:
            time.sleep(0.002)
        kill_all(process)
        assert process.returncode == -signal.SIGKILL and not (tmp_path / "a.npz").exists()
    assert start("a", 2).wait() == 0
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "alone.npz").read_bytes()


# ---------------------------------------------------------------------------------------------------------------------
# Published files


@pytest.fixture
def dit():
    """A model like DiT-XL/2, but tiny: latents of 4 channels, learned variance."""
    config = DiTConfig(8, 4, 8, patch_size=2, width=64, depth=2, heads=4, num_classes=5, block="classic")
    model = DiT(config)
    model.init_weights(torch.Generator().manual_seed(0))
    model.load_state_dict(randomise(model.state_dict()))
    return model


@pytest.mark.parametrize("training_checkpoint", [False, True])
def test_meta_files(base, run_script, tmp_path, dit, training_checkpoint):
    published = to_meta(dit.state_dict(), dit.config)
    if training_checkpoint:
        other, args = randomise(published, seed=9), argparse.Namespace(model="DiT-XL/2", global_seed=0)
        opt = {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 1e-4, "params": [0]}]}
        published = {"model": other, "ema": published, "opt": opt, "args": args}
    torch.save(published, tmp_path / "dit.pt")
    loaded = load_run(str(tmp_path / "dit.pt"), "cpu", published=dict(num_heads=4))
    assert loaded.model.config == dit.config and loaded.data["kind"] == "latents"
    assert not loaded.process.clip_denoised  # latents are not confined to [-1, 1]
    x, t, y = torch.randn(2, 4, 8, 8), torch.tensor([3.0, 800.0]), torch.tensor([1, 5])
    torch.testing.assert_close(loaded.model(x, t, y), dit.eval()(x, t, y))
    args = (f"--run={tmp_path / 'dit.pt'}", "--num_heads=4", "--num_images=6", "--cfg_channels=3")
    images, labels, protocol = sample(run_script, tmp_path / "a", *args)
    assert images.shape == (6, 8, 8, 3) and labels.tolist() == [0, 1, 2, 3, 4, 0] and protocol["cfg_scale"] == 2
    few, _, _ = sample(run_script, tmp_path / "b", *args, "--batch_size=4")
    assert_same(images, few)


def unet_file(path, **settings):
    """What openai/improved-diffusion saves of such a UNet (attention's matrices are its Conv1d's), random weights."""
    config = UNetConfig(**dict(image_size=16, model_channels=32, num_res_blocks=1, null_class=False) | settings)
    model = UNet(config)
    model.load_state_dict(randomise(model.state_dict()))
    conv1d = ("qkv.weight", "proj_out.weight")
    torch.save({k: v[..., None] if k.endswith(conv1d) else v for k, v in model.state_dict().items()}, path)
    return model.eval()


def test_improved_diffusion_files(base, run_script, tmp_path):
    path = tmp_path / "ema_0.9999_500000.pt"
    model = unet_file(path, image_size=32, channel_mult=(1, 2), out_channels=6, attention_resolutions=(16,))
    loaded = load_run(str(path), "cpu")
    assert loaded.model.config == model.config  # attention starts at 16 pixels, so it is known that there are 32
    x, t = torch.randn(2, 3, 32, 32), torch.tensor([3.0, 800.0])
    torch.testing.assert_close(loaded.model(x, t), model(x, t))
    process = loaded.process
    assert (process.num_timesteps, process.variance, process.model_t[-1]) == (4000, "learned_range", 999.75)
    images, labels, _ = sample(run_script, tmp_path / "a", f"--run={path}", "--num_images=2", "--steps=2")
    assert images.shape == (2, 32, 32, 3) and labels.tolist() == [0, 0]


def test_improved_diffusion_files_that_need_to_be_told(base, run_script, tmp_path):
    path = tmp_path / "ema.pt"
    unet_file(path, channel_mult=(1, 2), attention_resolutions=(8,), num_classes=3, num_heads=2)
    args = (f"--run={path}", "--num_images=4", "--steps=2")
    shown, labels, protocol = sample(run_script, tmp_path / "a", *args, "--image_size=16", "--num_heads=2")
    assert shown.shape == (4, 16, 16, 3) and labels.tolist() == [0, 1, 2, 0]
    assert protocol["cfg_scale"] == 1  # the published class table has no null class
    told = ("--noise_schedule=linear", "--num_timesteps=100", "--rescale_timesteps=no")
    told += (f"--out={tmp_path / 'b'}", "--image_size=16")
    process = run_script("sample", *TIMELESS, *args, *told)["loaded"].process
    assert (process.num_timesteps, process.variance, process.model_t[-1]) == (100, "fixed_large", 99)
    assert process.betas[-1] == pytest.approx(0.2)  # linear: 20 / T
    unet_file(path, channel_mult=(1, 2), attention_resolutions=())
    with pytest.raises(UserError, match=r"ema\.pt.*image_size=0"):
        sample(run_script, tmp_path / "a", *args)


@pytest.mark.parametrize(
    "settings, schedule",
    [  # the flags in improved-diffusion's README, as: T, last beta, what the model sees of the last t, heads
        (dict(out_channels=6), (4000, 0.999, 999.75, 4)),  # ImageNet-64 and CIFAR-10
        (dict(out_channels=6, num_classes=3), (4000, 0.999, 3999, 4)),  # class-conditional ImageNet-64
        (dict(out_channels=6, num_classes=3, low_res=16), (4000, 0.005, 3999, 4)),  # the upsampler
        (dict(out_channels=6, use_scale_shift_norm=False, num_heads=1), (1000, 0.02, 999, 1)),  # LSUN
    ],
)
def test_published_processes(base, tmp_path, settings, schedule):
    unet_file(tmp_path / "a.pt", channel_mult=(1,), attention_resolutions=(16,), **settings)
    loaded = load_run(str(tmp_path / "a.pt"), "cpu")
    p = loaded.process
    assert (p.num_timesteps, pytest.approx(p.betas[-1]), p.model_t[-1], loaded.model.config.num_heads) == schedule
