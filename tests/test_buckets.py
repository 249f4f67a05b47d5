"""Images of several shapes: which sizes they get, models that take them, and the way from photographs to samples."""

import functools
import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import refused, script_settings
from numpy.testing import assert_allclose
from PIL import Image
from test_sample_web import drawn, picture
from tiny_runs import PLAIN, assert_ranks_agree, assert_resumes, decode_png, losses

from nanodiff.common import base_dir
from nanodiff.conditions import DataInfo
from nanodiff.data.dataset import open_dataset, verify
from nanodiff.data.pixels import Pixels
from nanodiff.diffusion.flow import FlowMatching
from nanodiff.formats.load import load_run
from nanodiff.models.build import build_model, compile_model, make_model_config
from nanodiff.models.dit import DiTConfig, position_table
from nanodiff.prepare.buckets import choose_sizes
from nanodiff.prepare.decode import kept_area
from nanodiff.prepare.sources import Options, open_source


def test_sizes_have_one_area_and_every_ratio_has_one_near():
    ratios = np.geomspace(9 / 16, 16 / 9, 1000)
    for resolution, unit in (
        (32, 2),
        (64, 4),
        (512, 32),
    ):
        sizes = np.array(choose_sizes(ratios, resolution, unit))
        assert len(sizes) == 7
        assert [resolution, resolution] in sizes.tolist()
        assert not (sizes % unit).any()
        assert_allclose(sizes.prod(1), resolution**2, rtol=0.09)
        assert (sizes[:, ::-1][::-1] == sizes).all()  # a tall size for each wide one
        assert kept_area(ratios, sizes).max(1).mean() > 0.94
        assert kept_area(ratios, [(1, 1)]).mean() < 0.8


@pytest.mark.parametrize("resolution", [16, 32, 48, 64, 96, 256])
def test_sizes_by_default_suit_the_patches_of_every_depth(tmp_path, resolution):
    for i, width in enumerate(np.geomspace(57, 177, 30).astype(int)):
        Image.new("RGB", (width, 100)).save(tmp_path / f"{i}.png")
    sizes = open_source("folder", str(tmp_path), Options(resolution=resolution, aspect_buckets=True)).sizes
    assert len(sizes) >= 3
    for depth in (4, 12):
        config = DiTConfig.from_depth(depth, resolution, in_channels=3, out_channels=3, num_classes=2)
        assert not (np.array(sizes) % config.patch_size).any()


