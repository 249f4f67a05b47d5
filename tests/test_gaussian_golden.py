"""Gaussian diffusion against the figures of OpenAI's improved-diffusion."""

import functools

import conftest
import figures
import numpy as np
import pytest
import torch
from figures import assert_figures

from nanodiff.diffusion.gaussian import GaussianDiffusion, ddim, ddpm, space_timesteps

golden = conftest.golden("gaussian.json")
SHAPE = (4, 3, 4, 4)


wave = functools.partial(figures.wave, salt=golden["salt"])


def toy_model(learned):
    def model(x, t, at=None):
        out = 0.6 * x + 0.2 * torch.sin(3 * x) + 0.0003 * t[:, None, None, None]
        return torch.cat([out, torch.tanh(0.7 * x)], dim=1) if learned else out

    return model


class WaveNoise:
    """Stands in for a generator: the k-th draw is wave(shape, k, 1), from k = 101 or 102 on."""

    def __init__(self, k=101):
        self.k = k

    def randn_like(self, x):
        self.k += 1
        return wave(x.shape, self.k - 1)


@pytest.mark.parametrize("name", ["linear-1000", "linear-4000", "cosine-1000", "cosine-4000"])
def test_published_schedules(name):
    schedule, T = name.split("-")[0], int(name.split("-")[1])
    process = GaussianDiffusion(schedule, T)
    rows = [0, 1, 2, 9, T // 4, T // 2, 3 * T // 4, T - 2, T - 1]
    tables = process.tables | {"betas": process.betas, "alphas_cumprod": process.alpha_bar}
    for table, values in golden["schedules"][name].items():
        np.testing.assert_allclose(tables[table][rows], values, rtol=1e-9, err_msg=table)


def test_published_respacing():
    for key, figure in golden["respacing"].items():
        T, spec = key.split(":")
        kept = space_timesteps(int(T), spec)
        assert kept == sorted(set(kept))
        assert (len(kept), kept[:12], kept[-12:], sum(kept)) == (
            figure["count"], figure["first"], figure["last"], figure["sum"],
        ), key  # fmt: skip


@pytest.mark.parametrize(
    "row", golden["losses"]["rows"], ids=lambda r: f"{r['mean']}-{r['var']}-{r['loss']}-T{r['T']}-{r['respacing']}"
)
def test_published_losses(row):
    prediction = {"EPSILON": "eps", "START_X": "x0", "PREVIOUS_X": "x_prev"}[row["mean"]]
    process = GaussianDiffusion(
        row["schedule"], row["T"], prediction, row["var"].lower(), row["loss"].lower(), row["rescale_timesteps"]
    ).respaced(row["respacing"])
    model = toy_model(process.learned_variance)
    losses = process.losses(model, wave(SHAPE, 0, 0.8), torch.tensor(row["t"]), wave(SHAPE, 1, 1.0), {})
    assert losses.keys() == row["losses"].keys()
    for name, values in row["losses"].items():
        np.testing.assert_allclose(losses[name], values, rtol=1e-5, atol=1e-7, err_msg=name)


@pytest.fixture
def published():
    """The process of the published single steps and loops, and its model."""
    process = GaussianDiffusion("linear", 1000, "eps", "learned_range", "rescaled_mse", rescale_timesteps=True)
    return process.respaced("20"), toy_model(learned=True)


def test_published_steps(published):
    process, model = published
    want = golden["steps"]
    x_t = wave(SHAPE, 2, 1)
    p = process.denoise(model, x_t, torch.tensor(want["t"]))
    p |= {"pred_xstart": p["x0"], "variance": p["log_variance"].exp()}
    for name, figure in want["p_mean_variance"].items():
        assert_figures(p[name], figure)

    def steps(sampler, **options):
        """One step of each image, each from its own timestep."""
        rows = [sampler(process, model, x_t[n : n + 1], i, **options) for n, i in enumerate(want["t"])]
        return torch.cat([x for x, _ in rows])

    class Rows:  # hands out the published noise (N, C, H, W) image by image; ddpm draws none at t = 0
        def __init__(self, first):
            self.rows = iter(wave(SHAPE, 101, 1).split(1)[first:])
            self.randn_like = lambda x: next(self.rows)

    assert_figures(steps(ddpm, generator=Rows(first=1)), want["p_sample"])
    assert_figures(steps(ddim, eta=0.0), want["ddim eta=0"])
    assert_figures(steps(ddim, eta=0.5, generator=Rows(first=0)), want["ddim eta=0.5"])


def test_published_loops(published):
    process, model = published
    noise = wave(SHAPE, 2, 1)
    x0 = process.sample(model, noise, sampler="ddpm", generator=WaveNoise())
    assert_figures(x0, golden["steps"]["p_sample_loop"])
    assert_figures(process.sample(model, noise, sampler="ddim"), golden["steps"]["ddim_sample_loop"])


def test_published_bits_per_dim(published):
    process, model = published
    bpd, want = process.bits_per_dim(model, wave(SHAPE, 0, 0.8), {}, WaveNoise()), golden["steps"]["bits_per_dim"]
    np.testing.assert_allclose(bpd["total_bpd"], want["total_bpd"], rtol=1e-5)
    # The published prior is a difference of numbers near 1 in fp32, good to about 1e-7.
    np.testing.assert_allclose(bpd["prior_bpd"], want["prior_bpd"], atol=3e-7)
    for name in ("vb", "xstart_mse", "mse"):
        assert_figures(bpd[name], want[name])
