"""Flow matching against Gaussian data, where velocity, marginals and the flow's map are known in closed form."""

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gaussian_oracle import GaussianOracle
from torch.testing import assert_close

from nanodiff.common import make_generator
from nanodiff.diffusion.flow import SAMPLERS, FlowMatching, euler, heun, ralston_step

MU = torch.tensor([0.5, -1.0])
S = torch.tensor([[0.5, 0.3], [0.3, 0.4]])
oracle = GaussianOracle(MU.tolist(), S.tolist())
image = lambda x: x[:, :, None, None]  # (N, C, 1, 1)
flat = lambda x: x[:, :, 0, 0]


def perfect(x_t, model_t, time):
    """E[noise - x0 | x_t] of the Gaussian data."""
    t = model_t[0].item() / 1000
    assert torch.all(model_t == model_t[0])
    return ((x_t - oracle.x0(x_t, 1 - t, t)) / t).float()


def normal():
    """Stands in for a generator."""
    g = make_generator(0)
    return SimpleNamespace(randn_like=lambda x: torch.randn(x.shape, generator=g))


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_sampler_keeps_the_marginals(sampler):
    calls = []
    noise = torch.randn(40_000, 2, generator=make_generator(1))
    model = lambda x_t, t, time: calls.append((t[0].item() / 1000, x_t)) or perfect(x_t, t, time)
    x0 = FlowMatching().sample(model, image(noise), 100, sampler, normal())
    for t, x_t in [*calls[::11], (0.0, x0)]:
        assert_close(flat(x_t).mean(0), (1 - t) * MU, rtol=0, atol=0.02)
        cov = (1 - t) ** 2 * S + t**2 * torch.eye(2)
        assert_close(torch.cov(flat(x_t).T), cov, rtol=0, atol=0.03)
    start_and_end = torch.cat([noise, flat(x0)], 1)
    correlation = torch.corrcoef(start_and_end.T)[:2, 2:].diagonal().min()
    if sampler == "sde":
        assert correlation < 0.6  # it forgets its start
    else:
        assert correlation > 0.85


@pytest.mark.parametrize(
    "step, order",
    [
        (euler, 1),
        (heun, 2),
        (ralston_step, 3),
    ],
)
def test_order_of_convergence(step, order):
    """All A_t commute, so the flow carries A_t^(-1/2) (x - mean_t) along unchanged: x0 = mu + S^(1/2) noise."""
    steps = np.array([8, 16, 32, 64])
    noise = torch.randn(20, 2, generator=make_generator(0))
    values, vectors = torch.linalg.eigh(S)
    root = vectors @ torch.diag(values.sqrt()) @ vectors.T
    exact = MU + noise @ root
    velocity = lambda x, t: perfect(x, torch.full((len(x),), 1000 * t), t)
    errors = []
    for n in steps:
        x = image(noise)
        for t, t_next in pairwise(np.linspace(1, 0, n + 1).tolist()):
            x, _ = step(velocity, x, t, t_next, *[None] * (step is not ralston_step))
        errors.append((flat(x) - exact).norm().item())
    slope = np.polyfit(np.log(steps), np.log(errors), 1)[0]
    assert slope == pytest.approx(-order, abs=0.2), errors


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("prediction", ["v", "x0"])
def test_paths_to_a_single_image_are_straight(sampler, steps, prediction):
    """Data of one image: v is constant along the path (Liu et al. 2023), so every guess is exact, at any step."""
    x0 = torch.randn(2, 3, 4, 4, generator=make_generator(0, 0))
    noise = torch.randn(2, 3, 4, 4)
    times = []
    guesses = []

    def model(x_t, t, time):
        times.append(round(t[0].item() / 1000, 5))
        return x0 if prediction == "x0" else (x_t - x0) / (t.view(-1, 1, 1, 1) / 1000)

    progress = lambda i, steps, guess: guesses.append((i, steps, guess))
    out = FlowMatching(prediction).sample(model, noise, steps, sampler, normal(), progress)
    evaluations = {"heun": 2 * steps - 1, "ralston": 3 * steps - 2}
    assert len(times) == evaluations.get(sampler, steps)
    starts = np.arange(1, steps + 1) / steps  # evenly, never 0
    if sampler == "ralston":
        times = times[::3]  # between them it stops twice
        starts = np.linspace(1, 0.055, steps)[::-1]
    np.testing.assert_allclose(sorted(set(times)), starts, atol=1e-5)
    assert [i for i, _, _ in guesses] == [*range(1, steps + 1)]
    assert {n for _, n, _ in guesses} == {steps}
    assert_close(out, x0, rtol=1e-4, atol=1e-5)
    for _, _, guess in guesses:
        assert_close(guess, x0, rtol=1e-4, atol=1e-5)


def test_loss_by_hand_and_what_the_model_is_given():
    x0 = torch.randn(3, 3, 4, 4)
    noise = torch.randn(3, 3, 4, 4)
    t = torch.tensor([0.0, 0.25, 1.0])
    seen = {}

    def model(x_t, model_t, y):
        seen.update(x_t=x_t, t=model_t, y=y)
        return torch.ones_like(x_t, dtype=torch.bfloat16)

    losses = FlowMatching().losses(model, x0, t, noise, {"y": torch.arange(3)})
    assert torch.equal(seen["x_t"][0], x0[0])
    assert torch.equal(seen["x_t"][2], noise[2])
    assert_close(seen["x_t"][1], 0.75 * x0[1] + 0.25 * noise[1])
    assert seen["t"].tolist() == [0, 250, 1000]
    assert seen["y"].tolist() == [0, 1, 2]
    assert losses["loss"].dtype == torch.float32
    error = 1 - (noise - x0)
    assert_close(losses["loss"], error.square().mean(dim=(1, 2, 3)))


@pytest.mark.parametrize(
    "t, weight",
    [
        (0.5, 4.0),
        (0.2, 25.0),
    ],
)
def test_x0_prediction_is_weighted_by_one_over_t_squared(t, weight):
    """||v_pred - v||^2 = ||x0_pred - x0||^2 / t^2 down to t = 0.05."""
    x0, noise, out = torch.randn(3, 8, 3, 4, 4)
    process = FlowMatching("x0")
    model = lambda x, t: out
    losses = process.losses(model, x0, torch.full((8,), t), noise, {})
    assert_close(losses["loss"], weight * (out - x0).square().mean(dim=(1, 2, 3)))
    zeros = torch.zeros(2, 3, 4, 4)  # at t = 0 an error of 1 in x0 is one of 20 in v, not infinite
    model = lambda x, t: x + 1
    losses = process.losses(model, zeros, torch.zeros(2), zeros, {})
    assert_close(losses["loss"], torch.full((2,), 400.0))
