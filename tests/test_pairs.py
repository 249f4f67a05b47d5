"""A second image as condition: stored behind the first, seen beside x_t, dropped as others are, given to samples."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import refused
from image_helpers import prepare, report
from numpy.testing import assert_allclose
from PIL import Image
from tiny_runs import TIMELESS, TINY, assert_identical, decode_png, losses, make_autoencoder, make_run, weights

from nanodiff.data.dataset import DatasetWriter, open_dataset
from nanodiff.data.pixels import to_uint8
from nanodiff.data.shapes import CLASS_NAMES, draw_shapes
from nanodiff.formats.load import load_run
from nanodiff.prepare.decode import decode_second
from nanodiff.sampling.loaded import open_samples

TRAIN = (*TINY, "--num_iterations=3", "--label_drop=0.5", "--log_every=1")
UNET = [arg for arg in TRAIN if "patch_size" not in arg] + ["--arch=unet", "--num_res_blocks=1"]


def make_set(name, second=None, images_of=lambda images: images, **meta):
    """Shapes; behind the channels of each image, if it is given, those of second(images)."""
    with DatasetWriter(name, CLASS_NAMES) as writer:
        writer.meta |= meta
        for split, n in (
            ("train", 72),
            ("val", 24),
        ):
            images, labels = draw_shapes(n, seed=n)
            images = images_of(images)
            if second:
                given = second(images)
                writer.meta |= {"given_channels": given.shape[1], "given_scaling": "nearest"}
                images = np.concatenate([images, given], axis=1)
            writer.append(split, images, y=labels)


def gray(images):
    return images.max(1, keepdims=True) // 2


@pytest.mark.parametrize("arch", [TRAIN, UNET], ids=["dit", "unet"])
def test_pairs_made_by_downsampling_train_like_super_resolution(base, run_script, arch):
    """Bit for bit, dropped images and mirrored ones included; in 8ths, which no step of the downsampling rounds."""
    eighths = lambda images: (images // 16 / 8 - 1).astype(np.float16)

    def small(images):
        down = F.interpolate(torch.from_numpy(images).float(), size=8, mode="area")
        return F.interpolate(down, size=16, mode="bilinear").numpy().astype(np.float16)

    arrays = {"kind": "arrays", "range": [-1, 1], "dtype": "float32"}
    make_set("tiny", None, eighths, **arrays)
    make_set("pairs", small, eighths, **arrays)
    run_script("base_train", *arch, "--flip", "--model_tag=low", "--low_res_size=8")
    run_script("base_train", *arch, "--flip", "--model_tag=pairs", "--data=pairs")
    assert losses(base, "low") == losses(base, "pairs")
    assert_identical(weights(base, "low", 3), weights(base, "pairs", 3))


def test_latents_take_the_second_image_at_their_size(base, run_script, tmp_path):
    make_set("tiny", gray)
    vae = make_autoencoder(tmp_path / "vae")
    args = (f"--autoencoder={vae}", "--device_type=cpu")
    run_script("cache_latents", "--data=tiny", *args, "--name=cached", "--latent_norm=scale", "--flip")
    cached = open_dataset("cached").rows([0])[1]["given"]
    second = gray(open_dataset("tiny").images([0]))
    average = second.reshape(1, 1, 4, 4, 4, 4).mean((3, 5))
    assert_allclose(cached, average / 127.5 - 1, atol=1e-3)
    grid = ("--patch_size=2", "--flip", "--sample_every=0", "--sample_steps=1")
    run_script("base_train", *TRAIN, *grid, "--data=cached", "--model_tag=cached")
    run_script("base_train", *TRAIN, *grid, args[0], "--model_tag=live")
    assert_allclose(losses(base, "cached"), losses(base, "live"), rtol=0.01)  # fp16


def test_a_model_without_pairs_starts_a_run_with_them(base, run_script):
    """At first the second image has no effect."""
    make_set("tiny")
    make_set("pairs", gray)
    make_run(run_script, "plain")
    start = ("--init_from=plain", "--data=pairs", "--num_iterations=0", "--eval_every=-1", "--sample_every=-1")
    run_script("base_train", *start, "--model_tag=paired", "--device_type=cpu")
    before = load_run("plain", "cpu").model
    after = load_run("paired", "cpu").model
    x_t = torch.randn(2, 3, 16, 16)
    t = torch.tensor([10.0, 900.0])
    y = torch.tensor([1, 8])
    with torch.no_grad():
        given = torch.randn(2, 1, 16, 16)
        torch.testing.assert_close(after(x_t, t, y, given=given), before(x_t, t, y))
    lora = (*start, "--model_tag=tuned", "--lora_rank=2", "--device_type=cpu")  # its base would ignore the image
    refused("has second images, which the base or checkpoint does not take", run_script, "base_train", *lora)


def make_photos(folder, sizes, mode="L"):
    """Photographs a/*.png in these sizes (H, W), and masks a/*.bmp of half the size: the mean of 2 x 2 red values."""
    rng = np.random.default_rng(0)
    for i, (height, width) in enumerate(sizes):
        half = rng.integers(256, size=(height // 2, width // 2, 3), dtype=np.uint8)
        pixels = half.repeat(2, 0).repeat(2, 1)
        for kind, suffix, array in (
            ("photos", "png", pixels),
            ("masks", "bmp", pixels[::2, ::2, 0]),
        ):
            path = folder / kind / "ab"[i % 2] / f"{i:02d}.{suffix}"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(array).save(path)
    return folder / "photos", folder / "masks"


def test_pairs_are_found_by_path_and_cropped_as_their_images(base, tmp_path):
    photos, masks = make_photos(tmp_path, [(32, 32), (40, 32), (32, 48)])
    (masks / "a" / "extra.bmp").write_bytes((masks / "a" / "00.bmp").read_bytes())
    line = prepare(
        photos,
        resolution=16,
        pairs=str(masks),
        val_fraction=0,
        pairs_scaling="nearest",
    )
    assert "second images of 1 channels (nearest)" in line
    toy = open_dataset("toy")
    images, cond = toy.rows([0, 1, 2])
    assert images.shape == (3, 3, 16, 16)
    assert (cond["given"][:, 0] == images[:, 0]).all()
    assert toy.images([2]).any()
    (masks / "b" / "01.bmp").rename(masks / "b" / "1.bmp")
    refused("none for 1 of 3 images, such as 'b/01.png'", prepare, photos, resolution=16, pairs=str(masks))
    masks = masks.rename(tmp_path / ".hidden")
    Image.fromarray(np.full((20, 16), 200, np.uint16)).save(masks / "b" / "01.png")
    refused("01.png has over 8 bits or several frames", prepare, photos, resolution=16, pairs=str(masks))
    (masks / "b" / "01.png").write_bytes((photos / "b" / "01.png").read_bytes())
    refused("has 3 channels; accepted .*: 1", prepare, photos, resolution=16, pairs=str(masks))
    (masks / "b" / "01.png").unlink()
    for colours in ([0, 0, 0, 255, 255, 255], [255, 255, 255, 0, 0, 0]):  # a program may count them in any order
        mask = Image.new("P", (8, 8), colours.index(255) // 3)
        mask.putpalette(colours)
        mask.save(tmp_path / "mask.png")
        assert (decode_second(str(tmp_path / "mask.png"), "nearest", 1, 8, 8) == 255).all()
    for white in (1, 255):
        for path in photos.glob("*/*"):
            mask = masks / path.relative_to(photos).with_suffix(".bmp")
            Image.new("L", Image.open(path).size, white).save(mask)
        said = report(photos, resolution=16, pairs=str(masks))
        is_warned = "second image without a value above 63 of 255" in said
        assert is_warned == (white == 1)


