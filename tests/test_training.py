"""What the trainers share: closed forms of the schedule, the cut of a batch, a draw that is a function of its step."""

import json
from types import SimpleNamespace

import pytest
import torch

from nanodiff.common import UserError
from nanodiff.training import RunLog, cut_batch, draw_step, resume_point, trapezoid


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


def test_a_draw_is_a_function_of_seed_and_step():
    codec, cpu = SimpleNamespace(shape=(3, 4, 4), draws=True), torch.device("cpu")
    draw, same = draw_step(1, 5, 4000, codec, cpu), draw_step(1, 5, 4000, codec, cpu)
    assert all(torch.equal(a, b) for a, b in zip(draw, same))
    for seed, step in ((1, 6), (2, 5)):
        assert all((a != b).double().mean() > 0.99 for a, b in zip(draw, draw_step(seed, step, 4000, codec, cpu)))
    for u in draw[:3]:
        assert u.min() >= 0 and u.max() < 1 and u.mean().item() == pytest.approx(0.5, abs=0.02)
    both = torch.stack([draw.noise.flatten(), draw.eps.flatten()])
    torch.testing.assert_close(torch.cov(both), torch.eye(2), rtol=0, atol=0.02)
    codec.draws = False
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
