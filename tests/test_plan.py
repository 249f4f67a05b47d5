"""The plan's arithmetic: what a timed model would reach in the minutes given, and which one it recommends."""

import re

import pytest
from conftest import refused
from tiny_runs import make_data

from nanodiff.common import UserError
from scripts import bench

TRAINED_PER_S = 1e7  # parameters times images times tokens
WHOLE = 8  # tokens per parameter


def fake_turn(arguments, num_steps, ranks):
    """In place of a run: a machine that trains TRAINED_PER_S, and has no memory for depth 9."""
    depth, batch = (int(x) for x in re.findall(r"(?:depth|total_batch_size)=(\d+)", arguments))
    fake_turn.depths.append(depth)
    if depth >= 9:
        raise UserError("not even one image at a time fits into memory")
    patch = 2 if depth > 5 else 4
    model = {"image_size": 8, "patch_size": patch, "depth": depth}
    num_params = 1000 * depth**3
    speed = TRAINED_PER_S / num_params / (8 // patch) ** 2
    line = {
        "train/dt_ms": 1000 * batch / speed,
        "train/images_per_sec": speed,
    }
    return {
        "run": {"model": model, "num_params": num_params},
        "lines": [line] * (bench.WARM_UP + num_steps),
        "seconds": 10,
        "memory_gb": depth / 10,
    }


@pytest.fixture
def run_plan(base, monkeypatch, capsys, run_script):
    """run_plan("--minutes=10") -> its rows, its text; by default of a set too large to be memorised."""
    make_data()
    monkeypatch.setattr(bench, "take_turn", fake_turn)

    def run(*args, num_images=10**9):
        fake_turn.depths = []
        monkeypatch.setattr("nanodiff.data.dataset.open_dataset", lambda *args: range(num_images))
        rows = [*run_script("plan", "--data=tiny", *args)["rows"].values()]
        return rows, capsys.readouterr().out

    return run


def test_a_row_takes_the_minutes_and_counts_tokens_per_parameter(run_plan):
    rows, _ = run_plan("--minutes=60")
    for row in rows:
        images = row["steps"] * row["batch"]
        seconds = (images + 4 * 4000) / row["images/s"] + 10  # four checks
        assert seconds == pytest.approx(3600, rel=0.01)
        assert row["tokens/parameter"] == images * (8 // row["patch"]) ** 2 / row["parameters"]


@pytest.mark.parametrize("minutes", [60, 300, 900, 3000])
def test_the_deepest_whole_model_is_recommended(run_plan, minutes):
    rows, text = run_plan(f"--minutes={minutes}")
    command = re.search(r"^python3 -m .* --depth=(\d+) .*=(\d+) --total_batch_size=(\d+) ", text, re.M)
    depth, steps, batch = map(int, command.groups())
    (best,) = [row for row in rows if row["depth"] == depth]
    assert best["steps"] == steps
    assert best["batch"] == batch
    assert best["tokens/parameter"] >= WHOLE
    assert best["tokens/parameter"] * (depth / (depth + 1)) ** 6 < 1.1 * WHOLE  # the next one would not be
    assert len(rows) <= 5


def test_what_does_not_run_is_said(run_plan):
    _, text = run_plan("--minutes=60000")
    assert fake_turn.depths == [4, 8, 12]  # at first twice the last
    assert "depth 12 does not run here: not even one image" in text
    assert "--depth=8 " in text


def test_twice_the_minutes_are_twice_the_images(run_plan):
    short, _ = run_plan("--minutes=1000")
    long, _ = run_plan("--minutes=2000")
    assert long[0]["epochs"] == pytest.approx(2 * short[0]["epochs"], rel=0.02)


def test_too_little_time_and_too_few_images_are_said(run_plan):
    _, text = run_plan("--minutes=0.1")
    assert "none gets 8 tokens per parameter: give more minutes" in text
    assert "--num_iterations=1 " in text
    rows, text = run_plan("--minutes=600", num_images=2)
    assert max(row["epochs"] for row in rows) < 440
    assert "none gets 8 tokens per parameter" in text
    assert "few images for 600 minutes" in text


def test_several_ranks_are_started_by_torchrun(run_plan):
    rows, text = run_plan("--minutes=60", "--ranks=3")
    assert "torchrun --standalone --nproc_per_node=3 -m scripts.base_train" in text
    for row in rows:
        assert row["batch"] % 3 == 0


def test_none_is_started_within_torchrun(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    refused("without torchrun", bench.take_turn, "--depth=1", 1)
