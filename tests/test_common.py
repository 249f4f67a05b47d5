"""The ground floor: seeds that mean something, files that are whole, mistakes of one line, signals."""

import errno
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import ROOT, refused
from processes import FORK, Started, on_ranks

from nanodiff import common
from nanodiff.common import (
    BLOCK,
    LostRank,
    UserError,
    at,
    base_dir,
    draw_rows,
    excepthook,
    in_batches,
    make_generator,
    print0,
)
from nanodiff.data import dataset
from nanodiff.device import init_device
from nanodiff.dist import Stopped, StopSignal, collective, gather_batches, leave_together, stop_signal
from nanodiff.files import reading, write_atomic, writing

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def draw(*key):
    return torch.rand(4, generator=make_generator(*key))


def test_a_generator_is_a_function_of_its_key():
    torch.manual_seed(1)
    first = draw(3, 5)
    torch.manual_seed(2)
    assert torch.equal(first, draw(3, 5))
    assert torch.equal(first, draw(np.int64(3), 5))
    keys = [
        (3, 5),
        (5, 3),
        (3,),
        (0, 0),
        (0, 1),
        (2**32 + 3, 5),
        (3, 2**32 + 5),
        (2**63, 1),
    ]
    drawn = {tuple(draw(*key).tolist()) for key in keys}
    assert len(drawn) == len(keys)  # every part counts, however large


def test_any_rows_of_a_draw_are_those_of_the_whole(monkeypatch):
    """So that the noise depends neither on the ranks nor on the micro-batches; and no rank draws the whole."""
    whole = draw_rows((42, 7, 1), 0, "cpu", torch.empty(3 * BLOCK, 2, 5))
    assert abs(float(whole.mean())) < 0.15
    assert abs(float(whole.std()) - 1) < 0.15
    assert len(whole.flatten(1).unique(dim=0)) == 3 * BLOCK
    for key in (
        (42, 7),
        (42, 7, 2),
        (42, 8, 1),
        (43, 7, 1),
    ):
        assert not torch.equal(draw_rows(key, 0, "cpu", whole[:3]), whole[:3])
    honest = torch.randn
    drawn = []

    def randn(n, *shape, **options):
        drawn.append(n)
        return honest(n, *shape, **options)

    monkeypatch.setattr(torch, "randn", randn)
    for first, count in (
        (5, 4),
        (BLOCK - 1, 2),
        (BLOCK, BLOCK),
        (3, 2 * BLOCK),
    ):
        drawn.clear()
        rows = draw_rows((42, 7, 1), first, "cpu", whole[:count])
        assert torch.equal(rows, whole[first : first + count])
        assert sum(drawn) < count + 2 * BLOCK


MISTAKE = "from nanodiff.common import UserError\nraise UserError('lr=x\\nis wrong')"


@pytest.mark.parametrize(
    "code, ended, said",
    [
        (f"import scripts\n{MISTAKE}", 2, "error: lr=x is wrong\n"),
        (MISTAKE, 1, "Traceback(.|\n)*"),  # a library leaves its user's hook
        (
            f"import sys\nsys.stdout, sys.stderr = sys.stderr, None\nimport scripts\n{MISTAKE}",
            2,
            "error: lr=x is wrong\n",
        ),
        (
            "import sys\nsys.stdout = sys.stderr = None\nimport scripts\n"
            "from nanodiff.common import Progress\nProgress(1, 'step', '')\nsys.exit(7)",
            7,
            "",
        ),
        ("import scripts\nraise KeyboardInterrupt", 130, "stopped by Ctrl-C\n"),  # before torch
        ("import scripts\nimport nanodiff.common\nraise KeyboardInterrupt", 130, "stopped by Ctrl-C\n"),
    ],
)
def test_a_mistake_or_ctrl_c_before_the_loop_is_one_line(code, ended, said):
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == ended
    assert done.stdout == ""
    assert re.fullmatch(said, done.stderr)


