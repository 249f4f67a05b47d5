"""What the trainers share: closed forms of the schedule, the cut of a batch, a draw that is a function of its step."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT

from nanodiff.common import UserError
from nanodiff.training.run import RunLog, cut_batch, draw_step, largest_batch, resume_point, trapezoid


def test_trapezoid():
    rates = [trapezoid(step, 10, 0.2, 0.4, final=0.1) for step in range(10)]
    assert rates == pytest.approx([1 / 3, 2 / 3, 1, 1, 1, 1, 1, 0.775, 0.55, 0.325])
    assert [trapezoid(step, 5, 0, 0) for step in range(5)] == [1] * 5
    assert [trapezoid(step, 4, 0, 1) for step in range(4)] == [1, 0.75, 0.5, 0.25]


@pytest.mark.parametrize("total, device, world", [(64, 8, 2), (64, 64, 2), (6, 64, 3), (12, 3, 4), (1, 64, 1)])
def test_micro_steps_and_ranks_make_up_the_batch(total, device, world):
    images, micro_steps = cut_batch(total, device, world)
    assert images * micro_steps * world == total and images <= device


@pytest.mark.parametrize("total, device, world", [(10, 4, 1), (8, 8, 3), (1, 1, 2)])
def test_a_batch_that_cannot_be_cut(total, device, world):
    with pytest.raises(UserError, match=f"total_batch_size={total} is not a multiple of device_batch_size x ranks"):
        cut_batch(total, device, world)


NO_MEMORY = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("MPS backend out of memory (MPS allocated: 1.00 GB)"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory"),
    MemoryError(),
]


@pytest.mark.parametrize("error", NO_MEMORY, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("limit, room, best", [(64, 20, 16), (64, 64, 64), (64, 1000, 64), (48, 1000, 16), (7, 9, 1)])
def test_the_largest_batch_that_fits(error, limit, room, best):
    tried, cleared = [], []

    def try_batch(n):
        tried.append(n)
        if n > room:
            raise error

    assert largest_batch(try_batch, limit, lambda: cleared.append(len(tried))) == best
    assert tried == [2**i for i in range(len(tried))] and tried[-1] <= 2 * best
    assert cleared == list(range(1, len(tried) + 1))  # after each try, the failed one as well


def test_no_batch_fits_or_something_else_is_wrong():
    def fail(error):
        raise error

    with pytest.raises(UserError, match="not even one image"):
        largest_batch(lambda n: fail(NO_MEMORY[0]), 8)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        largest_batch(lambda n: fail(RuntimeError("mat1 and mat2 shapes cannot be multiplied")), 8)


REFUSED = """
import resource, sys, torch
from pathlib import Path
from nanodiff.training.run import largest_batch
room = 1 << 29  # beyond what the process has mapped so far
mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
weight = torch.ones(2**20, requires_grad=True)
resource.setrlimit(resource.RLIMIT_AS, (mapped + room, resource.RLIM_INFINITY))
def clear():
    weight.grad = None
print(largest_batch(lambda n: (weight * torch.ones(n, 1)).exp().sum().backward(), 1024, clear), weight.grad)
torch.ones(2**26)  # 256 MiB: all that failed has been freed
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS")
def test_memory_that_is_refused():
    """n x 4 MiB for each of product, its exponential, and gradients, two to four at once, in 512 MiB: 32 or 64 fit."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", REFUSED], capture_output=True, text=True, env=env)
    assert done.stdout.split() in (["32", "None"], ["16", "None"]), done.stdout + done.stderr
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("theirs, found", [(2, 2), (16, 8), (0, "not even one image")])
def test_ranks_agree_on_the_largest_batch(monkeypatch, theirs, found):
    """8 fit on this rank; the other, whose answer stands in for the collective, has room for `theirs`."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    minimum = lambda x, op: x.clamp_(max=theirs) if op == dist.ReduceOp.MIN else None
    monkeypatch.setattr(dist, "all_reduce", minimum)

    def try_batch(n):
        if n > 8:
            raise torch.OutOfMemoryError

    if found == theirs or found == 8:
        assert largest_batch(try_batch, 16) == found
    else:
        with pytest.raises(UserError, match=found):
            largest_batch(try_batch, 16)


def test_a_draw_is_a_function_of_seed_and_step():
    codec, cpu = SimpleNamespace(shape=(3, 4, 4), stochastic=True), torch.device("cpu")
    draw, same = draw_step(1, 5, 4000, codec, cpu), draw_step(1, 5, 4000, codec, cpu)
    assert all(torch.equal(a, b) for a, b in zip(draw, same))
    for seed, step in ((1, 6), (2, 5)):
        assert all((a != b).double().mean() > 0.99 for a, b in zip(draw, draw_step(seed, step, 4000, codec, cpu)))
    for u in draw[:3]:
        assert u.min() >= 0 and u.max() < 1 and u.mean().item() == pytest.approx(0.5, abs=0.02)
    both = torch.stack([draw.noise.flatten(), draw.eps.flatten()])
    torch.testing.assert_close(torch.cov(both), torch.eye(2), rtol=0, atol=0.02)
    codec.stochastic = False
    plain = draw_step(1, 5, 4000, codec, cpu)
    assert plain.eps is None and torch.equal(plain.noise, draw.noise)


def test_a_log_begins_where_the_run_goes_on(tmp_path):
    described, defaults = {"config": {"lr": 2, "rank": 3}}, {"lr": 1, "rank": 3}
    log = RunLog("dummy", tmp_path / "a", torch.device("cpu"), described, defaults, 0)
    for step in (1, 2, 3):
        log.metrics({"step": step, "train/loss": 0.0})
    again = RunLog("dummy", tmp_path / "a", torch.device("cpu"), described, defaults, 2)
    again.metrics({"step": 3, "train/loss": 1.0})
    lines = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["train/loss"]) for line in lines] == [(1, 0.0), (2, 0.0), (3, 1.0)]
    assert json.loads((tmp_path / "a" / "config.json").read_text())["changed_from"] == {"lr": 1}


def test_where_to_resume(tmp_path):
    assert resume_point(tmp_path, "auto") is None and resume_point(tmp_path, "never") is None
    for resume, fault in (("later", "resume='later': accepted are auto, never or"), ("3", "no checkpoint of step 3")):
        with pytest.raises(UserError, match=fault):
            resume_point(tmp_path, resume)
