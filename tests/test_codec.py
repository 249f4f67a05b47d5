"""Latents made on the fly, cached latents and pixels are the same thing to a model; only the right ones are let in."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import refused
from image_helpers import prepare
from numpy.testing import assert_allclose, assert_array_equal
from tiny_runs import TINY, assert_resumes, decode_png, make_autoencoder, make_data, metrics
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanodiff.common import StackedGenerator
from nanodiff.conditions import DataInfo
from nanodiff.data.codec import load_codec, make_codec
from nanodiff.data.dataset import open_dataset
from nanodiff.data.pixels import to_model_range, to_uint8
from nanodiff.data.shapes import CLASS_NAMES
from nanodiff.diffusion.flow import FlowMatching
from nanodiff.diffusion.gaussian import GaussianDiffusion
from nanodiff.diffusion.timesteps import FOR_FLOW, FOR_GAUSSIAN, make_timesteps
from nanodiff.models.autoencoder import open_autoencoder
from nanodiff.models.dit import DiTConfig
from nanodiff.sampling.draw import ModelSamples, SampleSettings, StartImages
from nanodiff.training.log import Meter

CPU = torch.device("cpu")
META = torch.device("meta")


class NoFloat64(TorchDispatchMode):
    """Lets "meta" stand for MPS: float64 is refused there, and what is read from there is zeros."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        options = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 0
        if func is torch.ops.aten._to_copy.default and args[0].is_meta and options.get("device") == CPU:
            return torch.zeros(args[0].shape, dtype=options.get("dtype") or args[0].dtype)
        result = func(*args, **options)
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor) and x.is_meta and x.dtype == torch.float64:
                raise TypeError(f"{func}: MPS has no float64")
        return result


@pytest.fixture
def vae(base, run_script):
    make_data()
    folder = make_autoencoder(base / "vae")
    for name, more in (
        ("plain", []),
        ("flips", ["--flip"]),
    ):
        run_script("cache_latents", "--data=tiny", f"--autoencoder={folder}", f"--name={name}", *more)
    return folder


def stored(name, ids=range(24), split="train"):
    return torch.from_numpy(open_dataset(name, split).images(np.array(ids)))


def by_scale(name):
    """The set as latent_norm=scale makes it."""
    dataset = open_dataset(name)
    del dataset.meta["latents"]["mean"], dataset.meta["latents"]["std"]
    return dataset


def test_cached_latents_are_those_made_on_the_fly(vae):
    """To fp16's precision, also of mirrored images; by the published scale, as nothing else is known on the fly."""
    online = make_codec(open_dataset("tiny"), CPU, str(vae))
    cached = make_codec(by_scale("flips"), CPU, flip=True)
    assert online.shape == (3, 4, 4)
    assert cached.shape == (3, 4, 4)
    flip = torch.arange(24) % 3 == 0
    eps = StackedGenerator(range(24)).randn((24, 3, 4, 4))
    for args in (
        (),
        (None, lambda _: eps),
        (flip, lambda _: eps),
    ):
        a = online.to_x0(stored("tiny"), *args)
        b = cached.to_x0(stored("flips"), *args)
        assert_close(a, b, rtol=2e-3, atol=1e-3 * float(a.std()))


def test_a_model_that_is_tuned_keeps_its_normalisation(vae):
    """On other latents, cached or made on the fly; a published file says none, so it has the autoencoder's."""
    make_data("more", resolution=24, train=9, val=9)
    source_data = make_codec(open_dataset("plain"), CPU).data
    for name, shape, copies in (
        ("flips", (3, 4, 4), 2),
        ("more", (3, 6, 6), 1),
    ):
        codec = make_codec(open_dataset(name), CPU, source_data=source_data)
        assert codec.info["offset"] == source_data.latents["offset"]
        assert codec.info["scale"] == source_data.latents["scale"]
        assert codec.shape == shape
        assert codec.data.name == name
        assert codec.info["copies"] == copies
        assert codec.to_x0(stored(name, range(9))).shape == (9, *codec.shape)
    published = replace(source_data, latents=None)
    own = make_codec(by_scale("plain"), CPU)
    codec = make_codec(open_dataset("plain"), CPU, source_data=published)
    assert torch.equal(codec.to_x0(stored("plain")), own.to_x0(stored("plain")))


def test_classes_without_a_training_image_are_named(base, capsys):
    """Unless the model that is tuned has learned them."""
    make_data("few", class_names=[*CLASS_NAMES, "void", "nil"], train=100)
    source_data = make_codec(open_dataset("few"), CPU).data
    line = "2 of the classes have no training image: void, nil"
    assert line in capsys.readouterr().out
    make_codec(open_dataset("few"), CPU, source_data=source_data)
    assert line not in capsys.readouterr().out
    make_codec(open_dataset("few"), CPU, source_data=replace(source_data, class_names=[], num_classes=0))
    assert line in capsys.readouterr().out


