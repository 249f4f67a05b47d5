"""The plan's arithmetic: what a timed model would reach in the minutes given, and which one it recommends."""

import re
import sys

import pytest
from conftest import refused
from tiny_runs import make_data

from nanodiff.common import UserError
from scripts import bench, plan

TRAINED_PER_S = 1e7  # parameters times images times tokens


def fake_turn(arguments, num_steps, ranks):
    """In place of a run: a machine that trains TRAINED_PER_S, and has no memory for depth 6."""
    depth, patch, batch = (int(x) for x in re.findall(r"(?:depth|patch_size|total_batch_size)=(\d+)", arguments))
    fake_turn.depths.append(depth)
    if depth == 6:
        raise UserError("not even one image at a time fits into memory")
    patch = patch or 2
    model = {"image_size": 8, "patch_size": patch, "depth": depth}
    num_params = 1000 * depth**3
    speed = TRAINED_PER_S / num_params / (8 // patch) ** 2
    lines = [{"train/dt_ms": 1000 * batch / speed}] * (bench.WARM_UP + num_steps)
    run = {"model": model, "num_params": num_params, "config": {"total_batch_size": batch}}
    return {
        "run": run,
        "lines": lines,
        "seconds": 10 + num_steps * batch / speed,
        "memory_gb": depth / 10,
    }


@pytest.fixture
def run_plan(base, monkeypatch, capsys):
    """run_plan("--minutes=10") -> its rows, its text."""
    make_data()
    before = dict(vars(plan))  # main overrides the settings
    monkeypatch.setattr(plan, "take_turn", fake_turn)
    monkeypatch.setattr(plan, "MOST_EPOCHS", 10**9)

    def run(*args):
        fake_turn.depths = []
        for name, value in before.items():
            if name in ("data", "minutes", "ranks"):
                monkeypatch.setattr(plan, name, value)
        monkeypatch.setattr(sys, "argv", ["plan", "--data=tiny", *args])
        rows = plan.main()
        return rows, capsys.readouterr().out

    return run


def test_a_row_takes_the_minutes_and_counts_tokens_per_parameter(run_plan):
    rows, _ = run_plan("--minutes=60")
    for row in rows:
        images = row["steps"] * row["batch"]
        seconds = (images + plan.NUM_CHECKS * plan.IMAGES_PER_CHECK) / row["images/s"] + 10
        assert seconds == pytest.approx(3600, rel=0.01)
        assert row["tokens/parameter"] == images * row["tokens"] / row["parameters"]


def test_the_deepest_whole_model_is_recommended_and_nothing_far_off_is_timed(run_plan):
    rows, text = run_plan("--minutes=600")
    assert fake_turn.depths == [1, 4, 6]
    assert "depth 6 does not run here: not even one image" in text
    whole = [row["depth"] for row in rows if row["tokens/parameter"] >= plan.WHOLE]
    assert f"--depth={max(whole)} " in text


def test_shallow_models_are_also_timed_with_larger_patches(run_plan):
    rows, _ = run_plan("--minutes=60")
    assert {row["patch"] for row in rows} == {2, 4}


def test_twice_the_minutes_are_twice_the_images(run_plan):
    short, _ = run_plan("--minutes=1000")
    long, _ = run_plan("--minutes=2000")
    assert long[0]["epochs"] == pytest.approx(2 * short[0]["epochs"], rel=0.02)


def test_too_little_time_and_too_few_images_are_said(run_plan, monkeypatch):
    refused("minutes=0.1", run_plan, "--minutes=0.1")
    monkeypatch.setattr(plan, "MOST_EPOCHS", 10)
    rows, text = run_plan("--minutes=600")
    assert max(row["epochs"] for row in rows) <= 10
    assert "none gets 8 tokens per parameter" in text
    assert "few images for 600 minutes" in text


def test_several_ranks_are_started_by_torchrun_and_not_within_it(run_plan, monkeypatch):
    rows, text = run_plan("--minutes=60", "--ranks=3")
    assert "torchrun --standalone --nproc_per_node=3 -m scripts.base_train" in text
    for row in rows:
        assert row["batch"] % 3 == 0
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused("give --ranks=N", run_plan)
