"""Gaussian diffusion against improved-diffusion's figures, and on Gaussian data, of which all is known."""

import functools
import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import conftest
import figures
import numpy as np
import pytest
import torch
from figures import assert_figures
from gaussian_oracle import GaussianOracle
from numpy.testing import assert_allclose
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nanodiff.common import StackedGenerator
from nanodiff.diffusion.gaussian import SAMPLERS, GaussianDiffusion, ddim, ddpm, space_timesteps

golden = conftest.golden("gaussian.json")
SHAPE = (4, 3, 4, 4)
wave = functools.partial(figures.wave, salt=golden["salt"])

MEAN = [0.3, -0.5, 0.1]
COVARIANCE = [
    [0.5, 0.3, 0.0],
    [0.3, 0.4, -0.1],
    [0.0, -0.1, 0.2],
]
oracle = GaussianOracle(MEAN, COVARIANCE)


def toy_model(learned):
    def model(x, t, time=None):
        out = 0.6 * x + 0.2 * torch.sin(3 * x) + 0.0003 * t[:, None, None, None]
        return torch.cat([out, torch.tanh(0.7 * x)], dim=1) if learned else out

    return model


def wave_noise():
    """Stands in for a generator: the k-th draw is wave(shape, k, 1), from k = 101 on."""
    k = itertools.count(101)
    return SimpleNamespace(randn_like=lambda x: wave(x.shape, next(k)))


