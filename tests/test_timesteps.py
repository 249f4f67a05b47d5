"""Timestep samplers: distributions, unbiasedness, the published figures, the same history on every rank."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import golden, refused
from torch.testing import assert_close

from nanodiff.diffusion.flow import TIME_INPUTS, FlowMatching
from nanodiff.diffusion.timesteps import FOR_BOTH, FOR_FLOW, FOR_GAUSSIAN, TIMESTEPS, LossSecondMoment, make_timesteps
from nanodiff.models.dit import timestep_embedding

FLOW = FlowMatching()
grid = lambda n: (torch.arange(n) + 0.5) / n


def gaussian(T):
    return SimpleNamespace(is_gaussian=True, kind="Gaussian diffusion", num_timesteps=T, t_max=T)


@pytest.mark.parametrize("T", [1, 7, 1000])
def test_uniform_covers_each_timestep_equally(T):
    t, weight = make_timesteps("uniform", gaussian(T)).sample(grid(3 * T))
    assert t.dtype == torch.int64
    assert (torch.bincount(t) == 3).all()
    assert (weight == 1).all()
    u = grid(7)  # of flow matching, t is u
    assert torch.equal(make_timesteps("uniform", FLOW).sample(u)[0], u)


@pytest.mark.parametrize("std", [1.0, 0.7])
def test_quantiles(std):
    """t grows with u, which is the CDF at t of a logit-normal law."""
    u = grid(1_000_000)
    t, weight = make_timesteps("logit-normal", FlowMatching(timestep_std=std)).sample(u)
    assert (weight == 1).all()
    assert (t.diff() >= 0).all()
    cdf = torch.special.ndtr(torch.logit(t.double()) / std)
    assert_close(cdf, u.double(), rtol=0, atol=3e-6)


@pytest.mark.parametrize(
    "seen, fastest",
    [
        ("1000t", 1),
        ("62.5t", 1 / 16),
    ],
)
def test_the_embedding_of_t_turns_no_faster_than_it_may(seen, fastest):
    """In radians per thousandth of t."""
    t = TIME_INPUTS[seen](torch.linspace(0, 1, 1001))
    turned = timestep_embedding(t, 256).diff(dim=0).abs().max()
    assert 0.8 * fastest < turned <= fastest


@pytest.mark.parametrize(
    "shift, median",
    [
        (3.0, 0.75),
        (math.exp(0.8), 0.69),
        (1.0, 0.5),
    ],
)
def test_timestep_shift(shift, median):
    """Medians of t in DiffSynth-Studio's FLUX and Qwen schedules; the ends stay; samplers take the same steps."""
    process = FlowMatching(timestep_shift=shift)
    t, _ = make_timesteps("uniform", process).sample(grid(1001))
    assert t[500].item() == pytest.approx(median, abs=2e-3)
    assert t.min() > 0
    assert t.max() < 1
    t, _ = make_timesteps("logit-normal", process).sample(torch.tensor([0.5]))
    assert t.item() == pytest.approx(median, abs=2e-3)
    t, weight = make_timesteps("bell", process).sample(grid(4000))
    assert weight.mean().item() == pytest.approx(1, abs=1e-3)
    assert t[weight.argmax()] == pytest.approx(0.5, abs=1e-3)
    seen = []
    model = lambda x, t, **cond: seen.append(t[0].item() / 1000) or torch.zeros_like(x)
    process.sample(model, torch.zeros(1, 1, 2, 2), 2, "euler")
    assert seen == pytest.approx([1, median], abs=2e-3)


def test_an_enlarged_image_needs_its_factor_as_shift():
    """Enlarged s times and averaged back, an image has at shift(t) as much noise beside it as the small one at t."""
    small = torch.randn(1, 3, 32, 32)
    large = small.repeat_interleave(2, 2).repeat_interleave(2, 3)
    noise = torch.randn(8, 3, 64, 64)
    process = FlowMatching(timestep_shift=2)
    for t in (0.1, 0.5, 0.9):
        image = F.avg_pool2d(process.noised(large, process.shift(t), 0), 2)
        x_t = F.avg_pool2d(process.noised(large, process.shift(t), noise), 2)
        beside = (x_t - image).std() / image.std()
        assert beside.item() == pytest.approx(t / (1 - t) / small.std().item(), rel=0.02)


