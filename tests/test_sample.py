"""An image depends on (seed, index) and its class alone, whatever else happens; published files are understood."""

import functools
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, refused, script_settings
from PIL import Image
from processes import FORK, Started
from test_export import meta_file, unet_file
from tiny_runs import TIMELESS, decode_png, make_autoencoder, make_run

import nanodiff
from configurator import Config, read_settings
from nanodiff.common import UserError
from nanodiff.data.dataloader import shuffled
from nanodiff.data.dataset import open_dataset
from nanodiff.data.pixels import to_model_range, to_uint8
from nanodiff.files import name_of_settings
from nanodiff.formats.load import load_run
from nanodiff.models.autoencoder import open_autoencoder
from nanodiff.png import encode_png
from nanodiff.sampling import draw as drawing
from nanodiff.sampling import settings as defaults
from nanodiff.sampling.loaded import settings_for
from nanodiff.sampling.store import SampleStore


@pytest.fixture(scope="module", autouse=True)
def runs(made, tmp_path_factory):
    """The folder of a run of each kind, in a $NANODIFF_BASE_DIR for all tests of a file."""
    base = shutil.copytree(made, tmp_path_factory.mktemp("runs of each kind"), dirs_exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANODIFF_BASE_DIR", str(base))
        yield base / "runs"


@pytest.fixture
def draw(draw):
    return functools.partial(draw, "--model=flow")


def assert_same(a, b):
    """Equal up to the rounding of a sum that was taken in another order."""
    assert a.shape == b.shape
    assert np.abs(a.astype(int) - b).max() <= 1


@pytest.mark.parametrize(
    "run, samplers",
    [
        ("flow", ("heun", "sde", "euler")),
        ("eps", ("ddpm", "ddim", "dpm++")),
    ],
)
def test_batch_size_does_not_change_an_image(draw, run, samplers):
    for sampler in samplers:
        more = (f"--model={run}", f"--sampler={sampler}", "--cfg_interval=0.2,0.7")
        one, _, _ = draw("--num_images=7", *more)
        few, _, _ = draw("--num_images=5", "--batch_size=2", *more)
        assert_same(one[:5], few)  # nor how many are drawn
        assert len(np.unique(one.reshape(7, -1), axis=0)) == 7


def test_an_image_alone_is_the_one_among_others(draw):
    """Also its class, in Python, and of a model whose samples have several shapes: eight images share one."""
    many, labels, _ = draw("--num_images=6", "--dtype=auto")
    two, two_labels, protocol = draw("--num_images=2", "--first=3", "--dtype=auto")
    assert_same(two, many[3:5])
    assert two_labels.tolist() == labels[3:5].tolist()
    assert protocol["first"] == 3
    one = nanodiff.load("flow", device_type="cpu").sample(first=5, num_images=1, steps=3)
    assert_same(one, many[5:])
    mixed = drawing.ModelSamples.batches(SimpleNamespace(is_mixed=True), np.arange(5, 45), 64)
    assert np.concatenate(mixed).tolist() == [*range(5, 45)]
    for ids in mixed:
        assert len({*(ids // 8)}) == 1


def test_respacing_10_is_10_even_steps_and_eta_adds_noise(draw):
    some = ("--model=small", "--num_images=2", "--cfg_interval=0,1")
    ten, _, _ = draw(*some, "--steps=10")
    respaced, _, protocol = draw(*some, "--steps=0", "--respacing=10")
    noisy, _, _ = draw(*some, "--steps=10", "--eta=1")
    assert (ten == respaced).all()
    assert protocol["network_evaluations"] == 2 * 10
    assert (noisy != ten).any()


def test_seed_class_and_weights_change_an_image(draw):
    first, labels, _ = draw("--num_images=4", "--classes=3")
    assert labels.tolist() == [3] * 4
    for change in ("--seed=4294967296", "--classes=4", "--ema=raw", "--checkpoint_step=0", "--cfg_scale=4"):
        other, _, _ = draw("--num_images=4", "--classes=3", change)
        difference = np.abs(other.astype(int) - first)
        assert (difference.max(axis=(1, 2, 3)) > 3).all(), change
    # an image keeps its noise and class when the classes around it change
    mixed, labels, _ = draw("--num_images=4", "--classes=triangle,5")
    assert labels.tolist() == [3, 5, 3, 5]
    assert_same(mixed[::2], first[::2])


def test_what_is_written(runs, run_script, tmp_path):
    out = tmp_path / "new" / "cfg_1.5"  # its dot is no suffix
    args = (
        "--model=flow",
        f"--out={out}",
        "--num_images=20",
        "--cfg_scale=1.5",
        "--cfg_interval=0,1",
        "--steps=2",
        "--npz",
    )
    run_script("sample", *TIMELESS, *args)
    with np.load(f"{out}.npz") as file:
        images = file["arr_0"]
        labels = file["labels"]
        protocol = json.loads(str(file["protocol"]))
    assert images.shape == (20, 16, 16, 3)
    assert images.dtype == np.uint8
    run_script("sample", *TIMELESS, *args[:-1], f"--out={tmp_path}/same.npz")  # without --npz
    with np.load(tmp_path / "same.npz") as file:
        assert (file["arr_0"] == images).all()
    (tmp_path / "mine.png").write_bytes(encode_png(images[0]))
    refused("mine.png is no picture of samples", run_script, "sample", *TIMELESS, *args, f"--out={tmp_path}/mine.png")
    counts = np.bincount(labels, minlength=8)
    assert counts.tolist() == [3, 3, 3, 3, 2, 2, 2, 2]  # as even as can be
    with Image.open(f"{out}.png") as png:
        assert png.mode == "RGB"
        assert png.size == (8 * 50 + 2, 3 * 50 + 2)  # three times as large, padding 2
        assert json.loads(png.text["protocol"]) == protocol
        assert (np.asarray(png)[2:50:3, 52:100:3] == images[1]).all()
    weights = runs / "flow" / "checkpoints" / "step_000001" / "ema_0.999.safetensors"
    given = dict(
        step=1,
        weights="0.999",
        sha256=hashlib.sha256(weights.read_bytes()).hexdigest(),
        cfg_scale=1.5,
        sampler="ralston",
        num_images=20,
        seed=0,
        network_evaluations=2 * 4,
    )
    assert given.items() <= protocol.items()


def test_default_names_tell_what_differs(runs, run_script, capsys):
    """So that a small sample does not replace a large one. Folders do not show, but two files of one name differ."""
    same = ("sample", *TIMELESS, f"--model={runs / 'flow'}", "--npz", "--steps=1")
    for args in (
        ["--num_images=4"],
        ["--num_images=2", "--classes=ring"],
    ):
        run_script(*same, *args)
    with pytest.raises(SystemExit, match="^$"):  # and nothing is drawn again
        run_script(*same, *args)
    assert "2 images of this protocol are there already" in capsys.readouterr().out
    names = {path.name.removeprefix("sample_000001_seed0_") for path in (runs / "flow" / "samples").glob("*.npz")}
    rest = "steps=1_dtype=float32.npz"
    assert names == {f"num_images=4_{rest}", f"num_images=2_classes=ring_{rest}"}
    config = Config({"given": "/a/b/c.pt"})
    config.defaults = {"given": ""}
    name = name_of_settings("sample", config)
    assert re.fullmatch("sample_given=c.pt_[0-9a-f]{8}", name)
    config["given"] = "/a/d/c.pt"
    assert name != name_of_settings("sample", config)


def test_many_images_are_as_wide_as_a_screen(run_script, capsys, tmp_path):
    """Eight rows at most; a class keeps to columns of its own."""
    run_script("sample", *TIMELESS, "--model=flow", "--num_images=70", "--steps=1", f"--out={tmp_path / 'a'}")
    assert "a grid of 70: " in capsys.readouterr().out
    grid = decode_png((tmp_path / "a.png").read_bytes())
    assert grid.shape == (5 * 50 + 2, 2 * 8 * 50 + 2, 3)


def test_samples_of_a_file_go_to_the_base_folder(runs, run_script, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    run_script("export", "--model=flow", f"--out={tmp_path}/ours.safetensors")
    run_script("sample", *TIMELESS, "--model=ours.safetensors", "--num_images=2", "--steps=1")
    (path,) = (runs.parent / "samples").glob("ours_sample_000001_seed0*.png")
    assert f": {path}\n" in capsys.readouterr().out
    assert [file.name for file in tmp_path.iterdir()] == ["ours.safetensors"]


def test_what_cannot_be_guided_says_so_and_is_named_by_what_was_done(runs, draw, run_script, capsys):
    guided = ("--num_images=3", "--cfg_scale=4", "--cfg_interval=0.3,0.7")
    for run, classes in (
        ("plain", [0, 0, 0]),  # without classes
        ("always", [0, 1, 2]),  # without a null class
    ):
        _, labels, protocol = draw(f"--model={run}", *guided)
        out = capsys.readouterr().out
        assert out.count("and ignore cfg_scale=4.0 and cfg_interval=0.3,0.7: the model has no null condition") == 1
        assert labels.tolist() == classes
        assert protocol["cfg_scale"] == 1
        assert protocol["cfg_interval"] == "0,1"
        assert protocol["network_evaluations"] == 7
        run_script("sample", *TIMELESS, f"--model={run}", "--steps=2", *guided)
        capsys.readouterr()
        (name,) = [path.name for path in (runs / run / "samples").glob("*num_images=3*")]
        assert "cfg" not in name  # it differs in nothing from the run's own samples


@pytest.mark.parametrize("run", ["flow", "sr"])
def test_python_draws_what_the_script_draws(draw, run):
    """Byte for byte, with more images than a batch holds."""
    some = dict(num_images=70, seed=3, steps=2, cfg_scale=3.0)
    classes = ["ring", 3] if run == "flow" else []
    images = nanodiff.load(run, device_type="cpu").sample(
        classes,
        cfg_interval=(0.2, 0.7),
        size=16,
        **some,
    )
    args = [f"--{key}={value}" for key, value in some.items()]
    args += ["--cfg_interval=0.2,0.7", "--dtype=auto"]
    if classes:
        args += ["--classes=ring,3"]
    expected, _, _ = draw(f"--model={run}", *args)
    assert images.dtype == np.uint8
    assert images.shape == (70, 16, 16, 3)
    assert images.tobytes() == expected.tobytes()


def test_python_takes_arrays_for_files(draw, tmp_path):
    """Of images with and without classes, and of a mask."""
    images = open_dataset("tiny", "val").images(range(4)).transpose(0, 2, 3, 1)
    mask = np.arange(16) < np.full((16, 1), 8)
    np.save(tmp_path / "mask.npy", mask)
    of_flow = dict(from_images=images, mask=mask, strength=0.5, classes=3)
    for run, given in (
        ("sr", dict(low_res=(images[:, ::2, ::2], np.arange(4)))),
        ("flow", of_flow),
    ):
        np.savez(tmp_path / "a.npz", *given["low_res"] if run == "sr" else [images])
        files = {
            "low_res": tmp_path / "a.npz",
            "from_images": tmp_path / "a.npz",
            "mask": tmp_path / "mask.npy",
        }
        args = [f"--{name}={files.get(name, value)}" for name, value in given.items()]
        expected, _, _ = draw(f"--model={run}", "--num_images=5", "--dtype=auto", *args)
        loaded = nanodiff.load(run, device_type="cpu")
        sample = functools.partial(loaded.sample, num_images=5, steps=3)
        assert (sample(**given) == expected).all()
    given["from_images"] = images[:1]
    one = sample(**given)
    for more in (
        {"mask": 1.0 * mask},
        {"mask": mask.astype(np.uint8)},
    ):
        assert (sample(**given | more) == one).all()


def test_a_wrong_argument_gets_the_scripts_line(run_script, capsys):
    sample = nanodiff.load("flow", device_type="cpu").sample
    mistakes = dict(
        num_images=0,
        steps=1.5,
        strength="half",
        num_imgaes=1,
        cfg_scale=1e38,
        cfg_interval="0.7,0.3",
        size=5,
        classes="none",
        from_images="absent",
        mask="absent",
        low_res="val",
    )
    for name, value in mistakes.items():
        with pytest.raises(UserError) as python:
            sample(**{name: value})
        with pytest.raises((UserError, SystemExit)) as script:
            run_script("sample", *TIMELESS, "--model=flow", f"--{name}={value}")
        line = capsys.readouterr().err.removeprefix("error: ").strip() or str(script.value)
        assert str(python.value) == line
    for name, value in (
        ("low_res", np.zeros((1, 8, 8, 3))),
        ("from_images", [[1], [2, 3]]),
        ("cfg_interval", None),
    ):
        refused(f"{name}.*(would do nothing|no array|accepted)", sample, **{name: value})
    image = np.zeros((16, 16, 3), np.uint8)
    refused(r"from_images.npy holds uint8 of shape \(16, 16, 3\); accepted: .*\(N, H, W\)", sample, from_images=image)
    refused(r"mask.*is of shape \(0,\); accepted: \(16, 16\)", sample, from_images=image[None], mask=[])


def test_python_has_the_scripts_settings_declared_once():
    source = (ROOT / "scripts" / "sample.py").read_text()
    for name, setting in read_settings(vars(defaults)).items():
        assert f"\n{name} = " not in source
        assert script_settings("sample").defaults[name] == setting.default


def test_importing_nanodiff_imports_no_torch():
    code = "import nanodiff, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_latents_are_encoded_and_decoded_by_their_autoencoder(draw, run_script, tmp_path):
    vae = make_autoencoder(tmp_path / "vae")
    make_run(run_script, "latent", f"--autoencoder={vae}", "--patch_size=2")
    some = ("--model=latent", "--num_images=5")
    one, _, protocol = draw(*some)
    assert one.shape == (5, 16, 16, 3)
    autoencoder = open_autoencoder(str(vae))
    assert protocol["autoencoder"] == autoencoder.name
    assert protocol["autoencoder_sha256"] == autoencoder.sha256
    images = open_dataset("tiny", "val").images(range(5))
    np.savez(tmp_path / "given.npz", images.transpose(0, 2, 3, 1))
    given, _, _ = draw(*some, f"--from_images={tmp_path / 'given.npz'}", "--strength=0")
    mean, _ = autoencoder.encode(to_model_range(torch.from_numpy(images)))
    decoded = to_uint8(autoencoder.decode(mean))
    assert_same(given, decoded.permute(0, 2, 3, 1).numpy())
    vae.rename(tmp_path / "moved")
    refused("no such file: .*vae; samples need --autoencoder=PATH", draw, *some)
    again, _, _ = draw(*some, f"--autoencoder={tmp_path / 'moved'}")
    assert_same(again, one)


LONG = ("--model=flow", "--npz", "--num_images=42", "--batch_size=4", "--sampler=sde", "--steps=3")  # 11 parts


def forked(*args, ranks=1, before=None):
    """scripts/sample.py in forks of this process."""
    more = dict(ranks=ranks if ranks > 1 else 0, before=before)
    return Started("sample", *TIMELESS, *args, context=FORK, **more)


def after_one_part(number, of=0):
    """For forked: rank `of` gets signal `number` when it is about to write its second part."""

    def before():
        write = SampleStore.write
        signals = iter([0, number])

        def write_or_die(*args):
            os.kill(os.getpid(), next(signals, 0))
            write(*args)

        if int(os.environ.get("RANK", 0)) == of:
            SampleStore.write = write_or_die

    return before


@pytest.fixture(scope="module")
def alone(runs, tmp_path_factory):
    """The bytes of LONG's files, drawn by one process in one go."""
    out = tmp_path_factory.mktemp("alone") / "a"
    assert forked(*LONG, f"--out={out}").wait().returncode == 0
    return Path(f"{out}.npz").read_bytes(), Path(f"{out}.png").read_bytes()


def test_kills_and_ranks_do_not_change_the_file(alone, tmp_path):
    args = (*LONG, f"--out={tmp_path / 'a'}")
    for n in (2, 1):
        killed = forked(*args, ranks=n, before=after_one_part(signal.SIGKILL)).wait()
        assert killed.returncode == -signal.SIGKILL
        assert not (tmp_path / "a.npz").exists()
    done = forked(*args, ranks=2).wait()
    assert done.returncode == 0
    assert "of 42 images are there already" in done.stdout
    assert (tmp_path / "a.npz").read_bytes() == alone[0]
    assert (tmp_path / "a.png").read_bytes() == alone[1]
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    "number, code",
    [
        (signal.SIGINT, 130),
        (signal.SIGTERM, -15),
        (signal.SIGUSR1, -10),
    ],
)
def test_a_signal_ends_the_run_at_once_and_the_same_command_resumes(alone, tmp_path, number, code):
    """Shells report a negative code, a process that dies of a signal, as 128 + its number."""
    args = (*LONG, f"--out={tmp_path / 'a'}")
    ended = forked(*args, before=after_one_part(number)).wait()
    assert ended.returncode == code
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "a.npz").exists()
    assert len(list(tmp_path.glob(".*.parts/*.npz"))) == 1
    done = forked(*args).wait()
    assert done.returncode == 0
    assert "4 of 42 images are there already" in done.stdout
    assert (tmp_path / "a.npz").read_bytes() == alone[0]


def test_images_that_are_not_finite_are_counted(draw, monkeypatch, capsys):
    sample = drawing.ModelSamples.sample

    def spoiled(samples, noise, cond, **more):
        x0 = sample(samples, noise, cond, **more)
        if x0.shape[1:] == (3, 16, 16):
            is_spoiled = [int(label) in (1, 4) for label in cond["y"]]
            x0[is_spoiled, 0, 3, 3] = float("nan" if len(x0) > 1 else "inf")
        return x0

    monkeypatch.setattr(drawing.ModelSamples, "sample", spoiled)
    draw("--num_images=5", "--batch_size=2")
    assert "warning: 2 of the images drawn are not finite" in capsys.readouterr().out


def test_super_resolution(draw, tmp_path):
    """Of the validation set; of files and folders: tests/test_pairs.py."""
    images, labels, protocol = draw("--model=sr", "--num_images=26", "--batch_size=13")  # of 24 validation images
    val = open_dataset("tiny", "val")
    order = shuffled(np.arange(26) % 24, 24, (0,))
    assert (labels == val.labels(order)).all()
    assert protocol["low_res"] == val.identity
    with Image.open(tmp_path / "drawn.png") as png:
        grid = np.asarray(png)
    first = torch.from_numpy(val.images(order[:1])).float()
    small = F.interpolate(first, size=8, mode="area").round()
    small = small[0].permute(1, 2, 0).numpy()
    tile = grid[2:50:6, 2:50:6].astype(int)  # pairs: small, sample
    assert np.abs(tile - small).max() <= 1
    assert (grid[2:50:3, 52:100:3] == images[0]).all()


def test_the_published_cascade(draw, tmp_path):
    """improved-diffusion's base_samples.npz, arr_0 and arr_1, through its upsampler."""
    settings = dict(
        channel_mult=(1,),
        attention_resolutions=(16,),
        out_channels=6,
        num_classes=3,
        low_res=4,
    )
    unet_file(tmp_path / "up.pt", **settings)
    small = np.full((2, 4, 4, 3), 99, np.uint8)
    np.savez(tmp_path / "base_samples.npz", small, np.array([2, 0]))
    args = (f"--model={tmp_path / 'up.pt'}", "--num_images=3")
    images, labels, _ = draw(*args, f"--low_res={tmp_path / 'base_samples.npz'}")
    assert images.shape == (3, 16, 16, 3)
    assert labels.tolist() == [2, 0, 2]
    refused("names no data set .*give --low_res", draw, *args)


def test_meta_files(draw, tmp_path):
    meta_file(tmp_path / "dit.pt", width=64, heads=4)
    own = settings_for(load_run(f"{tmp_path / 'dit.pt'},heads=4", "cpu")).named
    assert own == {"sampler": "ddim", "steps": 50, "cfg_scale": 1.5, "cfg_interval": "0,1"}  # a file has no settings
    some = (f"--model={tmp_path / 'dit.pt'},heads=4", "--num_images=6", "--cfg_channels=3")
    refused("it is not known which autoencoder made these latents; samples need --autoencoder=PATH", draw, *some)
    refused("cfg_channels=9; accepted: up to the model's 8", draw, *some, "--cfg_channels=9")
    vae = make_autoencoder(tmp_path / "vae", latent_channels=4)
    images, labels, protocol = draw(*some, f"--autoencoder={vae}")
    assert images.shape == (6, 32, 32, 3)
    assert labels.tolist() == [0, 1, 2, 3, 4, 0]
    assert protocol["cfg_scale"] == 1.5


def test_improved_diffusion_files_that_need_to_be_told(draw, run_script, tmp_path):
    path = tmp_path / "ema.pt"
    unet_file(
        path,
        channel_mult=(1, 2),
        attention_resolutions=(8,),
        num_classes=3,
        num_heads=2,
    )
    args = ("--num_images=4", "--steps=2")
    shown, labels, protocol = draw(*args, f"--model={path},image_size=16,heads=2")
    assert shown.shape == (4, 16, 16, 3)
    assert labels.tolist() == [0, 1, 2, 0]
    assert protocol["cfg_scale"] == 1  # the published class table has no null class
    told = "heads=2,image_size=16,noise_schedule=linear,num_timesteps=100,rescale_timesteps=False"
    process = load_run(f"{path},{told}", "cpu").process
    assert process.num_timesteps == 100
    assert process.variance == "fixed_large"
    assert process.model_t[-1] == 99
    assert process.betas[-1] == pytest.approx(0.2)  # linear: 20 / T
    unet_file(path, channel_mult=(1, 2), attention_resolutions=())
    refused(r"ema\.pt.*image_size=0", draw, *args, f"--model={path}")
    for option, fault in (
        ("heads=0", "heads=0 .*an integer, >= 1"),
        ("step=3", "step=3 is no option of .*, a file"),
    ):
        refused(fault, load_run, f"{path},{option}", "cpu")


@pytest.mark.parametrize(
    "settings, T, last_beta, last_t, heads",
    [  # the flags in improved-diffusion's README; last_t is what the model sees of T - 1
        (dict(), 4000, 0.999, 999.75, 4),  # ImageNet-64 and CIFAR-10
        (dict(num_classes=3), 4000, 0.999, 3999, 4),  # class-conditional ImageNet-64
        (dict(num_classes=3, low_res=16), 4000, 0.005, 3999, 4),  # the upsampler
        (dict(use_scale_shift_norm=False, num_heads=1), 1000, 0.02, 999, 1),  # LSUN
    ],
)
def test_published_processes(tmp_path, settings, T, last_beta, last_t, heads):
    sizes = dict(channel_mult=(1,), attention_resolutions=(16,), out_channels=6)
    unet_file(tmp_path / "a.pt", **sizes, **settings)
    loaded = load_run(str(tmp_path / "a.pt"), "cpu")
    assert loaded.process.num_timesteps == T
    assert loaded.process.betas[-1] == pytest.approx(last_beta)
    assert loaded.process.model_t[-1] == last_t
    assert loaded.model.config.num_heads == heads
