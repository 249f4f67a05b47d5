"""Shared by the tests: a base folder of their own, and scripts run within this process."""

import gc
import json
import multiprocessing
import os
import runpy
import signal
import socket
import sys
from pathlib import Path

import pytest
from processes import run_process

from configurator import configure

ROOT = Path(__file__).resolve().parents[1]
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: on a busy machine its threads wait for each other

import torch  # noqa: E402


def golden(name):
    """Figures of a published implementation: the JSON of tests/golden/`name`, whose README says what they are."""
    return json.loads((ROOT / "tests" / "golden" / name).read_text())


@pytest.fixture
def base(tmp_path, monkeypatch):
    """An empty $NANODIFF_BASE_DIR."""
    monkeypatch.setenv("NANODIFF_BASE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def run_script(monkeypatch):
    """run_script("base_train", "--depth=1") runs scripts/base_train.py here; returns the globals it ended with."""

    def run(name, *args):
        monkeypatch.setattr(sys, "argv", [name, *map(str, args)])
        monkeypatch.setattr("nanodiff.device.measured_peak", lambda device, dtype: 1e11)  # which takes 0.2 s
        done = runpy.run_module(f"scripts.{name}", run_name="__main__")
        if done.get("lock"):
            done["lock"].close()  # as the end of the process would
        return done

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)
    gc.enable()  # base_train puts it off
    gc.unfreeze()


@pytest.fixture
def on_ranks(tmp_path):
    """on_ranks(work) -> [work(rank) of both ranks], in forks of this process, which start at once."""
    import torch

    def run(work, world=2):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]

        def live(rank):
            torch.set_num_threads(1)
            told = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
            os.environ.update({name: str(value) for name, value in told.items()})
            torch.save(work(rank), tmp_path / f"rank{rank}")

        fork = multiprocessing.get_context("fork")
        ranks = [fork.Process(target=live, args=(rank,)) for rank in range(world)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(120)
        assert [rank.exitcode for rank in ranks] == [0] * world
        return [torch.load(tmp_path / f"rank{rank}", weights_only=True) for rank in range(world)]

    return run


def base_train_settings(*argv):
    """The settings of scripts/base_train.py with presets and arguments, without running it."""
    path = ROOT / "scripts" / "base_train.py"
    head = path.read_text().split("config = configure(globals())")[0]
    names = {"__file__": str(path)}
    exec(compile(head, str(path), "exec"), names)
    return configure(names, list(argv))


def command(name, *args, ranks=1):
    """The command line of a script, under torchrun for several ranks."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    return [sys.executable, *launcher, "-m", f"scripts.{name}", *map(str, args)]


def run_ranks(run_script, name, *args, ranks=2):
    """Run a script on several ranks, forks of this process, which import nothing; as a user would where none can be."""
    if sys.platform != "linux" or torch.cuda.is_available():
        return run_process(name, *args, ranks=ranks)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        env = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=free.getsockname()[1])
    pids = []
    for rank in range(ranks):
        pids.append(os.fork())
        if pids[-1] == 0:
            env |= dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks)
            os.environ.update({key: str(value) for key, value in env.items()})
            code = 1
            try:
                run_script(name, *args)
                code = 0
            finally:
                os._exit(code)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * ranks


def children(pid):
    """The processes that a process has started, and theirs."""
    own = [
        int(child) for task in Path(f"/proc/{pid}/task").glob("*") for child in (task / "children").read_text().split()
    ]
    return own + [grandchild for child in own for grandchild in children(child)]


def kill_all(process):
    """kill -9 to a Popen and all below it: torchrun's workers are in sessions of their own."""
    for pid in (process.pid, *children(process.pid)):
        os.kill(pid, signal.SIGKILL)
    process.wait()