def test_buckets_of_pairs_train_and_a_sample_takes_a_row_of_its_shape(base, run_script, tmp_path):
    photos, masks = make_photos(tmp_path, [(40, 24)] * 9 + [(24, 40)] * 8 + [(32, 32)] * 7)
    options = {"aspect_buckets": True, "side_unit": 4, "val_fraction": 0.3}
    prepare(photos, resolution=16, name="tiny", pairs=str(masks), **options)
    val = open_dataset("tiny", "val")
    assert len(val.buckets) == 3
    grid = ("--sample_every=0", "--sample_steps=1", "--eval_every=0")
    for tag, more in (
        ("pairs", ()),
        ("low", ("--low_res_size=8", "--data=plain")),
    ):
        prepare(photos, resolution=16, name="plain", **options)
        run_script("base_train", *TRAIN, *grid, *more, f"--model_tag={tag}")
        args = (f"--model={tag}", "--steps=1", *TIMELESS)
        run_script("sample", *args, "--num_images=24", f"--out={tmp_path / 'mixed'}")
        grid_image = decode_png((tmp_path / "mixed.png").read_bytes())
        assert grid_image.shape[1] == 8 * (20 * 2 + 2) + 2
    loaded = load_run("pairs", "cpu")
    own = open_samples(loaded).inputs["given"]
    for (height, width), bucket in val.buckets.items():
        shape = (3, height, width)
        rows = own.rows(range(5), shape)  # in any order: a set may be sorted by class
        assert set(rows) <= set(bucket)
        assert len(set(own.rows(range(len(bucket)), shape))) == len(bucket)
        _, cond = val.rows(rows)
        assert (to_uint8(own(range(5), shape)).numpy() == cond["given"]).all()
        assert (own.labels[rows] == val.labels(rows)).all()
    files = open_samples(loaded, pairs=str(masks)).inputs["given"]  # tall ones first; their number says their class
    first = decode_second(str(masks / "a" / "00.bmp"), "nearest", 1, 20, 12)
    given = to_uint8(files([0, 24], (3, 20, 12)))
    assert (given.numpy() == first).all()
    assert files.labels.tolist() == [0] * 12 + [1] * 12


