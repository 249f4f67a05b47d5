"""The bench measures what it says: arms in turn beside the published recipe."""

import json
import os
import sys
import threading

import pytest

from nanodiff.common import UserError
from scripts import bench

SMALL = (
    "--patch_size=8 --image_size=16 --batch_sizes=2 --rounds=2 --steps=1 --depths=1 "
    "--compiles=False --dtypes=float32 --device_type=cpu --json"
).split()  # fmt: skip


class Threads:
    """In place of a multiprocessing context: threads start faster."""

    Pipe = staticmethod(bench.multiprocessing.Pipe)

    @staticmethod
    def Process(target, args):
        def run():  # its end of the pipe stays open, where a process has its own copy
            target(*args[:1], os_pipe, *args[2:])

        os_pipe = bench.multiprocessing.connection.Connection(os.dup(args[1].fileno()))
        thread = threading.Thread(target=run, daemon=True)
        thread.terminate = lambda: None
        return thread


@pytest.fixture
def run_bench(base, monkeypatch, capsys):
    """run_bench("--archs=dit") -> its JSON, parsed, or what else it prints."""
    before = dict(vars(bench))  # main overrides the settings

    def run(*args):
        for name, value in before.items():
            monkeypatch.setattr(bench, name, value)
        monkeypatch.setattr(sys, "argv", ["bench", *SMALL, *args])
        monkeypatch.setattr(bench.multiprocessing, "get_context", lambda kind: Threads)
        bench.main()
        told = capsys.readouterr()
        return json.loads(told.out)["rows"] if told.out.startswith("{") else told.err + told.out

    return run


def test_every_combination_beside_its_reference(run_bench):
    rows = run_bench("--archs=dit", "--depths=1,2", "--batch_sizes=1,2", "--optimizers=adamw,muon")
    ours = [row for row in rows if not row["reference"]]
    assert len({row["what"] for row in ours}) == len(ours) == 2 * 2 * 2
    assert len(rows) - len(ours) == 2 * 2  # a reference per depth and batch size
    for row in rows:
        if row["reference"]:
            reference = row
            assert (row["arch"], row["dtype"], row["optimizer"]) == ("dit_classic", "float32", "adamw")
        assert (row["depth"], row["batch_size"]) == (reference["depth"], reference["batch_size"])
        assert row["ratio"] == pytest.approx(row["images_per_sec"] / reference["images_per_sec"])
        assert row["images_per_sec"] == pytest.approx(1000 * row["batch_size"] / row["step_ms"])
        assert row["min_ms"] <= row["step_ms"] <= row["max_ms"] and row["memory_gb"] > 0.05


def test_a_backbone_has_its_own_reference_or_the_first_arm_is_the_measure(run_bench):
    rows = run_bench("--archs=dit,unet,dit_classic", "--rounds=1")
    order = [("dit_classic", True), ("dit", False), ("unet", True), ("unet", False), ("dit_classic", False)]
    assert [(row["arch"], row["reference"]) for row in rows] == order
    assert rows[4]["ratio"] == rows[4]["images_per_sec"] / rows[0]["images_per_sec"]
    rows = run_bench("--archs=dit", "--optimizers=adamw,muon", "--reference=False", "--rounds=1")
    assert [row["ratio"] for row in rows] == [row["images_per_sec"] / rows[0]["images_per_sec"] for row in rows]


def test_the_table_and_the_profile(run_bench, tmp_path):
    trace = tmp_path / "trace.json"
    text = run_bench("--archs=dit", "--json=False", f"--profile={trace}")
    heads = next(line.split() for line in text.splitlines() if line.endswith("  what"))
    assert {"images_per_sec", "ratio", "first_step_s", "step_ms", "memory_gb", "mfu"} <= {*heads}
    assert text.count(", reference") == 1 and text.count("profile of a step") == 1
    names = {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"aten::addmm", "aten::_fused_adamw_"} <= names  # of our arm


@pytest.mark.parametrize(
    "arg, fault",
    [
        ("--depths=4,x", "depths='4,x'; accepted: >= 1, comma-separated"),
        ("--depths=1.5", "depths='1.5'; accepted"),
        ("--archs=dit,vit", "archs='dit,vit'; accepted: dit_classic.dit.unet"),
        ("--compiles=yes", "compiles='yes'; accepted: True.False.max"),
    ],
)
def test_mistakes(run_bench, arg, fault):
    with pytest.raises(UserError, match=fault):
        run_bench("--archs=dit", arg)


def test_an_arm_that_dies_ends_the_bench(monkeypatch):
    fork = bench.multiprocessing.get_context("fork")
    monkeypatch.setattr(bench.multiprocessing, "get_context", lambda kind: fork)
    monkeypatch.setattr(bench, "make_step", lambda arm, device: os._exit(7))
    with pytest.raises(UserError, match="process died"):
        bench.measure([{"device_type": "cpu"}])
