"""One step of each sampler of a GaussianDiffusion: ancestral DDPM, DDIM and its reverse, DPM-Solver++(2M).

A step takes `process`, denoiser(x_t, model_t) -> prediction and x_t (N, C, H, W), and returns the next x and the
prediction of x0, clamped where the process says so. The loop over steps is GaussianDiffusion.sample.
"""

import math

import torch


def full(x, step):
    """t (N,) int64, every image at the same timestep."""
    return torch.full((len(x),), step, device=x.device)


def randn_like(x, generator=None):
    """Standard normal like x from anything that has .randn_like, or from torch's global generator."""
    return torch.randn_like(x) if generator is None else generator.randn_like(x)


def _predict_x0(process, denoiser, x_t, t):
    return process.predict_x0(process.predict(denoiser, x_t, t), x_t, t, process.clip_denoised)


def ddpm_step(process, denoiser, x_t, t, generator=None):
    """Ancestral sampling, x_{t-1} ~ p(x_{t-1} | x_t), its mean at t = 0 (Ho et al. 2020, arXiv:2006.11239, alg. 2)."""
    p = process.p_mean_variance(process.predict(denoiser, x_t, t), x_t, t, process.clip_denoised)
    noise = randn_like(x_t, generator) * (t > 0)[:, None, None, None]
    return p["mean"] + torch.exp(0.5 * p["log_variance"]) * noise, p["x0"]


def ddim_step(process, denoiser, x_t, t, eta=0.0, generator=None):
    """DDIM (Song et al. 2020, arXiv:2010.02502, eqs. 12 and 16) to x_{t-1}; deterministic at eta = 0."""
    x0 = _predict_x0(process, denoiser, x_t, t)
    variance = eta**2 * process.at("posterior_variance", t)  # eq. 16 squared; 0 at t = 0
    x_prev = process.at("sqrt_alpha_bar_prev", t) * x0
    x_prev = x_prev + (process.at("one_minus_alpha_bar_prev", t) - variance).sqrt() * process.eps_from_x0(x_t, t, x0)
    return (x_prev + variance.sqrt() * randn_like(x_t, generator) if eta else x_prev), x0


def ddim_reverse_step(process, denoiser, x_t, t):
    """DDIM's ODE the other way, from x_t to x_{t+1}; pure noise after t = T-1."""
    x0 = _predict_x0(process, denoiser, x_t, t)
    alpha_bar_next = process.at("alpha_bar_next", t)
    return alpha_bar_next.sqrt() * x0 + (1 - alpha_bar_next).sqrt() * process.eps_from_x0(x_t, t, x0), x0


def dpmpp_step(process, denoiser, x_t, step: int, x0_last=None):
    """DPM-Solver++(2M) (Lu et al. 2022, arXiv:2211.01095, algorithm 2) from t = step; x0_last is the last step's x0.

    First order, which is DDIM, where there is no last step, and at t = 0, whose step is infinitely long in lambda.
    """
    x0 = _predict_x0(process, denoiser, x_t, full(x_t, step))
    if step == 0:
        return x0, x0
    alpha, sigma = process.sqrt_alpha_bar, process.sqrt_one_minus_alpha_bar
    lam = lambda t: math.log(alpha[t] / sigma[t])
    h, D = lam(step - 1) - lam(step), x0
    if x0_last is not None:
        r = (lam(step) - lam(step + 1)) / h
        D = (1 + 1 / (2 * r)) * x0 - 1 / (2 * r) * x0_last
    return float(sigma[step - 1] / sigma[step]) * x_t - float(alpha[step - 1]) * math.expm1(-h) * D, x0


SAMPLERS = {"ddpm": ddpm_step, "ddim": ddim_step, "dpm++": dpmpp_step}
