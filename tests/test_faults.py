"""Nothing is lost: trainers that are killed, stopped, starved of disk, or spread over other ranks."""

import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from functools import partial

import numpy as np
import pytest
from conftest import ROOT, refused
from processes import Started, free_port, run_process
from tiny_runs import TINY, assert_identical, make_autoencoder, make_data, metrics, weights

from nanodiff import common
from nanodiff.training import checkpoint

TRAIN = [*TINY, "--num_iterations=60", "--log_every=1", "--save_every=2"]


@pytest.fixture(autouse=True)
def data(base):
    make_data()


def everything(base, tag, step=60):
    """What a run has made, without what depends on the clock."""
    columns = ("step", "train/loss", "train/grad_norm")
    lines = [tuple(line[column] for column in columns) for line in metrics(base, tag)]
    return {"weights": weights(base, tag, step), "lines": lines}


def steps_of(base, tag):
    return [line["step"] for line in metrics(base, tag)]


def assert_close(base, tag, other):
    """The losses of eight steps, none twice and none missing, are those of another run, up to rounding."""
    assert steps_of(base, tag) == [*range(1, 9)]
    ours = everything(base, tag, 8)["lines"]
    theirs = everything(base, other, 8)["lines"]
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)


def slow_fsync():
    """Before a script: writing to the disk takes longer, so that more kills hit a save."""
    fsync = os.fsync
    os.fsync = lambda fd: time.sleep(0.02) or fsync(fd)


@pytest.mark.slow
def test_kills_lose_nothing(base, run_script):
    run_script("base_train", *TRAIN, "--model_tag=whole", "--save_every=0")
    checkpoints = base / "runs" / "killed" / "checkpoints"
    rng = random.Random(0)
    in_save = 0
    for kill in range(6):
        running = Started("base_train", *TRAIN, "--model_tag=killed", before=slow_fsync)
        time.sleep(rng.uniform(0.1, 0.7))
        while kill % 2 == 0 and not any(checkpoints.glob(".*")) and running.codes() == [None]:
            time.sleep(0.001)  # half of the kills wait for a save
        running.kill()
        assert running.codes() == [-signal.SIGKILL], "the run ended before it was killed often enough"
        in_save += any(checkpoints.glob(".*"))
    assert in_save >= 2, "too few of the kills hit a save"
    run_script("base_train", *TRAIN, "--model_tag=killed")
    assert steps_of(base, "killed") == [*range(1, 61)]  # none twice, none missing
    assert_identical(everything(base, "killed"), everything(base, "whole"))
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step_000058", "step_000060"]  # nothing half done


def test_a_damaged_shard_ends_the_run_before_it_is_saved(base, run_script):
    shard = base / "data" / "tiny" / "train_images_000.npy"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    damaged = ("base_train", *TRAIN, "--model_tag=damaged", "--save_every=30")
    refused(r"train_images_000\.npy is damaged: its SHA-256 is", run_script, *damaged)
    assert not (base / "runs" / "damaged" / "checkpoints").exists()


SHORT = [*TRAIN, "--num_iterations=8", "--device_batch_size=4"]


def inject(*faults):
    """Before a script: in its n-th attempt a rank sends itself, or torchrun, a signal: (rank, step, name of it)."""
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    own, at, action = faults[attempt] if attempt < len(faults) else ("", 0, "")
    rank = os.environ.get("RANK", "0")
    if attempt and rank == "1":
        time.sleep(3)  # the others are there before it, and shall not take its predecessor's address for its own
    honest = common.make_generator

    def make_generator(*key, **options):  # a step's numbers come from (seed, step)
        if rank == own and key[1:] == (at,):
            to_torchrun = action.endswith(" to torchrun")
            os.kill(os.getppid() if to_torchrun else os.getpid(), getattr(signal, action.split()[0]))
            time.sleep(to_torchrun)  # until it passes it on
        return honest(*key, **options)

    common.make_generator = make_generator


@pytest.mark.slow
@pytest.mark.parametrize(
    "action, timeout, words",
    [
        ("SIGSTOP", 5, "Timed out|timeout"),
        ("SIGKILL", 100, "Connection|Read error"),
    ],
)
def test_a_rank_that_hangs_or_dies_ends_the_others(base, run_script, action, timeout, words):
    """They name what they waited for, within the timeout or at once; the newest checkpoint goes on with fewer ranks."""
    fault = dict(before=partial(inject, ("1", 5, action)), NANODIFF_RANK_TIMEOUT=str(timeout))
    running = Started("base_train", *SHORT, "--model_tag=a", ranks=2, **fault)
    running.processes[0].join(150)
    codes = running.codes()
    err = running.kill().stderr
    last = err.strip().splitlines()[-1]
    assert codes[0] == 1, err
    assert "Traceback" not in err, err
    assert re.search(rf"rank 0 of 2: the reduce-scatter of the gradients failed after [\d.]+ s .*({words})", last)
    assert float(re.search(r"after ([\d.]+) s", last)[1]) < timeout + 5
    run_script("base_train", *SHORT, "--model_tag=a")  # on one rank
    assert steps_of(base, "a") == [*range(1, 9)]


