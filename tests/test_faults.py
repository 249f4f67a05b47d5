"""Nothing is lost: a trainer that is killed again and again ends with the same bits as one that was left alone."""

import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from tiny_runs import make_data

TRAIN = (
    "--data=tiny --depth=1 --patch_size=4 --total_batch_size=8 --num_iterations=100 --log_every=1 --eval_every=-1 "
    "--sample_every=-1 --save_every=2 --checkpoints_kept=2 --compile=False --dtype=float32 --device_type=cpu"
).split()  # fmt: skip

# Forks of one process that has imported all there is: a start then costs milliseconds, so that many kills are cheap.
# Writing to the disk is made slow, so that most of them hit a save. Prints how many found a save half done.
KILLER = """
import os, random, runpy, signal, sys, time
from pathlib import Path
import torch, torch._dynamo, nanodiff.recipe, nanodiff.report, nanodiff.features
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
random.seed(0)
in_save = 0
while kills:
    pid = os.fork()
    if not pid:
        child()
    time.sleep(random.uniform(0.1, 0.7))
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


def everything(base, tag):
    """What a run has made, without what depends on the clock."""
    run = base / "runs" / tag
    newest = run / "checkpoints" / "step_000100"
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
