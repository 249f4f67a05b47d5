"""A figure does not depend on how the work was cut up, and is kept beside the run."""

import functools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import run_process
from tiny_runs import TIMELESS, make_data, make_run

from nanodiff import evaluation, judge
from nanodiff.dataloader import to_model_range
from nanodiff.dataset import open_dataset


@pytest.fixture
def run_dir(base, run_script):
    make_data()
    return make_run(run_script, "a")


@pytest.fixture
def quick_judge(monkeypatch):
    """A judge that has seen hardly anything; kept under the same key as an honest one, in this test's own folder."""
    monkeypatch.setattr(judge, "train_judge", functools.partial(judge.train_judge, total_images=200, batch_size=20))


def evaluate(run_script, run_dir, metric, *args):
    run_script("base_eval", *TIMELESS, f"--metric={metric}", *args)
    return json.loads((run_dir / f"eval_{metric}_000001.json").read_text())


def test_validation_loss_does_not_depend_on_the_batch_size(run_dir, run_script):
    one = evaluate(run_script, run_dir, "loss", "--batch_size=24")
    assert one["num_images"] == 24 and one["data"] == "tiny" and one["step"] == 1 and one["weights"] == "0.999"
    for size in (1, 7):
        other = evaluate(run_script, run_dir, "loss", f"--batch_size={size}")
        assert {k: pytest.approx(v, rel=1e-4) if isinstance(v, float) else v for k, v in one.items()} == other
    quarters = [one[f"loss_q{i}"] for i in range(4)]
    assert np.mean(quarters) == pytest.approx(one["loss"])  # t is spread evenly, so each has as many images
    assert evaluate(run_script, run_dir, "loss", "--ema=raw")["loss"] != one["loss"]
    assert evaluate(run_script, run_dir, "loss", "--seed=1")["loss"] != one["loss"]


def test_validation_loss_of_a_model_that_predicts_nothing(run_dir, run_script):
    """At step 0 the output is 0: under flow matching the loss is then E|noise - x0|^2 = 1 + E x0^2, whatever t."""
    run_script("base_eval", *TIMELESS, "--checkpoint_step=0")
    loss = json.loads((run_dir / "eval_loss_000000.json").read_text())["loss"]
    x0 = to_model_range(torch.from_numpy(open_dataset("tiny", "val").images(range(24))))
    values = x0.numel()
    assert loss == pytest.approx(1 + float(x0.square().mean()), abs=5 * (2 / values + 4 / values) ** 0.5)


def test_few_images_give_valid_json(run_dir, run_script):
    one = evaluate(run_script, run_dir, "loss", "--num_images=1")
    assert one["num_images"] == 1 and np.isfinite(one["loss"]) and sum(key.startswith("loss_q") for key in one) == 1


@pytest.mark.parametrize("more", [(), ("--arch=unet", "--num_res_blocks=1"), ("--low_res_size=8",)])
def test_bits_per_dim(base, run_script, more):
    make_data()
    run_dir = make_run(run_script, "a", "--objective=eps", "--num_timesteps=25", "--variance=learned_range", *more)
    one = evaluate(run_script, run_dir, "bpd", "--num_images=3")
    assert one["timesteps"] == 25 and one["num_images"] == 3 and 0 < one["prior_bpd"] < one["total_bpd"]
    with np.load(run_dir / "bpd_terms_000001.npz") as terms:
        assert all(terms[name].shape == (25,) for name in ("vb", "xstart_mse", "mse"))
        assert terms["vb"].sum() + one["prior_bpd"] == pytest.approx(one["total_bpd"])
    two = evaluate(run_script, run_dir, "bpd", "--num_images=3", "--batch_size=2")
    assert two["total_bpd"] == pytest.approx(one["total_bpd"], rel=1e-4)


def test_class_accuracy_end_to_end(run_dir, run_script, quick_judge):
    result = evaluate(run_script, run_dir, "class_accuracy", "--num_images=10", "--steps=2", "--cfg_scale=3")
    assert 0 <= result["class_accuracy"] <= 1 and 0 < result["judge_accuracy_on_real_images"] <= 1
    given = dict(num_images=10, steps=2, sampler="heun", cfg_scale=3, seed=0, metric="class_accuracy")
    assert given.items() <= result.items()
    again = evaluate(run_script, run_dir, "class_accuracy", "--num_images=10", "--steps=2", "--batch_size=3")
    assert again["judge_accuracy_on_real_images"] == result["judge_accuracy_on_real_images"]  # kept, not trained anew


@pytest.mark.parametrize("right", [0, 5, 8])
def test_class_accuracy_counts_what_is_right(run_dir, run_script, monkeypatch, right):
    """A sampler that paints the label as a grey level, right for so many of 8 classes, and a judge that reads it."""

    def paint(model, process, seeds, cond, shape, *args, **kwargs):
        labels = torch.where(cond["y"] < right, cond["y"], cond["y"] + 8)
        return to_model_range(labels[:, None, None, None].expand(-1, *shape).to(torch.uint8))

    reader = SimpleNamespace(predict=lambda images: images[:, 0, 0, 0].long(), accuracy=1.0)
    monkeypatch.setattr(evaluation, "sample_images", paint)
    monkeypatch.setattr(judge, "get_judge", lambda *args: reader)
    result = evaluate(run_script, run_dir, "class_accuracy", "--num_images=16")
    assert result["class_accuracy"] == right / 8


@pytest.mark.slow
def test_two_ranks_find_the_figures_of_one(run_dir, run_script, quick_judge):
    for metric, args in (("loss", ["--batch_size=5"]), ("class_accuracy", ["--num_images=9", "--steps=2"])):
        one = evaluate(run_script, run_dir, metric, *args)
        run_process("base_eval", *TIMELESS, f"--metric={metric}", *args, ranks=2)
        two = json.loads((run_dir / f"eval_{metric}_000001.json").read_text())
        assert {k: pytest.approx(v, rel=1e-4) if isinstance(v, float) else v for k, v in one.items()} == two