def slow_save(seconds):
    """Before a script: rank 0 saves for longer than the others wait elsewhere."""
    publish = checkpoint.publish_folder
    checkpoint.publish_folder = lambda *paths: time.sleep(seconds) or publish(*paths)


@pytest.mark.slow
def test_nobody_gives_up_waiting_for_a_save(base):
    """Two saves longer than the timeout, the second of them at the end."""
    steps = ("--num_iterations=4", "--save_every=2", "--model_tag=a")
    run_process(
        "base_train",
        *SHORT,
        *steps,
        ranks=2,
        before=partial(slow_save, 5),
        NANODIFF_RANK_TIMEOUT="4",
    )
    assert (base / "runs" / "a" / "checkpoints" / "step_000004" / "manifest.json").exists()


def other_eyes(what):
    """Before a script: another rank does not see the newest checkpoint, or cannot open it once rank 0 has."""
    honest_list = checkpoint.list_checkpoints
    honest = checkpoint.from_first_rank

    def from_first_rank(value, what):
        path = honest(value, what)
        (path / "optim.pt").unlink()
        return path

    if os.environ["RANK"] != "0" and what == "stale":
        checkpoint.list_checkpoints = lambda run_dir: honest_list(run_dir)[:-1]
    elif os.environ["RANK"] != "0":
        checkpoint.from_first_rank = from_first_rank


@pytest.mark.slow
def test_all_ranks_open_the_checkpoint_that_the_first_has_found(base, run_script):
    for tag in ("whole", "a"):
        run_process("base_train", *SHORT, "--num_iterations=4", "--warmdown_ratio=0", f"--model_tag={tag}", ranks=2)
    more = (*SHORT, "--warmdown_ratio=0", "--resume=changed")
    run_process("base_train", *more, "--model_tag=whole", ranks=2)
    run_process("base_train", *more, "--model_tag=a", ranks=2, before=partial(other_eyes, "stale"))
    assert_identical(everything(base, "a", 8), everything(base, "whole", 8))
    done = run_process(
        "base_train",
        *more,
        "--model_tag=a",
        ranks=2,
        check=False,
        before=partial(other_eyes, "gone"),
    )
    line = "error: rank 1 of 2 cannot open .*step_000008, which rank 0 resumes from: no such file: .*optim.pt"
    assert done.returncode, done.stderr
    assert re.search(line, done.stderr), done.stderr
    assert "Traceback" not in done.stderr, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks, fault",
    [
        (0, ("0", 4, "SIGTERM")),
        (2, ("1", 4, "SIGTERM")),
    ],
)
def test_a_signal_to_any_rank_drops_the_step_on_all(base, run_script, ranks, fault):
    """Also when the other rank goes on to its next pass."""
    args = [*SHORT, "--log_every=3", "--device_batch_size=2"]
    running = Started("base_train", *args, "--model_tag=a", ranks=ranks, before=partial(inject, fault))
    done = running.wait()
    assert "after step 4: the same command resumes" in done.stdout, done.stderr
    assert running.codes() == [128 + signal.SIGTERM] * max(ranks, 1)
    for tag in ("a", "whole"):
        run_process("base_train", *args, f"--model_tag={tag}", ranks=ranks)
    assert metrics(base, "a") == metrics(base, "whole")  # the line of step 6 holds all of its steps


def signal_in_progress(number):
    """Before a script: its first progress comes with a signal."""
    common.Progress.update = lambda *_: os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    "script, args, number",
    [
        ("prepare_data", ["--source=shapes", "--name=new", "--resolution=8"], signal.SIGINT),
        ("cache_latents", ["--data=tiny", "--name=new", "--device_type=cpu"], signal.SIGTERM),
        ("base_eval", ["--metric=loss", "--device_type=cpu"], signal.SIGUSR1),
        ("base_train", [*SHORT, "--eval_every=4", "--model_tag=new"], signal.SIGTERM),
    ],
)
def test_where_no_step_can_be_lost_a_signal_ends_a_script_at_once(base, run_script, script, args, number):
    """A trainer that has not taken a step, too. Shells report a negative code, death by a signal, as 128 + it."""
    if script == "base_eval":
        run_script("base_train", *TINY)
    if script == "cache_latents":
        args = [*args, f"--autoencoder={make_autoencoder(base / 'vae')}"]
    done = Started(script, *args, before=partial(signal_in_progress, number)).wait()
    code = 130 if number == signal.SIGINT else -number
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "SIG" not in done.stderr
    assert not any(base.glob("*/new/meta.json"))
    assert not any(base.glob("runs/*/eval*"))
    assert not (base / "runs" / "new" / "checkpoints").exists()


