"""Nothing is lost: trainers that are killed, stopped, starved of disk, or spread over other ranks."""

import json
import os
import re
import socket
import subprocess
import sys
import time

import pytest
import torch
from conftest import ROOT, run_process
from tiny_runs import make_autoencoder, make_data

TRAIN = (
    "--data=tiny --depth=1 --patch_size=4 --total_batch_size=8 --num_iterations=100 --log_every=1 --eval_every=-1 "
    "--sample_every=-1 --save_every=2 --checkpoints_kept=2 --compile=False --dtype=float32 --device_type=cpu"
).split()  # fmt: skip

# Forks of one process that has imported all there is: a start then costs milliseconds, so that many kills are cheap.
# Writing to the disk is made slow, so that many of them hit a save. Prints how many found a save half done.
KILLER = """
import os, random, runpy, signal, sys, time
from pathlib import Path
import torch, torch._dynamo, nanodiff.formats.load, nanodiff.web.report, nanodiff.metrics.features
kills, checkpoints, argv = int(sys.argv[1]), Path(sys.argv[2]), ["base_train", *sys.argv[3:]]
fsync = os.fsync
def slow_fsync(fd):
    time.sleep(0.02)
    fsync(fd)
def child():
    os.fsync, sys.argv = slow_fsync, argv
    code = 1
    try:
        runpy.run_module("scripts.base_train", run_name="__main__", alter_sys=True)
        code = 0
    finally:
        sys.stdout.flush()
        os._exit(code)
def ended(pid):
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
random.seed(0)
in_save = 0
while kills:
    pid = os.fork()
    if not pid:
        child()
    time.sleep(random.uniform(0.1, 0.7))
    while kills % 3 == 0 and not any(checkpoints.glob(".*")) and not ended(pid):
        time.sleep(0.001)  # a third of the kills wait for a save
    os.kill(pid, signal.SIGKILL)
    if os.WIFSIGNALED(os.waitpid(pid, 0)[1]):
        kills -= 1
        in_save += any(checkpoints.glob(".*"))
    else:
        sys.exit("the run ended before it was killed often enough")
pid = os.fork()
if not pid:
    child()
code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
print(in_save)
sys.exit(code)
"""


def everything(base, tag, step=100):
    """What a run has made, without what depends on the clock."""
    run = base / "runs" / tag
    newest = run / "checkpoints" / f"step_{step:06d}"
    tensors = {path.name: torch.load(path, weights_only=True) for path in newest.glob("*.pt")}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return tensors, [(line["step"], line["train/loss"], line["train/grad_norm"]) for line in lines]


