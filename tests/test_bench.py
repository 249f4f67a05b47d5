"""The bench measures what it says: runs of base_train in turn, the first by default the published recipe."""

import sys

import pytest
from conftest import ROOT, refused
from tiny_runs import TIMELESS, make_data

from scripts import bench

SMALL = " ".join(["--shared=--data=tiny --patch_size=8 --total_batch_size=2 --depth=1 --compile=False", *TIMELESS])


def fake_turn(arguments, num_steps):
    """In place of a run: each step takes a millisecond more than the last."""
    fake_turn.arms.append(arguments.split()[-1])
    times = [float(len(fake_turn.arms) + i) for i in range(bench.WARM_UP + 1)]
    lines = [{"train/dt_ms": ms, "train/images_per_sec": 1000 / ms} for ms in times]
    return {"lines": lines, "memory_gb": 1.0}


@pytest.fixture
def run_bench(base, monkeypatch, capsys):
    """run_bench("--arms=...") -> its rows; if real, its text."""
    make_data()
    before = dict(vars(bench))  # main overrides the settings
    fake_turn.arms = []

    def run(*args, real=False):
        for name, value in before.items():
            monkeypatch.setattr(bench, name, value)
        if not real:
            monkeypatch.setattr(bench, "take_turn", fake_turn)
        monkeypatch.setattr(sys, "argv", ["bench", "--rounds=2", "--steps=1", SMALL, *args])
        rows = bench.main()
        return capsys.readouterr().out if real else rows

    return run


def test_arms_take_turns_and_the_first_is_the_measure(run_bench):
    rows = run_bench("--arms=--depth=1 | --depth=2|--depth=3")
    assert fake_turn.arms == 2 * ["--depth=1", "--depth=2", "--depth=3"]
    for i, row in enumerate(rows):
        assert row["ratio"] == row["images_per_sec"] / rows[0]["images_per_sec"]
        assert row["step_ms"] == 5.5 + i


def test_runs_of_base_train_and_the_table_or_the_first_error(run_bench, base, monkeypatch):
    monkeypatch.chdir(base.parent)
    monkeypatch.setenv("NANODIFF_BASE_DIR", base.name)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # of the runs, started here
    text = run_bench("--rounds=1", real=True)
    heads = next(line.split() for line in text.splitlines() if line.endswith("  what"))
    assert {"images_per_sec", "ratio", "first_step_s", "step_ms", "memory_gb"} <= {*heads}
    assert text.count("published") == 1
    assert text.count("--data=tiny") == 2
    refused("patch_size=3; accepted", run_bench, "--arms=--patch_size=3", real=True)
