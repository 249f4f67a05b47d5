"""An image is a function of (seed, index) and its class, whatever else happens; and published files are understood."""

import argparse
import json
from fractions import Fraction

import numpy as np
import pytest
import torch
from conftest import run_process
from tiny_runs import TIMELESS, make_data, make_run, randomise

from nanodiff.checkpoint import load_tensors
from nanodiff.common import UserError
from nanodiff.dit import DiT, DiTConfig, to_meta
from nanodiff.recipe import load_run
from nanodiff.unet import UNet, UNetConfig


def sample(run_script, out, *args):
    """(images (N, H, W, C) uint8, labels (N,), protocol) as scripts/sample.py writes them."""
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


@pytest.mark.parametrize(
    "more", [("--sampler=heun",), ("--sampler=sde",), ("--sampler=euler", "--cfg_interval=0.2,0.7"), ("--ema=raw",)]
)
def test_batch_size_does_not_change_an_image(flow, run_script, tmp_path, more):
    one, _labels, _ = sample(run_script, tmp_path / "a", "--num_images=11", "--batch_size=11", *more)
    two, _, _ = sample(run_script, tmp_path / "b", "--num_images=11", "--batch_size=4", *more)
    few, _, _ = sample(run_script, tmp_path / "c", "--num_images=5", "--batch_size=1", *more)
    assert_same(one, two)
    assert_same(one[:5], few)  # nor how many are drawn
    assert len(np.unique(one.reshape(11, -1), axis=0)) == 11


@pytest.mark.parametrize("sampler", ["ddpm", "ddim", "dpm++"])
def test_batch_size_does_not_change_an_image_of_a_gaussian_diffusion(base, run_script, tmp_path, sampler):
    make_data()
    make_run(run_script, "eps", "--objective=eps", "--num_timesteps=50", "--variance=learned_range")
    one, _, _ = sample(run_script, tmp_path / "a", "--num_images=5", f"--sampler={sampler}")
    two, _, _ = sample(run_script, tmp_path / "b", "--num_images=5", "--batch_size=2", f"--sampler={sampler}")
    assert_same(one, two)


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


@pytest.mark.slow
def test_two_ranks_draw_the_images_of_one(flow, run_script, tmp_path):
    args = (*TIMELESS, "--npz", "--num_images=7", "--batch_size=2", "--sampler=sde", "--steps=3")
    one, labels, _ = sample(run_script, tmp_path / "one", *args)
    run_process("sample", *args, f"--out={tmp_path / 'two'}", ranks=2)
    with np.load(tmp_path / "two.npz") as file:
        assert_same(one, file["arr_0"])
        assert (labels == file["labels"]).all()


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
    given = dict(sampler="heun", steps=3, cfg_scale=1.5, num_images=20, seed=3, dtype="float32")
    assert given.items() <= protocol.items()
    # by default beside the run, and without .npz
    run_script("sample", *TIMELESS, "--steps=1", "--num_images=1")
    assert [p.name for p in (flow / "samples").iterdir()] == ["sample_000001_seed0.png"]


def test_models_without_classes_or_null_class_are_not_guided(base, run_script, tmp_path):
    make_data()
    make_run(run_script, "plain", "--class_cond=False")
    _, labels, protocol = sample(run_script, tmp_path / "a", "--run=plain", "--num_images=3", "--cfg_scale=4")
    assert labels.tolist() == [0, 0, 0] and protocol["cfg_scale"] == 1
    make_run(run_script, "always", "--label_drop=0")
    _, labels, protocol = sample(run_script, tmp_path / "b", "--run=always", "--num_images=3", "--cfg_scale=4")
    assert labels.tolist() == [0, 1, 2] and protocol["cfg_scale"] == 1


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
    loaded = load_run(str(tmp_path / "dit.pt"), "cpu", num_heads=4)
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
        (dict(out_channels=6, num_classes=3, low_res=True), (4000, 0.005, 3999, 4)),  # the upsampler
        (dict(out_channels=6, use_scale_shift_norm=False, num_heads=1), (1000, 0.02, 999, 1)),  # LSUN
    ],
)
def test_published_processes(base, tmp_path, settings, schedule):
    unet_file(tmp_path / "a.pt", channel_mult=(1,), attention_resolutions=(16,), **settings)
    loaded = load_run(str(tmp_path / "a.pt"), "cpu")
    p = loaded.process
    assert (p.num_timesteps, pytest.approx(p.betas[-1]), p.model_t[-1], loaded.model.config.num_heads) == schedule


def test_namespaces_are_the_only_objects_let_in(tmp_path):
    path = tmp_path / "a.pt"
    torch.save({"args": argparse.Namespace(lr=1e-4, image_size=256)}, path)
    assert load_tensors(path)["args"].image_size == 256
    torch.save({"args": Fraction(1, 2)}, path)
    with pytest.raises(UserError, match="loaded safely"):
        load_tensors(path)
