"""The judge learns the embedded shapes, is a function of data and seed, and is trained once for each data set."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from nanodiff.common import UserError
from nanodiff.data.shapes import draw_shapes
from nanodiff.metrics import classifier as judge_module
from nanodiff.metrics.classifier import Judge, get_judge, load, shift, shrink, train_judge

TINY = dict(total_images=4000, batch_size=50, width=8)


class Images:
    """A labelled set in memory, with what a Dataset offers and a folder with a meta.json."""

    def __init__(self, images, labels, num_classes, path=None):
        self._images, self._labels, self.num_classes, self.path = images, labels, num_classes, path
        self.num_images, self.channels, self.resolution = images.shape[:3]

    def images(self, indices):
        return self._images[indices]

    def labels(self, indices):
        return self._labels[indices]


def color_set(num_images, seed, path=None):
    """Three classes that anything can tell apart: which of three channels is bright."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(3, size=num_images)
    images = rng.integers(0, 60, (num_images, 3, 8, 8))
    images[np.arange(num_images), labels] += 150
    return Images(images.astype(np.uint8), labels, 3, path)


@pytest.fixture
def easy(tmp_path):
    (tmp_path / "meta.json").write_text(json.dumps({"name": "easy"}))
    return color_set(200, 0, tmp_path), color_set(100, 1, tmp_path)


@pytest.fixture
def trainings(monkeypatch):
    """The number of trainings so far, as the length of a list."""
    calls = []

    def counted(*args, **kwargs):
        calls.append(1)
        return train_judge(*args, **kwargs)

    monkeypatch.setattr(judge_module, "train_judge", counted)
    return calls


@pytest.mark.slow
def test_shapes_are_learned_and_noise_is_not():
    train, val = (Images(*draw_shapes(n, seed), 8) for n, seed in ((4000, 0), (500, 1)))
    judge = train_judge(train, val, "cpu", total_images=12_000, batch_size=100, width=16)
    # Its accuracy is that of its own predictions on the images held out, and a tenth of the full training does most.
    predicted = judge.predict(val.images(np.arange(500)))
    assert judge.accuracy == pytest.approx(float((predicted.numpy() == val.labels(np.arange(500))).mean()))
    assert judge.accuracy > 0.9
    # The class of unrelated images is not in sight: right as often as by chance, 1/8.
    other = draw_shapes(500, 2)[1]
    assert (predicted.numpy() == other).mean() < 0.25
    # Images of the same distribution lie nearer in its features than images of one class.
    f = [judge.features(draw_shapes(300, 3, classes=c)[0])[0].mean(0) for c in (None, 0)]
    real = judge.features(val.images(np.arange(500)))[0].mean(0)
    assert (f[0] - real).norm() < 0.5 * (f[1] - real).norm()


@pytest.mark.parametrize("shape", [(1, 28), (3, 16), (3, 33), (4, 8), (3, 64)])
def test_features_and_labels_of_any_image_size(shape):
    channels, resolution = shape
    judge = Judge(channels, resolution, 5, width=4).eval()
    images = torch.randint(256, (7, channels, resolution, resolution), dtype=torch.uint8)
    (features, logits), labels = judge.features(images), judge.predict(images)
    assert features.shape == (7, judge.num_features) and features.dtype == torch.float32
    assert labels.shape == (7,) and labels.dtype == torch.int64 and 0 <= labels.min() <= labels.max() < 5
    # The logits are a linear function of the features, and neither depends on the batch, or on who holds the images.
    torch.testing.assert_close(judge.head(features), logits)
    assert torch.equal(logits.argmax(1), labels)
    alone = judge.features(images.numpy(), batch_size=2)
    torch.testing.assert_close(alone, (features, logits), rtol=1e-4, atol=1e-5)
    assert judge.features(images[:0])[0].shape == (0, judge.num_features) and judge.predict(images[:0]).shape == (0,)


def test_training_is_a_function_of_the_seed(easy):
    settings = TINY | {"total_images": 500}
    one, same, other = (train_judge(*easy, "cpu", seed=seed, **settings).state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["head.weight"], other["head.weight"])


def test_a_judge_is_trained_once(easy, trainings):
    first = get_judge(*easy, "cpu", **TINY)
    again = get_judge(*easy, "cpu", **TINY)
    assert len(trainings) == 1 and first.accuracy == again.accuracy == 1.0
    images = easy[1].images(np.arange(100))
    assert torch.equal(first.features(images)[0], again.features(images)[0])
    assert sorted(os.listdir(easy[0].path)) == ["judge.pt", "meta.json"]
    saved = torch.load(easy[0].path / "judge.pt", weights_only=True)
    assert saved["accuracy"] == 1.0