def test_errors_of_the_machine_are_one_line_with_advice(capsys):
    with pytest.raises(RuntimeError) as no_memory:
        torch.empty(10**15)
    for error, code, advice in (
        (OSError(errno.ENOSPC, "No space left on device", "runs/a"), 2, "runs/a; completed files are intact"),
        (OSError(errno.EISDIR, "Is a directory", "a/.x.tmp", None, "a/x"), 2, "Is a directory: a/x; completed files"),
        (FloatingPointError("step 5: loss\nnan"), 1, "step 5: loss nan"),
        (torch.OutOfMemoryError("CUDA out of memory"), 1, "lower --device_batch_size"),
        (no_memory.value, 1, "lower --device_batch_size"),
    ):
        with pytest.raises(SystemExit, match=str(code)):
            excepthook(type(error), error, None)
        assert re.fullmatch(rf"error: .*{advice}.*\n", capsys.readouterr().err)


FAULTS = [MemoryError(), RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")]
FAULTS += [OSError(getattr(errno, code), code) for code in ("EIO", "ESTALE", "EMFILE", "EACCES", "ENOSPC")]


@pytest.mark.parametrize("fault", FAULTS, ids=repr)
def test_a_fault_of_the_machine_is_no_damaged_file(fault):
    with pytest.raises(OSError, match="a.json") as error, reading("a.json"):
        raise fault
    assert error.value.errno == getattr(fault, "errno", errno.ENOMEM)


def test_a_verifier_whose_machine_fails_does_not_blame_the_file(base, monkeypatch):
    faults = []
    shapes = dataset.open_dataset("shapes")
    for fault in (MemoryError(), OSError(errno.EIO, "EIO")):
        monkeypatch.setattr(dataset, "sha256_of", Mock(side_effect=fault))
        errors = dataset.start_verifying(shapes)
        while not errors:
            time.sleep(0.01)
        faults += errors
    assert [fault.errno for fault in faults] == [errno.ENOMEM, errno.EIO]
    for error in faults:
        assert str(error.filename).endswith(".npy")


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch, failing):
    path = tmp_path / "a.json"
    write_atomic(path, b"old")
    with monkeypatch.context() as patch, pytest.raises(OSError, match="no luck"):
        patch.setattr(os, failing, Mock(side_effect=OSError("no luck")))
        write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o644  # not the 0o600 of a temporary file


def test_a_signal_that_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop = StopSignal()
    others = {number: signal.getsignal(number) for number in SIGNALS if number != signal.SIGHUP}
    stop.listen()
    os.kill(os.getpid(), signal.SIGHUP)
    for number, handler in (others | {signal.SIGHUP: before}).items():
        signal.signal(number, handler)
    assert stop.agree() == 0


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_asks_its_echo_does_nothing_and_a_later_one_ends(number):
    """A launcher's echo comes within ten seconds, that of a person's Ctrl-C within one."""

    def run():
        signal.signal(number, signal.SIG_DFL)  # not ignored, as for jobs in the background
        stop = StopSignal()
        stop.listen()
        echo_s = 1 if number == signal.SIGINT else 10
        for age_s in (0, 0.7 * echo_s, 1.1 * echo_s):
            stop.since = time.monotonic() - age_s
            os.kill(os.getpid(), number)
            time.sleep(0.01)
            assert stop.agree() == number  # and it goes on
            print(age_s, flush=True)

    done = Started(run, context=FORK).wait()
    assert done.returncode == 128 + number
    assert len(done.stdout.splitlines()) == 2
    said = f"{number.name}: dropping this step or evaluation, then saving and leaving; Ctrl-C kills\n"
    assert done.stderr == said  # at once, not when the step is over


def signal_in_a_batch(rank):
    """Ten batches on two ranks. Rank 1 gets a signal in its second; [batches begun, whether all were dropped]."""
    init_device("cpu")
    begun = []

    def compute(ids):
        begun.append(int(ids[0]))
        if begun == [1, 3]:
            os.kill(os.getpid(), signal.SIGTERM)
            begun.append("never")  # not reached: at once, not after the batch
        time.sleep(0.2 * (rank == 0))

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    stop_signal.listen()
    try:
        gather_batches(compute, in_batches(np.arange(10), 1), "images")
    except Stopped:
        pass
    leave_together()
    return begun, stop_signal.is_stopping


