"""The bench measures what it says: runs of base_train in turn, beside the published recipe."""

import sys

import pytest
from conftest import refused
from tiny_runs import make_data

from scripts import bench

SMALL = (
    "--data=tiny --patch_size=8 --batch_sizes=2 --rounds=2 --steps=1 --depths=1 --compiles=False --dtypes=float32 "
    "--device_type=cpu"
).split()  # fmt: skip


def fake_turn(arm):
    """In place of a run: each step takes a millisecond more than the last."""
    fake_turn.arms.append(arm)
    lines = [{"train/dt_ms": float(len(fake_turn.arms) + i), "train/mfu": 1.0} for i in range(bench.WARM_UP + 1)]
    return {"lines": lines, "memory_gb": 1.0}


@pytest.fixture
def run_bench(base, monkeypatch, capsys):
    """run_bench("--archs=dit") -> its rows; if real, its text."""
    make_data()
    before = dict(vars(bench))  # main overrides the settings
    fake_turn.arms = []

    def run(*args, real=False):
        for name, value in before.items():
            monkeypatch.setattr(bench, name, value)
        if not real:
            monkeypatch.setattr(bench, "take_turn", fake_turn)
        monkeypatch.setattr(sys, "argv", ["bench", *SMALL, *args])
        rows = bench.main()
        return capsys.readouterr().out if real else rows

    return run


def test_every_combination_beside_its_reference_in_turns(run_bench):
    rows = run_bench("--archs=dit", "--depths=1,2", "--batch_sizes=1,2", "--optimizers=adamw,muon")
    ours = [row for row in rows if not row["reference"]]
    assert len({row["what"] for row in ours}) == len(ours) == 2 * 2 * 2
    assert len(rows) - len(ours) == 2 * 2  # a reference per depth and batch size
    assert fake_turn.arms == 2 * [{name: row[name] for name in fake_turn.arms[0]} for row in rows]
    for row in rows:
        if row["reference"]:
            reference = row
            assert (row["arch"], row["dtype"], row["optimizer"]) == ("dit_classic", "float32", "adamw")
        assert (row["depth"], row["batch_size"]) == (reference["depth"], reference["batch_size"])
        assert row["ratio"] == pytest.approx(row["images_per_sec"] / reference["images_per_sec"])
        assert row["images_per_sec"] == pytest.approx(1000 * row["batch_size"] / row["step_ms"])
        assert row["max_ms"] - row["min_ms"] == len(rows) and row["step_ms"] == (row["min_ms"] + row["max_ms"]) / 2


def test_a_backbone_has_its_own_reference_or_the_first_arm_is_the_measure(run_bench):
    rows = run_bench("--archs=dit,unet,dit_classic", "--rounds=1")
    order = [("dit_classic", True), ("dit", False), ("unet", True), ("unet", False), ("dit_classic", False)]
    assert [(row["arch"], row["reference"]) for row in rows] == order
    assert rows[4]["ratio"] == rows[4]["images_per_sec"] / rows[0]["images_per_sec"]
    rows = run_bench("--archs=dit", "--optimizers=adamw,muon", "--reference=False", "--rounds=1")
    assert [row["ratio"] for row in rows] == [row["images_per_sec"] / rows[0]["images_per_sec"] for row in rows]


def test_runs_of_base_train_and_the_table(run_bench):
    text = run_bench("--archs=dit", "--rounds=1", real=True)
    heads = next(line.split() for line in text.splitlines() if line.endswith("  what"))
    assert {"images_per_sec", "ratio", "first_step_s", "step_ms", "memory_gb", "mfu"} <= {*heads}
    assert text.count(", reference") == 1


def test_a_run_that_fails_ends_the_bench(run_bench):
    refused("patch_size=3; accepted", run_bench, "--archs=dit", "--patch_size=3", real=True)
    refused("depth='x' is not accepted", run_bench, "--archs=dit", "--depths=x", real=True)
