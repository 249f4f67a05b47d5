"""The samplers of Gaussian diffusion, on Gaussian data, whose perfect model is known; the contract of sample()."""

import numpy as np
import pytest
import torch
from gaussian_oracle import GaussianOracle

from nanodiff.diffusion.gaussian import SAMPLERS, GaussianDiffusion, space_timesteps

MEAN = [0.3, -0.5, 0.1]
COV = [[0.5, 0.3, 0.0], [0.3, 0.4, -0.1], [0.0, -0.1, 0.2]]
oracle = GaussianOracle(MEAN, COV)


@pytest.mark.parametrize("sampler,eta", [("ddpm", 0.0), ("ddim", 0.5)])
def test_stochastic_samplers_reach_the_data(sampler, eta):
    process = GaussianDiffusion("cosine", 500, "v", clip_denoised=False)
    torch.manual_seed(0)
    x0 = process.sample(oracle.denoiser(process), torch.randn(10_000, 3, 1, 1), 250, sampler, eta=eta)
    x0 = x0.flatten(1).double().numpy()
    np.testing.assert_allclose(x0.mean(0), MEAN, atol=0.03)
    np.testing.assert_allclose(np.cov(x0.T), COV, atol=0.03)


@pytest.mark.parametrize("lengths", [(1, 1), (1, 3)], ids=["even", "alternating"])
@pytest.mark.parametrize("sampler,order", [("ddim", 1), ("dpm++", 2)])
def test_orders_of_convergence(sampler, order, lengths):
    """Towards the ODE's exact solution DDIM is of first order in the step of lambda = log(alpha/sigma), DPM++(2M) of
    second, also where the steps are uneven. The timesteps are laid out in lambda from 2 to -3."""
    noise = torch.randn(20, 3, 1, 1, generator=torch.Generator().manual_seed(0))
    errors = []
    for n in (40, 80, 160):
        lam = np.append(0, np.cumsum(np.resize(lengths, n)))
        alpha_bar = 1 / (1 + np.exp(-2 * (2 - 5 * lam / lam[-1])))
        betas = 1 - alpha_bar / np.append(1, alpha_bar[:-1])
        process = GaussianDiffusion(objective="x0", clip_denoised=False)
        process.set_betas(betas, np.arange(len(betas)))
        start, end = (np.sqrt([alpha_bar[t], 1 - alpha_bar[t]]) for t in (-1, 0))
        exact = oracle.x0(oracle.ode(noise, start, end), *end)  # the last step takes x_t at t = 0 to its E[x0 | x_t]
        x0 = process.sample(oracle.denoiser(process), noise, sampler=sampler)
        errors.append((x0 - exact).square().mean().sqrt().item())
    np.testing.assert_allclose(-np.diff(np.log2(errors)), order, atol=0.15)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_progress_and_steps(sampler):
    process = GaussianDiffusion("linear", 100, rescale_timesteps=True)
    x_T, ts, calls = torch.randn(2, 3, 4, 4), [], []
    denoiser = lambda x, t: ts.append(t[0].item()) or 0.1 * x
    out = process.sample(denoiser, x_T, 5, sampler, progress=lambda i, steps, x0: calls.append((i, steps, x0)))
    assert [(i, steps) for i, steps, _ in calls] == [(i, 5) for i in range(1, 6)]
    assert ts == pytest.approx([10 * t for t in reversed(space_timesteps(100, "5"))])
    torch.testing.assert_close(out, calls[-1][2])
    for steps, asked in (("", 100), (100, 100), (1, 1)):
        ts.clear()
        process.sample(denoiser, x_T, steps, sampler)
        assert len(ts) == asked and ts[0] == pytest.approx(990)  # also one step starts from noise


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("clip, expected", [(True, 1.0), (False, 3.0)])
def test_clipping(sampler, clip, expected):
    process = GaussianDiffusion("cosine", 20, "x0", clip_denoised=clip)
    x0 = process.sample(lambda x, t: torch.full_like(x, 3.0), torch.randn(1, 1, 2, 2), sampler=sampler)
    torch.testing.assert_close(x0, torch.full_like(x0, expected))
