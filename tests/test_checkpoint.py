"""A checkpoint is whole or not there, a corrupt one is skipped, and none runs code."""

import errno
import json
import os
import signal
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from conftest import refused
from processes import FORK, Started

from nanodiff.files import load_tensors, why_corrupt, writing
from nanodiff.safetensors import load_safetensors
from nanodiff.training import checkpoint
from nanodiff.training.checkpoint import Saver, find_checkpoint, list_checkpoints, load_meta, lock_run, save_checkpoint

META = dict(
    step=0,
    config={"lr": 1e-3},
    arch="dit",
    model_config={},
    data={},
    ema_rates=[0.999],
    loop={"step": 0},
)


def tensors(value=1.0):
    w = torch.full((100, 7), value)
    state = {"w": {"step": 3, "m": torch.arange(5)}}
    return {
        "model": {"w": w, "half": torch.ones(3, dtype=torch.bfloat16)},
        "ema_0.999": {"w": w / 2},
        "optim": {"state": state, "groups": [("w", 0.5), None]},
    }


def save(run_dir, step, keep=-1):
    return save_checkpoint(run_dir, step, tensors(step), META | {"step": step}, keep)


def steps(run_dir):
    return [step for step, _ in list_checkpoints(run_dir)]


def test_round_trip(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("hashlib.file_digest", None)  # hashed while it is written: nothing is read again
        path = save(tmp_path, 500)
    assert path.name == "step_000500"
    assert why_corrupt(path) == ""
    assert load_meta(path) == META | {"step": 500}
    model = load_safetensors(path / "model.safetensors")[0]
    assert torch.equal(model["w"], torch.full((100, 7), 500.0))
    assert model["half"].dtype == torch.bfloat16
    assert load_tensors(path / "optim.pt")["groups"] == [("w", 0.5), None]
    assert find_checkpoint(tmp_path) == path
    assert find_checkpoint(tmp_path, 500) == path
    assert find_checkpoint(tmp_path / "another run") is None
    refused("no checkpoint of step 7; it has: 500", find_checkpoint, tmp_path, 7)


def test_a_full_disk_leaves_earlier_checkpoints(tmp_path, monkeypatch):
    save(tmp_path, 1)
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(checkpoint, "write_json", Mock(side_effect=full))
    refused("step_000002: No space left on device; earlier checkpoints are intact", save, tmp_path, 2)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000001"]


@pytest.mark.parametrize("moment", ["first tensor", "manifest", "rename"])
def test_kill_9_within_a_save(tmp_path, moment):
    save(tmp_path, 1)

    def save_until_killed():
        kill = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
        if moment == "rename":
            os.rename = kill
        elif moment == "manifest":
            write = checkpoint.write_json
            checkpoint.write_json = lambda path, *data: (kill if path.name == "manifest.json" else write)(path, *data)
        else:

            def write_half(value, file):
                file.write(b"half of it")
                file.flush()
                kill()

            torch.save = write_half
        saver = Saver()
        saver.start(tmp_path, 2, tensors(), META)  # in a thread, as in training
        saver.wait()

    assert Started(save_until_killed, context=FORK).wait().returncode == -signal.SIGKILL
    assert steps(tmp_path) == [1]
    assert find_checkpoint(tmp_path).name == "step_000001"
    lock_run(tmp_path).close()  # clears away what was left
    save(tmp_path, 2)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step_000001", "step_000002"]


def flip_a_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "truncated": lambda p: os.truncate(p, p.stat().st_size - 1),
    "emptied": lambda p: os.truncate(p, 0),
    "bit": flip_a_bit,
    "missing": Path.unlink,
}
FILES = ["model.safetensors", "ema_0.999.safetensors", "optim.pt", "meta.json", "manifest.json"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_corrupt_checkpoint_is_reported_and_skipped(tmp_path, capsys, name, damage):
    good = save(tmp_path, 1)
    bad = save(tmp_path, 2)
    DAMAGE[damage](bad / name)
    assert find_checkpoint(tmp_path) == good
    (line,) = capsys.readouterr().out.splitlines()
    # A bit of the manifest may be one of a hash, whose file then seems to be the damaged one
    assert str(bad) in line, line
    if not (name == "manifest.json" and damage == "bit"):
        assert name in line, line
    refused("no intact checkpoint", find_checkpoint, tmp_path, 2)
    DAMAGE[damage](good / name)
    refused("no intact checkpoint", find_checkpoint, tmp_path)


class Evil:
    def __reduce__(self):
        return os.mkdir, ("executed",)


def test_other_files_are_refused_and_nothing_is_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"w": torch.ones(3), "evil": Evil()}, "evil.pt")  # the line has no word on how to trust it
    refused(r"evil\.pt((?!weights_only).)*mkdir((?!weights_only).)*$", load_tensors, Path("evil.pt"))
    assert not Path("executed").exists()
    for content in (b"", b"hello", b"PK\x03\x04", b"\x80\x04.", bytes(100)):
        (tmp_path / "a.pt").write_bytes(content)
        refused("a.pt cannot be loaded", load_tensors, tmp_path / "a.pt")
    refused("no such file", load_tensors, tmp_path / "missing.pt")