def test_a_signal_to_one_rank_ends_the_batches_of_all():
    (others, number), (own, same) = on_ranks(signal_in_a_batch)
    assert own == [1, 3]
    assert number == signal.SIGTERM
    assert same == signal.SIGTERM
    assert 8 not in others  # of 0, 2, 4, 6, 8: until its next batch, without a wait for the last


def test_errors_within_a_collective():
    """The innermost one is named."""
    lost = "[/gloo/transport/tcp/pair.cc:1] Connection closed by peer"
    named = "rank 0 of 1: the vote failed after .*: Conn"
    with pytest.raises(LostRank, match=named) as error, collective("the step"), collective("the vote"):
        raise RuntimeError(lost)
    assert "the step" not in str(error.value)
    with pytest.raises(RuntimeError, match="^out of memory$"), collective("the vote"):
        raise RuntimeError("out of memory")


def test_names_do_not_command_the_terminal(capsys):
    print0("a\x1b[2J\x9b1mé\tb\r\n\udcff.png")
    assert capsys.readouterr().out == "a?[2J?1mé\tb?\n?.png\n"
    with pytest.raises(SystemExit):
        excepthook(UserError, UserError("\x1b]0;title\x07"), None)
    assert capsys.readouterr().err == "error: ?]0;title?\n"


def test_progress_without_a_reader_ends_no_run(monkeypatch):
    terminal = Mock(write=Mock(side_effect=BrokenPipeError))
    monkeypatch.setattr(sys, "stderr", terminal)
    with common.Progress(2, "images", "grid") as bar:
        bar.pause = 0
        bar.update(1)
    monkeypatch.undo()
    assert terminal.write.called


def test_one_is_singular():
    counts = [common.count(n, "class", "classes") for n in (0, 1, 2000)]
    assert counts == ["0 classes", "1 class", "2,000 classes"]


def test_a_terminal_without_the_letters_of_a_name_shows_others():
    done = subprocess.run(
        [sys.executable, "-c", "import scripts; print('a\u72d7')"],
        env=os.environ | {"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.stdout == "a?\n"
    assert done.stderr == ""


def test_without_a_home_no_folder_is_called_home(monkeypatch):
    """Nor for a path that a user gives; another user's, if unknown, may be a file's name."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("NANODIFF_BASE_DIR", raising=False)
    monkeypatch.setattr("pwd.getpwuid", Mock(side_effect=KeyError))
    refused("^~/.cache/nanodiff: this user has no home folder; .* NANODIFF_BASE_DIR$", base_dir)
    refused("^~/a.png: this user has no home", at, "~/a.png")
    assert at("~nobody-here/a") == Path("~nobody-here/a")
    assert at("") == Path()


def test_a_reader_that_goes_away_ends_nothing(run_script):
    """It leaves after one line of a fork that prints to it."""
    count = lambda: [print0(i) for i in range(20_000)]
    for work, first, code in (
        (count, "0\n", 7),
        (lambda: run_script("base_train", "--help"), "usage: ", 0),
    ):
        reader, writer = os.pipe()

        def run(work=work, reader=reader, writer=writer):
            os.close(reader)
            os.dup2(writer, 1)
            work()
            sys.exit(7)

        running = Started(run, context=FORK)
        os.close(writer)
        with open(reader) as pipe:
            assert pipe.readline().startswith(first)
        assert running.wait().returncode == code


def test_what_a_killed_write_left_goes_with_the_next(tmp_path):
    """But not what another is writing."""
    (tmp_path / ".a.tmp-killed").write_bytes(b"x")
    with writing(tmp_path / "a") as file:
        file.write(b"later")
        write_atomic(tmp_path / "a", b"earlier")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_bytes() == b"later"
