"""Scripts and functions in processes of their own.

They are forks of a server that has imported torch and the package, so that a start takes 0.3 s, not 4. With
`context=FORK` they are forks of the test itself: only these can run a closure, or see what it has patched; where there
is a GPU none can train.
"""

import contextlib
import multiprocessing
import os
import pickle
import runpy
import socket
import sys
import tempfile
import time
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from subprocess import CompletedProcess

import scripts  # noqa: F401 (its excepthook)
from nanodiff import device

FORK = multiprocessing.get_context("fork")
CONTEXT = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
PRELOADED = ["torch.fx.experimental.symbolic_shapes"]  # imported on the first model
PRELOADED += ["nanodiff.sampling.draw", "nanodiff.training.shard", "nanodiff.web.report"]  # import most of the package
CONTEXT.set_forkserver_preload(["torch", "pytest", *PRELOADED])
ROOT = Path(__file__).parents[1]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as s:
        return str(s.getsockname()[1])


def run_as_main(program, args, env, files, before):
    """In the new process: what `python3 -m scripts.program` does, after `before()`; or program(*args)."""
    os.environ.clear()
    os.environ.update(env)
    for number, file in zip((1, 2), files):
        os.dup2(os.open(file, os.O_WRONLY | os.O_APPEND), number)
    sys.stdout = open(1, "w")
    sys.stderr = open(2, "w", buffering=1)  # in a fork of a test they are pytest's
    device.measured_peak = lambda *_: 1e11  # which takes 0.2 s
    try:
        if before:
            before()
        if callable(program):
            program(*args)
        else:
            sys.argv = [program, *map(str, args)]
            runpy.run_module(f"scripts.{program}", run_name="__main__", alter_sys=True)
    except (Exception, KeyboardInterrupt):
        sys.excepthook(*sys.exc_info())
        sys.exit(1)


class Started:
    """A running script, or function. `ranks`: as torchrun starts it. `before()` runs ahead of it."""

    def __init__(self, program, *args, ranks=0, before=None, context=CONTEXT, **env):
        self.folder = tempfile.TemporaryDirectory()
        self.files = [Path(self.folder.name, name) for name in ("stdout", "stderr")]
        for file in self.files:
            file.touch()
        env = os.environ | env
        if ranks:
            env |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        if CONTEXT.get_start_method() == "forkserver":
            with contextlib.chdir(ROOT):  # else the server, which passes over what it cannot find, lacks the package
                forkserver.ensure_running()
        self.processes = []
        for rank in range(max(ranks, 1)):
            own = env | ({"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks else {})
            task = (program, args, own, self.files, before)
            self.processes.append(context.Process(target=run_as_main, args=task))
            self.processes[-1].start()

    def codes(self):
        """Exit code of each process, None of those that run."""
        return [process.exitcode for process in self.processes]

    def kill(self):
        """kill -9; CompletedProcess with text output and the first error's exit code."""
        code = next(filter(None, self.codes()), 0)
        for process in self.processes:
            process.kill()
            process.join()
        code = code or next(filter(None, self.codes()), 0)
        return CompletedProcess([], code, *(file.read_text() for file in self.files))

    def wait(self, timeout=300):
        """The end of all, or of those that outlive another's error by a second, or its death; CompletedProcess."""
        end = time.monotonic() + timeout
        while None in (codes := self.codes()) and time.monotonic() < end:
            if any(code and code < 0 for code in codes):
                break
            wait([process.sentinel for process in self.processes if process.exitcode is None], 1)
            if any(codes):
                break
        return self.kill()


def run_process(program, *args, check=True, **options):
    """Run a script to its end as a user would; CompletedProcess."""
    done = Started(program, *args, **options).wait()
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def on_ranks(work, ranks=2):
    """[work(rank) of each], in forks of this process."""
    with tempfile.TemporaryDirectory() as folder:

        def keep():
            rank = int(os.environ["RANK"])
            Path(folder, str(rank)).write_bytes(pickle.dumps(work(rank)))

        run_process(keep, ranks=ranks, context=FORK)
        return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(ranks)]