def test_retention_counts_whole_checkpoints_only(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    DAMAGE["truncated"](tmp_path / "checkpoints" / "step_000002" / "model.safetensors")
    (tmp_path / "checkpoints" / "step_000003" / "optim.pt").unlink()
    save(tmp_path, 4, keep=2)
    assert steps(tmp_path) == [1, 2, 3, 4]  # 1 is the second newest that can be used
    save(tmp_path, 5, keep=2)
    assert steps(tmp_path) == [4, 5]
    save(tmp_path, 3, keep=1)  # a run went on from an earlier step: later ones are there from before
    assert steps(tmp_path) == [3, 4, 5]


def test_a_checkpoint_that_adapters_need_stays(tmp_path):
    """Whatever letters its run's name has."""
    base = tmp_path / "größe"
    adapted = tmp_path / "adapted"
    base.mkdir()
    adapted.mkdir()
    save(base, 1)
    meta = META | {"lora": {"base": "größe,step=1,ema=0.999"}}
    save_checkpoint(adapted, 1, tensors(), meta)
    for step in (2, 3):
        save(base, step, keep=1)
    assert steps(base) == [1, 3]


def test_one_trainer_at_a_time(tmp_path):
    def hold():
        with lock_run(tmp_path / "run"):
            (tmp_path / "ready").touch()
            time.sleep(100)

    other = Started(hold, context=FORK)
    while not (tmp_path / "ready").exists():
        time.sleep(0.01)
    refused(r"another process is training in .*run", lock_run, tmp_path / "run")
    other.kill()
    lock_run(tmp_path / "run").close()  # the system gave it back
    refused(r"cannot write to .*ready", lock_run, tmp_path / "ready")


def test_a_start_clears_away_what_a_killed_process_left(tmp_path, monkeypatch, capsys):
    names = ("config.json", "report.html", "samples/step_000001.png")
    others = {tmp_path / ".0123.parts", tmp_path / "metrics.jsonl"}  # of a `sample` that draws; our own
    temporary = {(tmp_path / name).with_name(f".{Path(name).name}.x1y2") for name in names}
    for path in others | temporary:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    (tmp_path / "checkpoints" / ".step_000001.tmp-x1y2").mkdir(parents=True)
    with monkeypatch.context() as patch:  # a file system without locks: whose they are is not known
        patch.setattr("fcntl.flock", Mock(side_effect=OSError(95, "not supported")))
        lock_run(tmp_path).close()
    assert "cannot be locked (not supported)" in capsys.readouterr().out
    assert len([*tmp_path.rglob(".*x1y2")]) == 4
    lock_run(tmp_path).close()
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == others | {tmp_path / ".lock"}
    assert not [*tmp_path.rglob(".*x1y2")]


def test_a_run_moved_while_it_trains_ends_in_one_line(tmp_path):
    (tmp_path / "run").mkdir()
    save(tmp_path / "run", 1)
    with pytest.raises(ValueError, match="the cause"), writing(tmp_path / "run" / "a"):
        (tmp_path / "run").rename(tmp_path / "moved")
        raise ValueError("the cause")
    refused(r"cannot write .*run/", save, tmp_path / "run", 2)
    assert not (tmp_path / "run").exists()
    assert steps(tmp_path / "moved") == [1]


def test_going_back(tmp_path, monkeypatch):
    """Steps 20 and 40 are saved. A resumed run's log ends with its own checkpoint."""
    for step in (20, 40):
        save(tmp_path, step)
    (tmp_path / "checkpoints" / "step_000020_backup").mkdir()
    log = tmp_path / "metrics.jsonl"
    losses = {
        10: 1.0,
        20: 0.5,
        30: 0.6,
        40: 40.0,
        50: 1e9,
    }
    lines = [json.dumps({"step": step, "train/loss": loss}) + "\n" for step, loss in losses.items()]
    log.write_text("".join(lines) + '{"step": 50, "val/loss": 2.0}\n{"step": 60, "tr')
    assert "(saved: 20, 40)" in checkpoint.way_back(tmp_path)
    for step, kept in (
        (50, 5),
        (40, 4),
        (20, 2),
    ):
        checkpoint.trim_metrics(log, step)
        assert log.read_text() == "".join(lines[:kept])
    for place, name in (
        (checkpoint.tempfile, "mkdtemp"),
        (checkpoint.shutil, "copy"),
        (checkpoint.Path, "rename"),
    ):
        with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):  # killed there
            patch.setattr(place, name, lambda *args, **more: 1 / 0)
            checkpoint.go_back(tmp_path, 20)
        assert steps(tmp_path) == [20, 40]
        assert log.read_text() == "".join(lines[:2])
    assert checkpoint.go_back(tmp_path, 20)
    assert steps(tmp_path) == [20]
    assert not checkpoint.go_back(tmp_path, 20)
