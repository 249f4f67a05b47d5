"""Samples from given images: strength 1 is plain sampling, strength 0 and a mask of ones the image."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import refused
from PIL import Image
from test_sample import assert_same, draw, runs  # noqa: F401
from torch.testing import assert_close

from nanodiff.data.dataset import open_dataset
from nanodiff.diffusion.flow import FlowMatching
from nanodiff.diffusion.gaussian import GaussianDiffusion
from nanodiff.png import encode_png
from nanodiff.prepare.decode import Item, decode
from nanodiff.sampling.draw import StartImages
from nanodiff.sampling.inputs import decoded_items, open_images, read_mask, start_from

SAMPLERS = [("flow", name) for name in FlowMatching.samplers]
SAMPLERS += [("eps", name) for name in GaussianDiffusion.samplers]


@pytest.fixture
def images(runs, tmp_path):  # noqa: F811
    """Three validation images as arr_0 of given.npz; (3, 16, 16, 3)."""
    images = open_dataset("tiny", "val").images([0, 1, 2]).transpose(0, 2, 3, 1)
    np.savez(tmp_path / "given.npz", images)
    return images


@pytest.mark.parametrize("run, sampler", SAMPLERS)
def test_strength_and_mask(draw, images, tmp_path, capsys, run, sampler):  # noqa: F811
    """Also that less strength means fewer evaluations, and an image that is nearer to the given one."""
    some = (f"--model={run}", f"--sampler={sampler}", "--num_images=4", "--steps=6")
    given = (*some, f"--from_images={tmp_path / 'given.npz'}")
    plain, _, protocol = draw(*some)
    all_of_it, _, same = draw(*given, "--strength=1")
    assert all_of_it.tobytes() == plain.tobytes()
    assert same["network_evaluations"] == protocol["network_evaluations"]
    expected = images[[0, 1, 2, 0]]
    assert "uses" not in capsys.readouterr().out
    draw(*given, "--strength=0", "--num_images=2")
    assert "from_images has 3 images, num_images=2 uses 2 of them" in capsys.readouterr().out
    unchanged, _, none = draw(*given, "--strength=0")
    assert (unchanged == expected).all()
    assert none["network_evaluations"] == 0
    assert "SHA-256" in none["from_images"]
    some_of_it, _, half = draw(*given, "--strength=0.3")
    distance = lambda x: np.square(x.astype(float) - expected).mean()
    assert 0 < distance(some_of_it) < distance(plain)
    assert 0 < half["network_evaluations"] < protocol["network_evaluations"]

    for width in (16, 8):  # white keeps the image
        mask = np.zeros((16, 16, 3), np.uint8)
        mask[:, :width] = 255
        (tmp_path / "mask.png").write_bytes(encode_png(mask))
        kept, _, protocol = draw(*given, "--strength=1", f"--mask={tmp_path / 'mask.png'}")
        assert (kept[:, :, :width] == expected[:, :, :width]).all()
        assert "mask.png, SHA-256" in protocol["mask"]
        if width == 8:
            assert (kept[:, :, width:] != expected[:, :, width:]).any()


def test_what_given_images_lose_is_counted(tmp_path, capsys):
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    item = Item("a.gif", str(tmp_path / "a.gif"), 0, False)
    decoded_items("from_images", "a.gif", [item], [(16, 16)])
    out = capsys.readouterr().out
    assert "a.gif: first of several frames: 1 image\n" in out
    assert "a.gif: enlarged, as smaller than the resolution: 1 image\n" in out


@pytest.mark.parametrize("names", [("a/x/1", "a/y/2", "b/z/3"), ("train/cat/4", "val/dog/5")])
def test_a_folder_of_given_images_needs_no_classes(tmp_path, names):
    for name in names:
        file = tmp_path / f"{name}.png"
        file.parent.mkdir(parents=True)
        file.write_bytes(encode_png(np.full((8, 8, 3), int(file.stem), np.uint8)))
    assert len([*open_images("from_images", str(tmp_path)).items]) == len(names)


def test_a_mask_is_cropped_as_its_picture_is(tmp_path, capsys):
    """A picture whose left third is white, used as a picture and as a mask; what is transparent is not kept."""
    for size in (
        (64, 40),
        (40, 64),
        (300, 200),
    ):
        picture = Image.new("RGB", size)
        picture.paste("white", (0, 0, size[0] // 3, size[1]))
        picture.save(tmp_path / "a.png")
        red, _, _ = decode(str(tmp_path / "a.png"), [(16, 16)])[0]
        expected = red >= 128
        mask = read_mask(str(tmp_path / "a.png"), 16)
        assert f"is of {size[0]}x{size[1]}: cropped and scaled to 16x16" in capsys.readouterr().out
        assert ((mask >= 0.5) == expected).all()
        alpha = Image.new("RGBA", size, "white")
        alpha.putalpha(picture.convert("L"))
        alpha.save(tmp_path / "b.png")
        mask = read_mask(str(tmp_path / "b.png"), 16)
        assert ((mask >= 0.5) == expected).all()


def test_a_gray_mask_keeps_its_levels(tmp_path, capsys):
    """Of an image or an array; one that is no mask is refused, and one without white is noticed."""
    levels = np.arange(256).reshape(16, 16)
    Image.fromarray(levels.astype(np.uint8)).save(tmp_path / "a.png")
    for name, array in (
        ("b.npy", levels),
        ("c.npy", levels / 255),
        ("d.npy", levels > 99),
        ("e.npy", -levels),
    ):
        np.save(tmp_path / name, array)
    np.save(tmp_path / "f.npy", levels / np.nan)
    for name in ("a.png", "b.npy", "c.npy"):
        mask = read_mask(str(tmp_path / name), 16)
        np.testing.assert_allclose(mask, levels / 255, atol=1e-7)
    mask = read_mask(str(tmp_path / "d.npy"), 16)
    assert (mask == (levels > 99)).all()
    assert "lightest part" not in capsys.readouterr().out
    np.save(tmp_path / "dark.npy", levels.clip(0, 38))
    read_mask(str(tmp_path / "dark.npy"), 16)
    assert "dark.npy': its lightest part, 0.15 of white, is kept for that share" in capsys.readouterr().out
    for name in ("e.npy", "f.npy"):
        refused("values below 0 or above 255", read_mask, str(tmp_path / name), 16)


def test_a_latent_is_kept_as_its_darkest_pixel(tmp_path):
    levels = np.full((16, 16), 255, np.uint8)
    levels[5, 6] = 51
    levels[8:] = 0
    np.save(tmp_path / "mask.npy", levels)
    codec = SimpleNamespace(image_size=16, shape=(4, 4, 4))
    samples = SimpleNamespace(codec=codec, shape=(3, 16, 16))
    image = np.zeros((1, 3, 16, 16), np.uint8)
    start_from(samples, image, "", 1.0, str(tmp_path / "mask.npy"))
    expected = torch.tensor(
        [
            [1, 1, 1, 1],
            [1, 0.2, 1, 1],
            [0, 0, 0, 0],
            [0, 0, 0, 0],
        ]
    )
    assert_close(samples.start_images.mask[0, 0], expected)


PROCESSES = [FlowMatching(timestep_shift=0.3), GaussianDiffusion()]


def image_and_noise():
    return torch.randn(2, 2, 1, 4, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("process", PROCESSES)
def test_a_gray_mask_is_less_strength(process):
    """A pixel at level m is kept for a fraction m of the steps: an even gray is SDEdit of strength 1 - m."""
    x0, noise = image_and_noise()
    sampler = "ddim" if process.is_gaussian else "euler"
    denoiser = lambda x_t, t, time: torch.sin(3 * x_t)

    def sample(strength, level):
        known = StartImages(x0, strength, torch.full((1, 1, 4, 4), level))
        return process.sample(denoiser, noise, 5, sampler, start_image=known)

    sums = {float(sample(1.0, level).sum()) for level in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)}
    assert len(sums) == 6
    for level in (0.2, 0.4, 0.6, 0.8):
        assert torch.equal(sample(1.0, level), sample(1 - level, 0.0))
    assert torch.equal(sample(1.0, 254.9 / 255), x0)  # white up to a JPEG's rounding


@pytest.mark.parametrize("process", PROCESSES)
def test_the_known_part_has_the_noise_of_each_step(process):
    """Of every x_t it is the forward process's, with the noise that sampling started from."""
    x0, noise = image_and_noise()
    sampler = "ddim" if process.is_gaussian else "euler"
    known = StartImages(x0, 1.0, torch.ones(1, 1, 4, 4))
    seen = []
    denoiser = lambda x_t, t, time: seen.append((x_t.clone(), t)) or torch.zeros_like(x_t)
    process.sample(denoiser, noise, 5, sampler, start_image=known)
    assert len(seen) == 5
    for x_t, t in seen[1:]:
        if process.is_gaussian:
            expected = process.q_sample(x0, t.long(), noise)
        else:
            expected = torch.lerp(x0, noise, t[0] / 1000)
        assert_close(x_t, expected, rtol=1e-4, atol=1e-5)