@pytest.mark.parametrize("name", ["linear-1000", "linear-4000", "cosine-1000", "cosine-4000"])
def test_published_schedules(name):
    schedule = name.split("-")[0]
    T = int(name.split("-")[1])
    process = GaussianDiffusion(schedule, T)
    rows = [0, 1, 2, 9, T // 4, T // 2, 3 * T // 4, T - 2, T - 1]
    tables = process.tables | {"betas": process.betas, "alphas_cumprod": process.alpha_bar}
    for table, values in golden["schedules"][name].items():
        assert_allclose(tables[table][rows], values, rtol=1e-9, err_msg=table)


def test_published_respacing():
    for key, figure in golden["respacing"].items():
        T, spec = key.split(":")
        kept = space_timesteps(int(T), spec)
        assert kept == sorted(set(kept))
        assert len(kept) == figure["count"], key
        assert kept[:12] == figure["first"], key
        assert kept[-12:] == figure["last"], key
        assert sum(kept) == figure["sum"], key


def row_name(row):
    return f"{row['mean']}-{row['var']}-{row['loss']}-T{row['T']}-{row['respacing']}"


@pytest.mark.parametrize("row", golden["losses"]["rows"], ids=row_name)
def test_published_losses(row):
    prediction = {"EPSILON": "eps", "START_X": "x0", "PREVIOUS_X": "x_prev"}[row["mean"]]
    kind = (row["var"].lower(), row["loss"].lower(), prediction)
    process = GaussianDiffusion(row["schedule"], row["T"], row["rescale_timesteps"], *kind)
    process = process.respaced(row["respacing"])
    model = toy_model(process.num_outputs == 2)
    x0 = wave(SHAPE, 0, 0.8)
    noise = wave(SHAPE, 1, 1.0)
    losses = process.losses(model, x0, torch.tensor(row["t"]), noise, {})
    assert losses.keys() == row["losses"].keys()
    for name, values in row["losses"].items():
        assert_allclose(losses[name], values, rtol=1e-5, atol=1e-7, err_msg=name)


def test_published_steps_loops_and_bits_per_dim():
    process = GaussianDiffusion("linear", 1000, True, "learned_range", "rescaled_mse").respaced("20")
    model = toy_model(learned=True)
    want = golden["steps"]
    x_t = wave(SHAPE, 2, 1)
    mean, log_variance, x0 = process.denoise(model, x_t, torch.tensor(want["t"]))
    p = {
        "mean": mean,
        "log_variance": log_variance,
        "pred_xstart": x0,
        "variance": log_variance.exp(),
    }
    for name, figure in want["p_mean_variance"].items():
        assert_figures(p[name], figure)

    def steps(sampler, generator=None, eta=0.0):
        """One step of each image, each from its own timestep."""
        rows = zip(want["t"], *(x.split(1) for x in (x_t, mean, log_variance, x0)))
        return torch.cat([sampler(process, x, i, p, None, generator, eta) for i, x, *p in rows])

    def noise_of_rows(first):  # the published noise (N, C, H, W) image by image; ddpm draws none at t = 0
        rows = iter(wave(SHAPE, 101, 1).split(1)[first:])
        return SimpleNamespace(randn_like=lambda x: next(rows))

    assert_figures(steps(ddpm, generator=noise_of_rows(first=1)), want["p_sample"])
    assert_figures(steps(ddim, eta=0.0), want["ddim eta=0"])
    noisy = steps(ddim, eta=0.5, generator=noise_of_rows(first=0))
    assert_figures(noisy, want["ddim eta=0.5"])

    x0 = process.sample(model, x_t, sampler="ddpm", generator=wave_noise())
    assert_figures(x0, want["p_sample_loop"])
    assert_figures(process.sample(model, x_t, sampler="ddim"), want["ddim_sample_loop"])
    bpd = process.bits_per_dim(model, wave(SHAPE, 0, 0.8), {}, wave_noise())
    want = want["bits_per_dim"]
    assert_allclose(bpd["total_bpd"], want["total_bpd"], rtol=1e-5)
    # The published prior is a difference of numbers near 1 in fp32, good to about 1e-7.
    assert_allclose(bpd["prior_bpd"], want["prior_bpd"], atol=3e-7)
    for name in ("vb", "xstart_mse", "mse"):
        assert_figures(bpd[name], want[name])


@pytest.mark.parametrize("prediction", ["eps", "x0", "x_prev", "v"])
def test_predictions_are_reparametrisations(prediction):
    """Fed the truth, they give x0 and the reverse mean, and have neither MSE nor, but for the decoder at t = 0, KL."""
    g = torch.Generator().manual_seed(0)
    x0 = torch.rand(40, 3, 2, 2, generator=g) * 2 - 1
    noise = torch.randn(40, 3, 2, 2, generator=g)
    t = torch.arange(0, 40)
    process = GaussianDiffusion("cosine", 50, objective=prediction, gaussian_loss="mse")
    kl = replace(process, gaussian_loss="kl")
    x_t = process.q_sample(x0, t, noise)
    out = process.target(x0, x_t, t, noise)
    assert_close(process.predict_x0(out, x_t, t), x0, rtol=0, atol=2e-5)
    mean, _, _ = process.p_mean_variance(out, None, x_t, t)
    assert_close(mean, process.q_posterior(x0, x_t, t)[0], rtol=0, atol=2e-5)
    assert process.losses(lambda *_: out, x0, t, noise, {})["loss"].max() < 1e-10
    loss = kl.losses(lambda *_: out, x0, t, noise, {})["loss"]
    assert loss[1:].abs().max() < 1e-5
    assert loss[0] > 0.1


@pytest.mark.parametrize("loss", ["mse", "rescaled_mse", "kl", "rescaled_kl"])
def test_gradients_of_the_hybrid(loss):
    """With a learned variance, MSE alone teaches the mean and the bound alone the variance; KL teaches both."""
    process = GaussianDiffusion("cosine", 100, variance="learned_range", gaussian_loss=loss)
    out = torch.zeros(4, 6, 2, 2, requires_grad=True)
    x0 = torch.full((4, 3, 2, 2), 0.5)
    noise = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    t = torch.tensor([0, 1, 50, 99])
    losses = process.losses(lambda *_: out, x0, t, noise, {})

    def teaches(loss):
        (grad,) = torch.autograd.grad(loss.sum(), out, retain_graph=True)
        assert grad.isfinite().all()
        return [bool(part.any()) for part in grad.chunk(2, dim=1)]

    if "vb" in losses:
        assert teaches(losses["vb"]) == [False, True]
        assert teaches(losses["mse"]) == [True, False]
        kl = replace(process, gaussian_loss="kl").losses(lambda *_: out, x0, t, noise, {})
        scale = 0.1 if loss == "rescaled_mse" else 1.0
        assert_close(losses["vb"], scale * kl["loss"])
    assert teaches(losses["loss"]) == [True, True]


def test_bits_per_dim_of_the_exact_model_is_the_entropy():
    """Gaussian data have Gaussian reverse steps of any length, so the bound is tight: bits/dim = entropy in bins."""
    process = GaussianDiffusion("linear", 40, False, "learned", objective="x0", clip_denoised=False)
    g = torch.Generator().manual_seed(0)
    x0 = 0.2 * torch.randn(500, 24, 1, 1, generator=g)
    variance = 0.2**2
    tables = process.tables

    def exact_reverse(x_t, t):  # p(x_{t-1} | x_t) with "learned" log-variance
        t = int(t[0])
        alpha_bar = process.alpha_bar[t]
        marginal = alpha_bar * variance + 1 - alpha_bar
        x0 = math.sqrt(alpha_bar) * variance / marginal * x_t
        x0_variance = variance * (1 - alpha_bar) / marginal  # of x0 given x_t
        coef = tables["posterior_mean_coef1"][t]
        reverse_variance = tables["posterior_variance"][t] + coef**2 * x0_variance
        log_variance = math.log(max(reverse_variance, 1e-20))
        return torch.cat([x0, torch.full_like(x0, log_variance)], dim=1)

    bpd = process.bits_per_dim(exact_reverse, x0, {}, StackedGenerator(range(500)))
    entropy = 0.5 * math.log2(2 * math.pi * math.e * variance) + math.log2(255 / 2)
    assert bpd["total_bpd"].mean().item() == pytest.approx(entropy, abs=0.03)
    last = process.alpha_bar[-1]
    prior = last * (x0**2).mean((1, 2, 3)) - last - math.log(1 - last)
    assert_close(bpd["prior_bpd"], (prior / 2 / math.log(2)).float(), rtol=1e-3, atol=1e-9)


class NoFloat64(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            assert not isinstance(x, torch.Tensor) or x.dtype != torch.float64, func
        return out


def test_losses_are_fp32_and_no_float64_reaches_the_device():
    process = GaussianDiffusion("cosine", 4, variance="learned_range", gaussian_loss="rescaled_mse")
    model = lambda x, t, time=None: torch.cat([x, torch.tanh(x)], dim=1).bfloat16()
    x = torch.randn(4, 3, 2, 2)
    with NoFloat64():
        losses = process.losses(model, x, torch.arange(4), x, {})
        for value in losses.values():
            assert value.dtype == torch.float32
            assert value.shape == (4,)
        process.bits_per_dim(model, x, {}, torch)
        for sampler in SAMPLERS:
            eta = 0.5 if sampler == "ddim" else 0.0
            process.sample(model, x, 3, sampler, eta=eta)


@pytest.mark.parametrize(
    "lengths",
    [
        (1, 1),
        (1, 3),
    ],
    ids=["even", "alternating"],
)
@pytest.mark.parametrize(
    "sampler,order",
    [
        ("ddim", 1),
        ("dpm++", 2),
    ],
)
def test_orders_of_convergence(sampler, order, lengths):
    """In the step of log(alpha / sigma), also where steps are uneven: here they are laid out from 2 to -3."""
    noise = torch.randn(20, 3, 1, 1, generator=torch.Generator().manual_seed(0))
    errors = []
    process = GaussianDiffusion(objective="x0", clip_denoised=False)
    scales = lambda t: np.sqrt([process.alpha_bar[t], 1 - process.alpha_bar[t]])
    perfect = lambda x_t, t, time: oracle.x0(x_t, *scales(int(t[0]))).float()
    for n in (40, 80, 160):
        places = np.append(0, np.cumsum(np.resize(lengths, n)))
        lam = 2 - 5 * places / places[-1]
        alpha_bar = 1 / (1 + np.exp(-2 * lam))
        process.set_alpha_bar(alpha_bar, np.arange(len(alpha_bar)))
        start = scales(-1)
        end = scales(0)
        exact = oracle.x0(oracle.ode(noise, start, end), *end)  # the last step takes x_t at t = 0 to its E[x0 | x_t]
        error = process.sample(perfect, noise, sampler=sampler) - exact
        errors.append(error.square().mean().sqrt().item())
    assert_allclose(-np.diff(np.log2(errors)), order, atol=0.15)


@pytest.mark.parametrize("steps", [10, 25, 50])
def test_few_steps_keep_the_deviation_of_data(steps):
    """dpm++ does, within 5%, though lambda leaps at the end."""
    process = GaussianDiffusion("cosine", objective="x0", rescale_timesteps=True)
    std = 0.3

    def perfect(x, t, time):
        coef = process.coefficients(t.round().long())
        alpha = coef.sqrt_alpha_bar
        sigma = coef.sqrt_one_minus_alpha_bar
        variance = (alpha * std) ** 2 + sigma**2
        return alpha * std**2 / variance * x

    noise = torch.linspace(-2, 2, 9).view(9, 1, 1, 1)
    drawn = process.sample(perfect, noise, steps, "dpm++")
    assert (drawn.std() / noise.std()).item() == pytest.approx(std, rel=0.05)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_progress_and_steps(sampler):
    process = GaussianDiffusion("linear", 100, rescale_timesteps=True)
    x_T = torch.randn(2, 3, 4, 4)
    ts = []
    calls = []
    denoiser = lambda x, t, time: ts.append(t[0].item()) or 0.1 * x
    progress = lambda i, steps, x0: calls.append((i, steps, x0))
    out = process.sample(denoiser, x_T, 5, sampler, on_step=progress)
    assert [i for i, _, _ in calls] == [1, 2, 3, 4, 5]
    assert {steps for _, steps, _ in calls} == {5}
    expected = [10 * t for t in reversed(space_timesteps(100, "5"))]
    assert ts == pytest.approx(expected)
    assert_close(out, calls[-1][2])
    for steps, asked in (
        ("", 100),
        (1, 1),
        ("1", 1),
    ):
        ts.clear()
        process.sample(denoiser, x_T, steps, sampler)
        assert len(ts) == asked
        assert ts[0] == pytest.approx(990)  # also one step starts from noise


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize(
    "clip, expected",
    [
        (True, 1.0),
        (False, 3.0),
    ],
)
def test_clipping(sampler, clip, expected):
    process = GaussianDiffusion("cosine", 20, objective="x0", clip_denoised=clip)
    model = lambda x, t, time: torch.full_like(x, 3.0)
    noise = torch.randn(1, 1, 2, 2)
    x0 = process.sample(model, noise, sampler=sampler)
    assert_close(x0, torch.full_like(x0, expected))
