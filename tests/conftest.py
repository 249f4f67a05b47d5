"""Shared by the tests: a base folder of their own, and scripts run within this process."""

import gc
import json
import os
import re
import runpy
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from configurator import configure

ROOT = Path(__file__).resolve().parents[1]
os.environ["OMP_NUM_THREADS"] = "1"  # before torch: threads hang in forks, and wait on a busy machine
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs and their children ignore it


def golden(name):
    """Figures of a published implementation: the JSON of tests/golden/`name`, whose README says what they are."""
    return json.loads((ROOT / "tests" / "golden" / name).read_text())


def refused(line, call, *args, **settings):
    """call(*args, **settings) ends with a UserError: one line, which the pattern `line` finds."""
    from nanodiff.common import UserError

    with pytest.raises(UserError, match=line) as error:
        call(*args, **settings)
    message = str(error.value)
    del error  # whose frames hold what the call has opened, such as the lock of a run
    assert "\n" not in message


@pytest.fixture
def base(tmp_path, monkeypatch):
    """An empty $NANODIFF_BASE_DIR."""
    monkeypatch.setenv("NANODIFF_BASE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """A base folder with the sets tiny and large, and a run of each kind of tiny_runs. Tests write to copies of it."""
    from processes import run_process
    from tiny_runs import make_runs

    base = tmp_path_factory.mktemp("made")
    run_process(make_runs, NANODIFF_BASE_DIR=str(base))
    return base


@pytest.fixture
def run_dir(base, made):
    """The newest run, "flow", in a copy of them that is $NANODIFF_BASE_DIR."""
    shutil.copytree(made, base, dirs_exist_ok=True)
    return base / "runs" / "flow"


@pytest.fixture
def run_script(monkeypatch):
    """run_script("base_train", "--depth=1") runs scripts/base_train.py here; returns the globals it ended with."""

    def run(name, *args):
        monkeypatch.setattr(sys, "argv", [name, *map(str, args)])
        monkeypatch.setattr("nanodiff.device.measured_peak", lambda device, dtype: 1e11)  # which takes 0.2 s
        monkeypatch.setattr("nanodiff.dist.stop_signal.number", 0)  # as in a new process
        monkeypatch.setattr("nanodiff.dist.stop_signal.is_stopping", 0)
        done = runpy.run_module(f"scripts.{name}", run_name="__main__")
        if done.get("lock"):
            done["lock"].close()  # as the end of the process would
            done["print0"].file = None
        return done

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
    handlers = {number: signal.getsignal(number) for number in numbers}
    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)
    gc.enable()  # base_train puts it off
    gc.unfreeze()


@pytest.fixture
def draw(run_script, tmp_path):
    """draw("--model=a", ...) -> (images (N, H, W, C), labels (N,), protocol) of scripts/sample.py, out of drawn.npz."""

    def run(*args):
        out = tmp_path / "drawn"
        Path(f"{out}.npz").unlink(missing_ok=True)  # a finished file is never replaced
        timeless = ("--dtype=float32", "--device_type=cpu")
        run_script("sample", *timeless, "--npz", "--steps=3", f"--out={out}", *args)
        with np.load(f"{out}.npz") as file:
            return file["arr_0"], file["labels"], json.loads(str(file["protocol"]))

    return run


def script_settings(name, *argv):
    """The settings of a script with presets and arguments, without running it."""
    path = ROOT / "scripts" / f"{name}.py"
    head = re.split(r"\n(?:config = )?configure\(globals\(\)", path.read_text())[0]
    names = {"__file__": str(path)}
    exec(compile(head, str(path), "exec"), names)
    return configure(names, list(argv), modules=names.get("MODULES", ()))