def assert_same(a, b):
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            assert_same(a[key], b[key])
    else:
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_twenty_kills_lose_nothing(base, run_script):
    make_data()
    run_script("base_train", *TRAIN, "--model_tag=whole")
    checkpoints = base / "runs" / "killed" / "checkpoints"
    command = [sys.executable, "-c", KILLER, "20", str(checkpoints), *TRAIN, "--model_tag=killed"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=240, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert int(done.stdout.split()[-1]) >= 3, "too few of the kills hit a save"
    (weights, lines), (expected_weights, expected_lines) = everything(base, "killed"), everything(base, "whole")
    assert lines == expected_lines and [step for step, *_ in lines] == [*range(1, 101)]  # none twice, none missing
    assert_same(weights, expected_weights)
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step_000098", "step_000100"]  # nothing half done


# ---------------------------------------------------------------------------------------------------------------------
# Several ranks: one of them hangs, dies, or is told to stop

# base_train, in which something happens in the given rank at the given step: FAULT is "rank step action"
FAULTY = """
import os, runpy, signal, time
from nanodiff import common
rank, at, action = os.environ["FAULT"].split()
first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
if not first and os.environ["RANK"] == rank:
    time.sleep(3)  # the others are there before it, and shall not take its predecessor's address for its own
honest = common.make_generator
def make_generator(*key, **options):  # a step's numbers come from (seed, step)
    if first and (os.environ.get("RANK", "0"), str(key[-1]), len(key)) == (rank, at, 2):
        os.kill(os.getppid() if action.endswith("launcher") else os.getpid(), getattr(signal, action.split("_")[0]))
    return honest(*key, **options)
common.make_generator = make_generator
runpy.run_module("scripts.base_train", run_name="__main__", alter_sys=True)
"""
SHORT = [*TRAIN, "--num_iterations=8", "--device_batch_size=4"]
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")
SAVED_TWICE = ["step_000006", "step_000008"]


@pytest.fixture
def faulty(base, tmp_path):
    """faulty(launcher, "1 4 SIGKILL", *args): base_train in which rank 1 kills itself at step 4; CompletedProcess."""
    make_data()
    script = tmp_path / "faulty.py"
    script.write_text(FAULTY)

    def run(launcher, fault, *args, env=None, wait=True):
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "FAULT": fault} | (env or {})
        process = subprocess.Popen([*launcher, str(script), *SHORT, *args], env=env, text=True, stdout=-1, stderr=-1)
        if not wait:
            return process
        out, err = process.communicate(timeout=200)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    return run


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    "action, timeout, words", [("SIGSTOP", 8, "Timed out|timeout"), ("SIGKILL", 100, "Connection|Read error")]
)
def test_a_rank_that_hangs_or_dies_ends_the_others(base, faulty, run_script, action, timeout, words):
    """They name what they waited for, within the timeout or at once; the newest checkpoint goes on with fewer ranks."""
    ranks, port = [], free_port()
    for rank in "01":
        env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        env["NANODIFF_RANK_TIMEOUT"] = str(timeout)
        ranks.append(faulty((sys.executable,), f"1 5 {action}", "--model_tag=a", env=env, wait=False))
    try:
        _, err = ranks[0].communicate(timeout=150)
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
    last = err.strip().splitlines()[-1]
    assert ranks[0].returncode == 1 and "Traceback" not in err, err
    assert re.search(rf"rank 0 of 2: the reduce-scatter of the gradients failed after [\d.]+ s .*({words})", last)
    assert float(re.search(r"after ([\d.]+) s", last)[1]) < timeout + 5
    run_script("base_train", *SHORT, "--model_tag=a")
    assert [step for step, *_ in everything(base, "a", 8)[1]] == [*range(1, 9)]


@pytest.mark.slow
def test_torchrun_restarts_after_the_death_of_a_worker(base, faulty):
    """With --max-restarts it goes on by itself from the newest checkpoint, and ends with the same bits."""
    launcher = (*TORCHRUN, "--standalone", "--nproc_per_node=2", "--max-restarts=3")
    assert faulty(launcher, "1 99 SIGKILL", "--model_tag=whole").returncode == 0
    done = faulty(launcher, "1 5 SIGKILL", "--model_tag=a")
    assert done.returncode == 0 and re.search(r"resumed from .*step_000004", done.stdout), done.stderr
    for ours, whole in zip(everything(base, "a", 8), everything(base, "whole", 8)):
        assert_same(ours, whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranks, fault", [(1, "0 4 SIGHUP"), (2, "1 4 SIGTERM"), (2, "0 4 SIGINT"), (2, "0 4 SIGTERM_launcher")]
)
def test_a_signal_to_any_rank_or_to_torchrun_stops_all_after_the_same_step(base, faulty, run_script, ranks, fault):
    started = time.monotonic()
    launcher = (*TORCHRUN, "--standalone", "--nproc_per_node=2") if ranks == 2 else (sys.executable,)
    done = faulty(launcher, fault, "--model_tag=a")
    assert time.monotonic() - started < 60  # starting included; torchrun kills after 30 s
    if "launcher" in fault:
        assert re.search(r"stopped by signal \d+ after step [5-8]", done.stdout), done.stdout + done.stderr
    else:
        assert done.returncode == 0 and "after step 5: the same command resumes" in done.stdout, done.stderr
    run_script("base_train", *SHORT, "--model_tag=a")
    assert [step for step, *_ in everything(base, "a", 8)[1]] == [*range(1, 9)]