TORCHRUN = """
import runpy, sys
from test_faults import inject
inject(("1", 5, "SIGKILL"), ("0", 6, "SIGTERM to torchrun"))  # not 4 or 5: the other rank may not heed it yet
runpy.run_module("scripts.base_train", run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
def test_torchrun_restarts_after_the_death_of_a_worker_and_stops_at_a_signal(base, tmp_path):
    """By itself from the newest checkpoint, and by the same command after a signal: the end has the same bits."""
    run_process("base_train", *SHORT, "--model_tag=whole", ranks=2)
    script = tmp_path / "faulty.py"
    script.write_text(TORCHRUN)
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=3")
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    command = [*launcher, script, *SHORT, "--model_tag=a"]
    done = subprocess.run(
        command,
        env=env,
        text=True,
        capture_output=True,
        timeout=200,
    )
    assert re.search(r"resumed from .*step_000004", done.stdout), done.stdout + done.stderr
    assert re.search(r"stopped by signal 15 after step [6-8]", done.stdout), done.stdout + done.stderr
    assert done.returncode
    run_process("base_train", *SHORT, "--model_tag=a", ranks=2)
    assert_identical(everything(base, "a", 8), everything(base, "whole", 8))


@pytest.mark.slow
def test_a_run_goes_on_with_one_two_and_four_ranks(base, run_script):
    args = [*TRAIN, "--total_batch_size=16", "--warmup_ratio=0", "--warmdown_ratio=0", "--flip"]
    run_script("base_train", *args, "--num_iterations=8", "--model_tag=one")
    for steps, ranks, size in (
        (2, 1, 16),
        (4, 2, 4),
        (6, 4, 2),
        (8, 1, 8),
    ):
        more = (f"--num_iterations={steps}", f"--device_batch_size={size}", "--model_tag=many", "--resume=changed")
        run_process("base_train", *args, *more, ranks=ranks)
    assert_close(base, "many", "one")


@pytest.mark.slow
def test_two_nodes_train_the_same_model_as_one_process(base, run_script):
    """As runs/multinode.sh starts them: an agent on each node, which meet at the first."""
    args = [*SHORT, "--model_tag=nodes"]
    env = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "GPUS": "1",
        "NNODES": "2",
    }
    env |= {"HEAD": f"127.0.0.1:{free_port()}"}
    command = ["bash", str(ROOT / "runs" / "multinode.sh"), *args]
    nodes = [subprocess.Popen(command, env=env, text=True, stdout=-1, stderr=-1) for _ in range(2)]
    for node in nodes:
        out, err = node.communicate(timeout=200)
        assert node.returncode == 0, out + err
    run_script("base_train", *SHORT, "--model_tag=one")
    assert_close(base, "nodes", "one")


def no_file_beyond(size):
    """Before a script: it may write no larger file."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what it prints is no file's
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def starved(name, *args, kilobytes):
    """The one line of error of a script without room."""
    done = run_process(name, *args, check=False, before=partial(no_file_beyond, 1024 * kilobytes))
    (line,) = done.stderr.strip().splitlines()
    assert done.returncode == 2, line
    assert line.startswith("error: "), line
    assert "File too large" in line, line
    return line


@pytest.mark.slow
def test_no_room_for_metrics_checkpoint_or_samples(base, run_script):
    args = [*TRAIN, "--num_iterations=40", "--model_tag=a", "--resume=changed"]
    run_script("base_train", *args, "--num_iterations=2", "--warmdown_ratio=0")
    checkpoints = base / "runs" / "a" / "checkpoints"
    # one thing after the other finds no room; each time the newest checkpoint stays, and nothing half done beside it
    for limit, more, named in (
        (8, "--save_every=-1", "metrics.jsonl"),
        (24, "--save_every=4", "checkpoints/step_000004"),
        (12, "--sample_every=3", "samples/step_000003.png"),
    ):
        assert named in starved("base_train", *args, more, "--sample_steps=1", kilobytes=limit)
        assert [path.name for path in checkpoints.iterdir()] == ["step_000002"]
        assert not [*(base / "runs" / "a").glob(".*.*")]
        assert not [*(base / "runs" / "a" / "samples").iterdir()]
    run_script("base_train", *args, "--save_every=0")
    assert steps_of(base, "a") == [*range(1, 41)]


@pytest.mark.slow
def test_no_room_for_a_data_set_or_latents(base, tmp_path, run_script):
    starved("prepare_data", "--source=shapes", "--name=mine", kilobytes=100)
    assert {path.name for path in (base / "data").iterdir()} == {".mine.lock", ".tiny.lock", "tiny"}
    vae = make_autoencoder(tmp_path / "vae")
    args = ("--data=tiny", f"--autoencoder={vae}", "--name=latents")
    starved("cache_latents", *args, kilobytes=2)
    assert not (base / "data" / "latents").exists()
    run_script("cache_latents", *args)
    assert (base / "data" / "latents" / "meta.json").is_file()