def test_second_moment_equals_the_published(monkeypatch):
    figures = golden("gaussian.json")
    figure = figures["loss_second_moment"]
    salt = figures["salt"]
    feed_t = torch.arange(25) % 6
    feed = torch.tensor([abs(math.sin(i + salt)) + 0.1 * (i % 6) for i in range(25)])
    default = make_timesteps("loss-second-moment", gaussian(4))
    assert default.history.shape == (4, 10)
    assert default.uniform_prob == 0.001
    monkeypatch.setattr(LossSecondMoment, "length", figure["history_per_term"])
    monkeypatch.setattr(LossSecondMoment, "uniform_prob", figure["uniform_prob"])
    for batches in ([1] * 25, [25], [6, 2, 17]):  # one by one as published, or in batches
        sampler = LossSecondMoment(gaussian(figure["num_timesteps"]))
        before = torch.tensor(figure["weights_before"], dtype=torch.float64)
        assert_close(sampler.probabilities(), before / before.sum())
        for t, losses in zip(feed_t.split(batches), feed.split(batches)):
            sampler.record(t, losses)
        after = torch.tensor(figure["weights_after"], dtype=torch.float64)
        assert_close(sampler.probabilities(), after / after.sum(), rtol=1e-6, atol=0)

    # Of two ranks that share all but the first loss, each ends with the history of one
    sampler = LossSecondMoment(gaussian(figure["num_timesteps"]))
    sampler.record(feed_t[:1], feed[:1])
    rest = torch.stack([feed_t.float(), feed])[:, 1:]
    halves = rest.unflatten(1, (3, 2, 4)).unbind(2)  # three micro-steps of 4 each

    def all_gather(out, own):
        for x, half in zip(out, halves):
            x.copy_(half)

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_gather", all_gather)
    sampler.record(*halves[1])
    assert_close(sampler.probabilities(), after / after.sum(), rtol=1e-6, atol=0)


def test_importance_weights_are_unbiased():
    """sum_t p_t w_t f_t is the mean of f, for any f; and the draws follow p."""
    sampler = LossSecondMoment(gaussian(6))
    t = torch.arange(6).repeat(LossSecondMoment.length)
    g = torch.Generator().manual_seed(0)
    losses = torch.rand(len(t), generator=g) + 0.1 * t
    sampler.record(t, losses)
    f = torch.tensor([0.3, 5.0, 1.0, 0.0, 2.0, 7.0])
    t, weight = sampler.sample(grid(60_000))
    assert t.dtype == torch.int64
    assert weight.dtype == torch.float32
    p = sampler.probabilities()
    assert_close(torch.bincount(t) / len(t), p.float(), rtol=0, atol=2e-5)
    assert_close((weight * f[t]).mean(), f.mean(), rtol=1e-4, atol=0)
    assert_close(weight, (1 / (6 * p[t])).float())


@pytest.mark.parametrize("name", TIMESTEPS)
@pytest.mark.parametrize("process", [FLOW, gaussian(10)], ids=["flow", "gaussian"])
def test_each_distribution_is_for_its_processes(name, process, monkeypatch):
    """It draws there, and elsewhere is refused in one line, a new one too, though it uses what a flow alone has."""
    new = lambda u, process: (process.shift(u), torch.ones_like(u))
    monkeypatch.setitem(FOR_FLOW, "new", new)
    accepted = FOR_BOTH | (FOR_GAUSSIAN if process.is_gaussian else FOR_FLOW)
    for tried in (name, "new"):
        if tried in accepted:
            rand_range = torch.tensor([0.0, 0.5, 1 - 2**-24])
            t, weight = make_timesteps(tried, process).sample(rand_range)
            assert t.shape == (3,)
            assert weight.shape == (3,)
            assert t.min() >= 0
            assert t.max() <= (9 if process.is_gaussian else 1)
        else:
            refused(f"timesteps={tried} .*accepted: auto, uniform, bell", make_timesteps, tried, process)


def test_part_of_t():
    for name in ("uniform", "logit-normal"):
        t, weight = make_timesteps(name, FLOW, low=0.25, high=0.75).sample(grid(4000))
        assert (weight == 1).all()
        assert 0.25 <= t.min() < 0.2503
        assert 0.7497 < t.max() <= 0.75
    t, weight = make_timesteps("bell", FLOW).sample(grid(4000))  # DiffSynth-Studio's, shifted to 0 at the ends
    bell = torch.exp(-2 * (t - 0.5) ** 2)
    bell = bell - bell[0]
    assert_close(weight, bell / bell.mean(), atol=2e-3, rtol=0)
    t, weight = make_timesteps("bell", gaussian(100), low=0.5, high=1.0).sample(grid(4000))
    assert t.min() == 50
    assert t.max() == 99
    assert weight[0] > 1.5
    assert weight[-1] < 0.1