def test_a_judge_of_other_data_or_settings_or_a_damaged_one_is_trained_anew(easy, trainings):
    settings = TINY | {"total_images": 500}
    folder = easy[0].path
    get_judge(*easy, "cpu", **settings)
    get_judge(*easy, "cpu", **settings, seed=1)
    assert len(trainings) == 2
    (folder / "meta.json").write_text(json.dumps({"name": "changed"}))
    get_judge(*easy, "cpu", **settings, seed=1)
    assert len(trainings) == 3
    whole = (folder / "judge.pt").read_bytes()
    (folder / "judge.pt").write_bytes(whole[: len(whole) // 2])
    get_judge(*easy, "cpu", **settings, seed=1)
    assert len(trainings) == 4 and len((folder / "judge.pt").read_bytes()) == len(whole)


def test_a_judge_that_would_run_code_is_not_loaded(easy, trainings, tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "exploded"),)

    file = io.BytesIO()
    torch.save({"key": Bomb()}, file)
    (tmp_path / "judge.pt").write_bytes(file.getvalue())
    get_judge(*easy, "cpu", **TINY | {"total_images": 500})
    assert len(trainings) == 1 and not (tmp_path / "exploded").exists()


def test_a_set_on_a_read_only_disk_is_judged_all_the_same(easy, monkeypatch, capsys):
    def refuse(path, data):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(judge_module, "write_atomic", refuse)
    assert get_judge(*easy, "cpu", **TINY).accuracy == 1.0
    assert "cannot be kept" in capsys.readouterr().out and not (easy[0].path / "judge.pt").exists()


RANK = """
import sys, torch, torch.distributed as dist
from pathlib import Path
sys.path.insert(0, "tests")
from test_judge import TINY, color_set
from nanodiff.metrics.classifier import get_judge
rank, folder = int(sys.argv[1]), Path(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
judge = get_judge(color_set(200, 0, folder), color_set(100, 1, folder), "cpu", **TINY)
torch.save([judge.accuracy, judge.state_dict()], folder / f"out{rank}")
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_the_first_rank_trains_for_all(easy):
    folder = easy[0].path
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), folder],
            env=os.environ | {"RANK": str(rank), "WORLD_SIZE": "2"}, cwd=Path(__file__).parents[1],
            stdout=subprocess.PIPE, text=True,
        ) for rank in range(2)
    ]  # fmt: skip
    printed = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert "training a judge" in printed[0] and printed[1] == ""
    (accuracy, first), (same, second) = (torch.load(folder / f"out{rank}", weights_only=True) for rank in range(2))
    assert accuracy == same == 1.0 and all(torch.equal(first[name], second[name]) for name in first)


def test_sets_without_labels_and_latents_are_refused(easy):
    train, val = easy
    train.num_classes = 0
    with pytest.raises(UserError, match="needs labels of 2 or more classes, this data set has 0"):
        get_judge(train, val, "cpu")
    train.num_classes, train._images = 3, train._images.astype(np.float16)
    with pytest.raises(UserError, match="float16"):
        get_judge(train, val, "cpu")


def test_large_sets_are_drawn_from(easy, monkeypatch):
    monkeypatch.setattr(judge_module, "MAX_IMAGES", 30)
    images, labels = load(easy[0], 8, seed=0, chunk=7)
    again, _ = load(easy[0], 8, seed=0)
    other, _ = load(easy[0], 8, seed=1)
    assert len(images) == len(labels) == 30 and torch.equal(images, again) and not torch.equal(images, other)
    assert torch.equal(images.float().mean((2, 3)).argmax(1), labels)  # each image has kept its label


def test_shrinking_keeps_the_mean_and_small_images():
    images = torch.randint(256, (3, 3, 64, 64), dtype=torch.uint8)
    small = shrink(images, 16)
    assert small.shape == (3, 3, 16, 16) and small.dtype == torch.uint8
    blocks = images.float().unflatten(2, (16, 4)).unflatten(4, (16, 4)).mean((3, 5))
    assert (small.float() - blocks).abs().max() <= 0.5  # what rounding costs
    assert shrink(small, 32) is small


def test_shifts_move_whole_images_by_an_eighth_at_most():
    spot = torch.zeros(500, 1, 16, 16, dtype=torch.uint8)
    spot[:, :, 8, 8] = 200
    moved = shift(spot, torch.Generator().manual_seed(0))
    rows, cols = moved[:, 0].flatten(1).argmax(1) // 16, moved[:, 0].flatten(1).argmax(1) % 16
    assert torch.equal(moved.flatten(1).long().sum(1), torch.full((500,), 200))
    assert set(rows.tolist()) == set(cols.tolist()) == {6, 7, 8, 9, 10}
    flat = torch.full((4, 2, 16, 16), 7, dtype=torch.uint8)
    assert torch.equal(shift(flat, torch.Generator().manual_seed(0)), flat)  # no border comes in