def test_vectors_are_cached_with_the_latents_and_normalised_as_the_model_was_trained(vae, base, run_script):
    source = open_dataset("tiny")
    make_data("told", vectors_of=lambda labels: np.stack([labels, 3 - labels], 1))
    run_script("cache_latents", "--data=told", f"--autoencoder={vae}", "--name=told_latents")
    told = open_dataset("told")
    latents = open_dataset("told_latents")
    cached_vectors = latents.cond(range(24))["vectors"]
    assert_array_equal(cached_vectors, told.cond(range(24))["vectors"])
    stats = make_codec(latents, CPU).data.vectors
    halves = lambda labels: np.repeat([[0, 0], [9, 9]], len(labels) // 2, 0)
    make_data("other", vectors_of=halves)
    other = open_dataset("other")
    codec = load_codec(make_codec(told, CPU).data, CPU)
    codec.accept(other)
    _, given = codec.read(other, [23])
    mean = np.array(stats["mean"])
    std = np.array(stats["std"])
    assert_allclose(given["vectors"], [(9 - mean) / std], rtol=1e-5)
    for model, data, line in (
        (told, source, "0, the model wants 2"),
        (source, told, "2, the model wants 0"),
    ):
        codec = load_codec(make_codec(model, CPU).data, CPU)
        refused(line, codec.accept, data)


def test_samples_of_arrays_come_back_in_their_range(base, run_script, draw):
    """Strength 0 returns the array that was given: through a file, its range, x0, a sampler and a file."""
    rng = np.random.default_rng(0)
    bands = rng.uniform(-600, 400, (20, 8, 8, 5)).astype(np.float32)
    np.save(base / "bands.npy", bands)
    prepare(base / "bands.npy", name="bands")
    run_script("base_train", *TINY, "--data=bands", "--patch_size=2", "--num_iterations=1", "--sample_every=0")
    np.savez(base / "given.npz", arr_0=bands[:4])
    given = ("--num_images=4", f"--from_images={base / 'given.npz'}", "--strength=0")
    found, _, _ = draw(*given)
    assert found.dtype == np.float32
    assert_allclose(found, bands[:4], atol=1000 / 2**11)
    assert decode_png((base / "drawn.png").read_bytes()).shape[2] == 3  # the first three bands
    np.savez(base / "given.npz", arr_0=np.zeros((4, 8, 8, 5), np.uint8))
    refused("is for arrays and gray images beyond 8 bits", draw, *given)
    refused("arrays of 5 channels; metrics of features accept uint8", run_script, "base_eval", "--metric=fd_classifier")
    out_of_range = torch.tensor([-9.0, -1.001, 1.01, 9.0])
    assert to_uint8(out_of_range).tolist() == [0, 0, 255, 255]


@pytest.mark.parametrize(
    "process",
    [
        FlowMatching(),
        GaussianDiffusion(num_timesteps=20),
    ],
)
@pytest.mark.parametrize("kind", ["images", "arrays"])
def test_no_float64_before_the_cpu(kind, process):
    """From x0, t and noise to a logged loss; from noise, or an image with a mask, to a file, a grid and a page."""
    data = DataInfo(
        kind=kind,
        channels=3,
        resolution=8,
        class_names=[],
        range=[-9, 9],
        dtype="int16",
    )
    codec = load_codec(data, META)
    model = lambda x_t, t, **cond: x_t.bfloat16()
    model.config = DiTConfig(8, 3, out_channels=3, patch_size=4, width=16, depth=1, heads=4)
    start = codec.to_x0(torch.zeros(2, 3, 8, 8), None)
    known = StartImages(start, 0.7, torch.full((1, 1, 8, 8), 0.5))
    with NoFloat64():
        with pytest.raises(TypeError, match="no float64"):
            torch.zeros(2, device=META).double()
        for name in process.samplers:
            for given in (None, known):
                settings = SampleSettings(steps=3, sampler=name)
                samples = ModelSamples(model, process, codec, settings, start_images=given)
                preview = lambda i, steps, x0: codec.preview(x0)
                x0 = samples.draw(np.arange(2), on_step=preview)
                assert x0.is_meta
                assert x0.dtype == torch.float32
                output = codec.to_output(x0)
                assert output.shape == (2, 3, 8, 8)
                assert codec.picture(output).dtype == np.uint8
                assert codec.to_pixels(x0).dtype == torch.uint8
        meter = Meter(process, META, torch.float32, [], {"train_time_s": 0.0})
        meter.start_step(1)
        names = FOR_GAUSSIAN if process.is_gaussian else FOR_FLOW
        for name in names:
            t, weight = make_timesteps(name, process).sample(torch.rand(2, device=META))
            noise = torch.randn(2, 3, 8, 8, device=META)
            losses = process.losses(model, start.to(META), t, noise, {})
            meter.add(t, weight, losses, 0.0)
        meter.mean_losses()


def test_channels_are_normalised(vae):
    """Over the set a model sees each channel with mean 0 and deviation 1, whatever the draws."""
    codec = make_codec(open_dataset("plain"), CPU)
    latents = stored("plain")
    g = torch.Generator().manual_seed(0)
    eps = torch.randn(100, 24, 3, 4, 4, generator=g)
    drawn = []
    for noise in (*eps, *-eps):
        drawn.append(codec.to_x0(latents, None, lambda _, noise=noise: noise))
    x0 = torch.cat(drawn).transpose(0, 1).flatten(1)
    assert_close(x0.mean(1), torch.zeros(3), atol=1e-3, rtol=0)
    assert_close(x0.std(1), torch.ones(3), atol=0.02, rtol=0)


@pytest.mark.parametrize("opened", [open_dataset, by_scale])
def test_pixels_are_the_decoded_latents(vae, opened):
    codec = make_codec(opened("plain"), CPU)
    model = open_autoencoder(vae)
    mean, _ = model.encode(to_model_range(stored("tiny")))
    expected = to_uint8(model.decode(mean))
    got = codec.to_pixels(codec.to_x0(stored("plain")))
    assert got.dtype == torch.uint8
    assert got.shape == (24, 3, 16, 16)
    assert (got.int() - expected.int()).abs().max() <= 2  # the latents were in fp16


def test_training_and_evaluating_latents_needs_no_autoencoder(vae, base, run_script, capsys):
    run = ("base_train", *TINY, "--data=plain", "--patch_size=1", "--num_iterations=2", "--sample_every=0")
    first = run_script(*run, "--sample_steps=2", "--eval_every=0")
    evaluate = ("base_eval", "--metric=loss", "--num_images=24", "--dtype=float32")
    plain = run_script(*evaluate, "--data=plain")["result"]
    tiny = run_script(*evaluate, "--data=tiny")["result"]
    assert plain["loss"] == pytest.approx(tiny["loss"], rel=1e-3)  # images are encoded
    shutil.move(vae, base / "elsewhere")
    capsys.readouterr()
    without = (*run, "--sample_steps=2", "--eval_every=0", "--model_tag=without")
    refused("no such file: .*vae; samples need --autoencoder=PATH", run_script, *without)
    run_script(*run, f"--autoencoder={base / 'elsewhere'}", "--sample_every=-1", "--model_tag=moved")
    run_script("sample", "--model=moved", "--num_images=1")
    run_script(*without, "--sample_every=-1")
    assert metrics(base, "plain_dit_d1") == metrics(base, "without")
    # what was moved can be told, and is checked
    trained_on = first["codec"].data
    load_codec(trained_on, CPU, str(base / "elsewhere")).keep_loaded()
    other = make_autoencoder(base / "other", seed=1)
    refused("these latents were made by vae .*, not by other", load_codec(trained_on, CPU, str(other)).keep_loaded)


def test_online_training_resumes_and_flips(vae, base, run_script):
    online = (f"--autoencoder={vae}", "--patch_size=1", "--flip", "--num_iterations=6")
    assert_resumes(base, run_script, *TINY, *online)


def test_latents_of_another_autoencoder_are_refused(vae, base, run_script):
    other = make_autoencoder(base / "other", seed=1)
    run_script("cache_latents", "--data=tiny", f"--autoencoder={other}", "--name=others")
    run_script("base_train", *TINY, "--data=plain", "--patch_size=1", "--model_tag=a")
    shutil.rmtree(base / "data" / "plain")
    shutil.move(base / "data" / "others", base / "data" / "plain")  # the same name, made anew
    for script, args, line in (
        ("base_train", [*TINY, "--data=plain", "--patch_size=1", "--model_tag=a"], "other sha256, sha256 of the lat"),
        ("base_eval", ["--model=a", "--metric=loss"], "'plain' holds latents of other, the model wants vae's"),
        ("base_train", [*TINY, "--data=flips", "--flip", f"--autoencoder={other}"], "not by other"),
        ("base_train", [*TINY, "--data=plain", "--flip"], "has no mirrored copies"),
        ("base_eval", ["--model=a", "--metric=loss", "--data=tiny", f"--autoencoder={other}"], "not by other"),
    ):
        refused(line, run_script, script, *args)


def test_a_codec_reads_one_set_after_another(vae):
    """Images, which it encodes, and latents with or without mirrored copies; it opens nothing for a set it refuses."""
    codec = load_codec(make_codec(open_dataset("plain"), CPU).data, CPU)
    make_data("odd", resolution=20)
    refused("resolution 20, the model wants 16", codec.accept, open_dataset("odd"))
    assert codec.autoencoder is None
    found = []
    for name in ("tiny", "flips", "plain"):
        dataset = open_dataset(name)
        codec.accept(dataset)
        x0, _ = codec.read(dataset, range(9))
        found.append(x0)
        atol = 1e-3 * float(found[0].std())
        assert_close(x0, found[0], rtol=2e-3, atol=atol)