def test_samples_take_second_images_of_files(base, run_script, draw, tmp_path, capsys):
    """Of an .npz as of the validation set; the picture shows pairs. Of a folder: above; in Python: test_sample.py."""
    make_set("tiny", gray)
    make_run(run_script, "a")
    samples = open_samples(load_run("a", "cpu"))
    both = replace(samples, inputs=samples.inputs | {"vectors": replace(samples.inputs["given"])})
    assert both.protocol["classes"] == "of the rows of given"
    assert replace(both, classes=[0]).protocol["classes"] == "in the set's proportions"
    order = samples.inputs["given"].rows(range(24), (3, 16, 16))
    assert sorted(order) == list(range(24))
    assert sorted(order) != list(order)
    _, cond = open_dataset("tiny", "val").rows(order)
    given = cond["given"]
    labels = cond["y"]
    np.savez(tmp_path / "file.npz", given.transpose(0, 2, 3, 1), labels)
    some = ("--model=a", "--num_images=24")
    images, found, _ = draw(*some)
    grid = decode_png((tmp_path / "drawn.png").read_bytes())
    assert (found == labels).all()
    assert (grid[2:50:3, 2:50:3, 0] == given[0, 0]).all()
    of_file, found, _ = draw(*some, f"--pairs={tmp_path / 'file.npz'}")
    assert (of_file == images).all()
    assert (found == labels).all()
    assert "63 of 255" not in capsys.readouterr().out
    np.savez(tmp_path / "file.npz", (given > 99).astype(np.uint8).transpose(0, 2, 3, 1))
    draw(*some, f"--pairs={tmp_path / 'file.npz'}")
    assert "file.npz' holds no value above 63 of 255" in capsys.readouterr().out
    np.savez(tmp_path / "file.npz", given.transpose(0, 2, 3, 1).repeat(3, 3))
    refused("has 3 channels", draw, *some, f"--pairs={tmp_path / 'file.npz'}")
    (tmp_path / "second").mkdir()
    Image.fromarray(given[0, 0]).save(tmp_path / "second" / "a.png")
    (tmp_path / "second" / "b.png").write_bytes(b"")
    refused("second/b.png", draw, *some, f"--pairs={tmp_path / 'second'}")
    refused("size='32x32'; accepted with a second image", draw, *some, "--size=32x32")