@pytest.mark.parametrize("seed", range(5))
def test_no_other_buckets_with_enough_images_crop_less(seed):
    crop_of = lambda ratios, sizes: 1 - kept_area(ratios, sizes).max(1).mean()
    counts_of = lambda ratios, sizes: np.bincount(kept_area(ratios, sizes).argmax(1), minlength=len(sizes))
    rng = np.random.default_rng(seed)
    num_images = rng.integers(20, 300)
    ratios = np.exp(rng.normal(size=num_images) * rng.uniform(0.05, 0.6))
    for resolution, unit in (
        (64, 4),
        (256, 32),
    ):
        sizes = choose_sizes(ratios, resolution, unit)
        minimum = min(64, len(ratios) // 10)
        every = choose_sizes(np.exp(np.linspace(-0.6, 0.6, 1000)), resolution, unit)
        assert set(sizes) <= set(every)
        assert len(every) >= 5
        square = (resolution, resolution)
        assert crop_of(ratios, sizes) <= crop_of(ratios, [square])
        for number in range(1, len(every) + 1):
            for others in itertools.combinations(every, number):
                if counts_of(ratios, others).min() >= minimum:
                    assert crop_of(ratios, sizes) <= crop_of(ratios, others) + 1e-12
        if sizes != [square]:
            assert counts_of(ratios, sizes).min() >= minimum


@pytest.mark.parametrize(
    "rows, cols",
    [
        (4, 4),
        (3, 6),
        (7, 2),
    ],
)
def test_positions_of_a_rectangle_are_the_squares_moved_to_the_same_centre(rows, cols):
    config = DiTConfig(8, 3, 3, 2, 32, 1, 2)  # 4 x 4 tokens
    table = position_table(config, rows, cols).view(rows, cols, 32)
    down = torch.arange(rows)[:, None] + (4 - rows) / 2
    across = torch.arange(cols)[None] + (4 - cols) / 2
    omega = 10000.0 ** -(torch.arange(8) / 8)
    parts = []
    for place in (across, down):
        angle = (place[..., None] * omega).expand(rows, cols, 8)
        parts += [torch.sin(angle), torch.cos(angle)]
    torch.testing.assert_close(table, torch.cat(parts, -1))


@pytest.mark.parametrize("arch", ["dit", "dit_classic", "unet"])
def test_models_take_any_rectangle_of_whole_units(arch):
    data = DataInfo(
        kind="images",
        resolution=16,
        channels=3,
        num_classes=5,
        class_names=[*"abcde"],
        sizes=[[12, 20, 9], [16, 16, 9]],
    )
    small = dict(
        arch=arch,
        depth=1,
        patch_size=4,
        num_res_blocks=1,
        attention_resolutions="8",
    )
    config = script_settings("base_train") | small
    model_config = make_model_config(config, data, FlowMatching())
    model = build_model(model_config, "cpu", 0).eval()
    t = torch.tensor([1.0, 900.0])
    y = torch.tensor([0, 5])
    for height, width in (
        (12, 20),
        (20, 12),
        (16, 16),
        (32, 8),
    ):
        x = torch.randn(2, 3, height, width)
        assert model(x, t, y).shape == x.shape
    odd = replace(data, sizes=[[12, 18, 9]])
    refused("hold 12x18; .* multiples of 4", make_model_config, config, odd, FlowMatching())


def test_shapes_of_as_many_tokens_share_their_graphs(monkeypatch):
    model = build_model(DiTConfig(16, 3, 3, 4, 32, 2, 2), "cpu", 0)
    graphs = []
    backend = lambda graph, _: graphs.append(graph) or graph.forward
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    compile_model(model, False)
    counts = []
    for height, width in (
        (16, 16),
        (12, 20),
        (20, 12),
        (16, 16),
    ):
        model(torch.zeros(2, 3, height, width), torch.zeros(2))
        counts.append(len(graphs))
    assert counts[0] > 0
    assert counts[1:] == [2 * counts[0]] * 3


RUN = "--data=photos --depth=1 --patch_size=4 --total_batch_size=4 --num_iterations=6 --save_every=0 --log_every=1"
RUN = [*RUN.split(), *PLAIN]


@pytest.fixture
def photos(base, tmp_path, run_script):
    """Stripes in four shapes and two classes, as files; a set in the three buckets that have enough of them."""
    rng = np.random.default_rng(0)
    shapes = [(30, 20)] * 9 + [(40, 60)] * 8 + [(25, 25)] * 7 + [(25, 45)] * 2
    for i, (height, width) in enumerate(shapes):
        pixels = np.full((height, width, 3), rng.integers(256, size=3), np.uint8)
        pixels[:: 2 + i % 2] = 0
        file = tmp_path / "in" / "ab"[i % 2] / f"{i:02d}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        exif = Image.Exif()
        if i < 4:  # these lie on their side
            pixels = pixels.transpose(1, 0, 2)
            exif[0x0112] = 6
        Image.fromarray(pixels).save(file, exif=exif)
    args = (f"--path={tmp_path / 'in'}", "--resolution=16", "--side_unit=4", "--aspect_buckets")
    run_script("prepare_data", *args, "--name=photos", "--workers=1", "--val_fraction=0.2")
    return open_dataset("photos")


def test_files_go_to_the_bucket_of_their_shape_and_lose_little(photos):
    assert set(photos.buckets) == {(20, 12), (16, 16), (12, 20)}
    assert len(photos) == 21
    assert verify(photos)[0] == 2 + 3 + len(open_dataset("photos", "val").buckets)
    for size, bucket in photos.buckets.items():
        assert photos.images(bucket).shape == (len(bucket), 3, *size)
    square = photos.images(photos.buckets[16, 16])
    assert square.any(1)[:, 1].all()  # a stripe each, whatever the shape
    with pytest.raises(ValueError):  # a batch of several shapes
        photos.images([0, 20])
    assert sum(n for *_, n in photos.data.sizes) == 21
    assert photos.data.resolution == 16


def test_losses_depend_neither_on_ranks_nor_on_the_micro_batch_and_resume_is_exact(base, photos, run_script):
    assert_ranks_agree(base, run_script, *RUN)
    assert len(set(losses(base, "one"))) == 6
    run_script("base_train", *RUN, "--model_tag=micro", "--device_batch_size=1")
    assert_allclose(losses(base, "micro"), losses(base, "one"), rtol=1e-5)
    assert_resumes(base, run_script, *RUN)


def test_a_model_of_rectangles_is_sampled_evaluated_tuned_and_exported(photos, run_script, draw):
    run_script("base_train", *RUN, "--model_tag=run", "--num_iterations=1", "--sample_every=0", "--sample_steps=1")
    folder = base_dir() / "runs" / "run"
    grid = decode_png(next((folder / "samples").glob("*.png")).read_bytes())
    assert grid.shape[1] == 8 * (20 * 2 + 2) + 2  # the widest row, enlarged
    args = ("--model=run", "--steps=1", "--dtype=float32", "--device_type=cpu")
    run_script("sample", *args, "--num_images=24", f"--out={folder / 'mixed'}")
    rows = decode_png((folder / "mixed.png").read_bytes())
    *_, last = drawn(folder, num_images=24, steps=1)
    assert np.abs(picture(last).astype(int) - rows).max() <= 1  # the page shows the same rows
    images, _, _ = draw("--model=run", "--num_images=8", "--size=12x20")
    assert images.shape == (8, 12, 20, 3)
    heights = [Pixels(photos.data).sample_shape(8 * row)[1] for row in range(3)]
    grid_height = sum(2 * height + 2 for height in heights) + 2
    assert rows.shape == (grid_height, 8 * (20 * 2 + 2) + 2, 3)
    for wrong, line in (
        (["--size=12x18"], "size='12x18'; accepted: HEIGHTxWIDTH or SIDE in pixels, multiples of 4 up to 64"),
        (["--size=100x4"], "multiples of 4 up to 64"),
        (["--npz"], "one file holds images of one size; give --size="),
    ):
        refused(line, run_script, "sample", *args, *wrong)
    run_script("base_eval", *args, "--metric=fd_classifier", "--num_images=40")
    result = json.loads(next(folder.glob("eval_fd_*")).read_text())
    assert np.isfinite(result["fd_classifier"])
    run_script("base_eval", "--model=run", "--metric=loss", "--device_type=cpu")
    run_script("export", "--model=run", f"--out={folder / 'model.safetensors'}")
    loaded = load_run(str(folder / "model.safetensors"), "cpu")
    assert loaded.data.sizes == photos.data.sizes
    tune = ("--init_from=run", "--lora_rank=2", "--data=photos", "--num_iterations=2", "--total_batch_size=4")
    run_script("base_train", *PLAIN, *tune, "--eval_every=-1")


def test_vectors_go_with_their_images_through_the_buckets(photos, run_script, draw, tmp_path):
    """Vector i belongs to file i, whose number says its shape and its class; its name may lack the suffix."""
    names = [f"{'ab'[i % 2]}/{i:02d}{'' if i % 3 else '.png'}" for i in range(26)]
    np.savez(tmp_path / "v.npz", names=[*names, "a/26.png", "a/absent.png"], vectors=np.eye(28, 26))
    (tmp_path / "in" / "a" / "26.png").write_bytes(b"broken")
    args = (f"--path={tmp_path / 'in'}", "--resolution=16", "--side_unit=4", "--aspect_buckets")
    run_script("prepare_data", *args, "--name=told", f"--vectors={tmp_path / 'v.npz'}", "--val_fraction=0.2")
    seen = []
    for told in (
        open_dataset("told"),
        open_dataset("told", "val"),
    ):
        for (height, width), bucket in told.buckets.items():
            numbers = told.cond(bucket)["vectors"].argmax(1)
            assert (told.labels(bucket) == numbers % 2).all()
            for i in numbers:
                if i < 9:
                    assert height > width
                elif i < 17 or i > 23:
                    assert height < width
            seen += numbers.tolist()
    assert sorted(seen) == list(range(26))
    run_script("base_train", *RUN, "--data=told", "--model_tag=told", "--sample_every=0", "--sample_steps=1")
    np.save(tmp_path / "rows.npy", np.eye(26))
    more = ("--model=told", "--size=12x20", "--num_images=8", f"--vectors={tmp_path / 'rows.npy'}")
    assert draw(*more)[0].shape == (8, 12, 20, 3)