@pytest.mark.slow
def test_a_run_goes_on_with_one_two_and_four_ranks(base, run_script):
    """The same images in the same order and the same noise: the same losses."""
    make_data()
    args = [*TRAIN, "--total_batch_size=16", "--warmup_ratio=0", "--warmdown_ratio=0", "--flip"]
    run_script("base_train", *args, "--num_iterations=8", "--model_tag=one")
    for steps, ranks, size in ((2, 1, 16), (4, 2, 4), (6, 4, 2), (8, 1, 8)):
        more = (f"--num_iterations={steps}", f"--device_batch_size={size}", "--model_tag=many", "--resume=changed")
        if ranks == 1:
            run_script("base_train", *args, *more)
        else:
            run_process("base_train", *args, *more, ranks=ranks)
    (_, one), (_, many) = everything(base, "one", 8), everything(base, "many", 8)
    assert [step for step, *_ in many] == [*range(1, 9)]
    for (_, *expected), (_, *got) in zip(one, many):
        assert got == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_two_nodes_train_the_same_model_as_one_process(base, run_script):
    """As runs/multinode.sh starts them: an agent on each node, which meet at the first."""
    make_data()
    args = [*SHORT, "--model_tag=nodes"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GPUS": "1", "NNODES": "2"}
    env |= {"HEAD": f"127.0.0.1:{free_port()}"}
    command = ["bash", str(ROOT / "runs" / "multinode.sh"), *args]
    nodes = [subprocess.Popen(command, env=env, text=True, stdout=-1, stderr=-1) for _ in range(2)]
    ends = [(*node.communicate(timeout=200), node.returncode) for node in nodes]
    assert [code for *_, code in ends] == [0, 0], ends
    run_script("base_train", *SHORT, "--model_tag=one")
    for (_, *expected), (_, *got) in zip(everything(base, "one", 8)[1], everything(base, "nodes", 8)[1]):
        assert got == pytest.approx(expected, rel=1e-4)


# ---------------------------------------------------------------------------------------------------------------------
# No room on the disk


def starved(name, *args, kilobytes):
    """Run a script that may write no file beyond a size; its one line of error."""
    code = f"import resource as r; r.setrlimit(r.RLIMIT_FSIZE, ({1024 * kilobytes},) * 2)\n"
    code += f"import runpy; runpy.run_module('scripts.{name}', run_name='__main__', alter_sys=True)"
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code, *args], env=env, text=True, capture_output=True, timeout=120)
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 2 and len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    assert "File too large" in lines[0], lines
    return lines[0]


@pytest.mark.slow
def test_no_room_for_metrics_checkpoint_or_samples(base, run_script):
    make_data()
    args = [*TRAIN, "--model_tag=a", "--resume=changed"]
    run_script("base_train", *args, "--num_iterations=2", "--warmdown_ratio=0")
    checkpoints = base / "runs" / "a" / "checkpoints"
    # one thing after the other finds no room; each time the newest checkpoint stays, and nothing half done beside it
    starts = ((24, "--save_every=-1", "metrics.jsonl"), (24, "--save_every=4", "checkpoints/step_000004"))
    for limit, more, named in (*starts, (12, "--sample_every=3", "samples/step_000003.png")):
        assert named in starved("base_train", *args, more, "--sample_steps=1", kilobytes=limit)
        assert [path.name for path in checkpoints.iterdir()] == ["step_000002"]
        assert not [*(base / "runs" / "a").glob(".*.*"), *(base / "runs" / "a" / "samples").iterdir()]
    run_script("base_train", *args)
    assert [step for step, *_ in everything(base, "a")[1]] == [*range(1, 101)]


@pytest.mark.slow
def test_no_room_for_a_data_set_or_latents(base, tmp_path, run_script):
    starved("prepare_data", "--source=shapes", kilobytes=100)
    assert [path.name for path in (base / "data").iterdir()] == [".shapes.lock"]
    make_data()
    args = ("--data=tiny", f"--autoencoder={make_autoencoder(tmp_path / 'vae')}", "--name=latents")
    starved("cache_latents", *args, kilobytes=2)
    assert not (base / "data" / "latents").exists()
    run_script("cache_latents", *args)
    assert (base / "data" / "latents" / "meta.json").is_file()
