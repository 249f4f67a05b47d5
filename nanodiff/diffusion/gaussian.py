"""Discrete-time Gaussian diffusion (DDPM, IDDPM): schedules, respacing, losses, bits/dim, sampling.

Notation is that of Ho et al. 2020 (arXiv:2006.11239) with t counted from 0: q(x_t | x_0) = N(sqrt(alpha_bar_t) x_0,
(1 - alpha_bar_t) I) for t = 0 ... T-1; alpha_bar_prev[0] = 1 is the clean image. All that Improved DDPM (Nichol and
Dhariwal 2021, arXiv:2102.09672) trains and measures is here, and v-prediction (Salimans and Ho 2022, arXiv:2202.00512).
"""

import copy
import math

import numpy as np
import torch

from nanodiff.common import UserError
from nanodiff.diffusion.gaussian_samplers import (
    SAMPLERS,
    ddim_reverse_step,
    ddim_step,
    ddpm_step,
    dpmpp_step,
    full,
    randn_like,
)

SCHEDULES = ("linear", "cosine")
PREDICTIONS = ("eps", "x0", "x_prev", "v")
VARIANCES = ("fixed_small", "fixed_large", "learned", "learned_range")
MAX_TIMESTEPS = 10**6  # a dozen tables have as many entries
LOSSES = ("mse", "rescaled_mse", "kl", "rescaled_kl")


def _check(setting, value, accepted):
    if value not in accepted:
        raise UserError(f"{setting}={value!r} is not known; accepted: {', '.join(accepted)}")


def make_betas(schedule: str, num_timesteps: int) -> np.ndarray:
    """betas (T,) in float64: "linear" from 1e-4 to 0.02 at T = 1000, scaled by 1000/T elsewhere (Ho et al. 2020), or
    "cosine", alpha_bar(s) = cos^2((s + 0.008) / 1.008 * pi/2), betas capped at 0.999 (IDDPM eq. 17)."""
    _check("schedule", schedule, SCHEDULES)
    if not 1 <= num_timesteps <= MAX_TIMESTEPS:
        raise UserError(f"num_timesteps={num_timesteps}; accepted: 1 to {MAX_TIMESTEPS:,}")
    if schedule == "linear":
        return np.linspace(0.1 / num_timesteps, 20 / num_timesteps, num_timesteps)
    s = np.arange(num_timesteps + 1) / num_timesteps
    alpha_bar = np.cos((s + 0.008) / 1.008 * np.pi / 2) ** 2
    return np.minimum(1 - alpha_bar[1:] / alpha_bar[:-1], 0.999)


def space_timesteps(num_timesteps: int, spec: str) -> list[int]:
    """Which of the timesteps 0 ... T-1 to keep, ascending; the rule of IDDPM's published code.

    "250": that many, evenly from 0 to T-1. "10,15,20": T cut in as many equal sections, that many from each, evenly.
    "ddim50": a fixed integer stride from 0, as in the DDIM paper. "": all. Raises UserError where spec cannot be met.
    """
    if not spec:
        return list(range(num_timesteps))
    is_stride = spec.startswith("ddim")
    try:
        counts = [int(count) for count in spec.removeprefix("ddim").split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1 or (is_stride and len(counts) > 1):
        raise UserError(f'respacing={spec!r} is not understood; accepted: "250", "10,15,20", "ddim50" or ""')
    if is_stride:
        strides = [s for s in range(1, num_timesteps + 1) if len(range(0, num_timesteps, s)) == counts[0]]
        if not strides:
            raise UserError(f"respacing={spec!r}: no integer stride takes {counts[0]} of {num_timesteps} timesteps")
        return list(range(0, num_timesteps, strides[0]))
    kept, start = [], 0
    for i, count in enumerate(counts):
        size = num_timesteps // len(counts) + (i < num_timesteps % len(counts))
        if count > size:
            raise UserError(f"respacing={spec!r}: cannot take {count} timesteps from a section of {size}")
        stride, position = (size - 1) / max(count - 1, 1), 0.0
        for _ in range(count):
            kept.append(start + round(position))
            position += stride  # summed, not multiplied: the published rounding, also where it falls on a half
        start += size
    return kept


# ---------------------------------------------------------------------------------------------------------------------
# Likelihood terms, in nats per element


def normal_kl(mean1, log_variance1, mean2, log_variance2) -> torch.Tensor:
    """KL(N(mean1, exp(log_variance1)) || N(mean2, exp(log_variance2))), elementwise."""
    # -1 + lv2 - lv1 + exp(lv1 - lv2) cancels to about 1e-7 in fp32; kept in the published order, so that figures agree.
    gap = -1 + log_variance2 - log_variance1 + torch.exp(log_variance1 - log_variance2)
    return 0.5 * (gap + (mean1 - mean2) ** 2 * torch.exp(-log_variance2))


def discretized_gaussian_log_likelihood(x, mean, log_variance) -> torch.Tensor:
    """log P(x), elementwise, of N(mean, exp(log_variance)) integrated over the bins of 8-bit pixels (Ho et al. eq. 13).

    x in [-1, 1] holds the 256 values k/127.5 - 1; the bins of the two outermost reach to infinity.
    """

    def cdf(z):  # the tanh approximation of the published code, good to 3e-4; exact erf would shift published bits/dim
        return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))

    inv_std = torch.exp(-0.5 * log_variance)
    below = torch.where(x < -0.999, 0.0, cdf((x - mean - 1 / 255) * inv_std))
    above = torch.where(x > 0.999, 1.0, cdf((x - mean + 1 / 255) * inv_std))
    return torch.log((above - below).clamp(min=1e-12))


def _mean_flat(x):
    return x.mean(dim=(1, 2, 3))  # (N, C, H, W) -> (N,)


# ---------------------------------------------------------------------------------------------------------------------


class GaussianDiffusion:
    """A Gaussian diffusion process over images (N, C, H, W); timesteps t are int64 (N,) in [0, T).

    `betas` (T,) replaces the named schedule. `prediction` is what the model outputs, "learned" and "learned_range"
    (IDDPM eq. 15) variances add C more channels. `respacing` keeps a subset of the timesteps (see space_timesteps): the
    model goes on seeing the original t, times 1000/T where `rescale_timesteps`. `clip_denoised` clamps x0 predictions
    to [-1, 1] in sampling and in bits/dim, never in training; off for latents. Raises UserError for unknown names.
    """

    samplers, default_sampler = SAMPLERS, "ddim"

    def __init__(self, schedule="linear", num_timesteps=1000, prediction="eps", variance="fixed_small", loss="mse",
                 rescale_timesteps=False, respacing="", clip_denoised=True, betas=None):  # fmt: skip
        _check("prediction", prediction, PREDICTIONS)
        _check("variance", variance, VARIANCES)
        _check("loss", loss, LOSSES)
        betas = make_betas(schedule, num_timesteps) if betas is None else np.asarray(betas, dtype=np.float64)
        if betas.ndim != 1 or not len(betas) or not ((betas > 0) & (betas < 1)).all():
            raise UserError(f"betas of schedule={schedule!r} with num_timesteps={num_timesteps} are not all in (0, 1)")
        self.prediction, self.variance, self.loss, self.clip_denoised = prediction, variance, loss, clip_denoised
        self._t_scale = 1000 / len(betas) if rescale_timesteps else 1.0
        self._set_betas(betas, timestep_map=np.arange(len(betas)))
        if respacing:
            self._keep(space_timesteps(len(betas), respacing))

    def _set_betas(self, betas, timestep_map):
        """All tables in float64; `at` hands them out in fp32, so that no float64 reaches a device (MPS has none)."""
        self.num_timesteps, self.timestep_map, self.betas = len(betas), timestep_map, betas
        self.alpha_bar = np.cumprod(1 - betas)
        self.alpha_bar_prev = np.append(1.0, self.alpha_bar[:-1])
        self.alpha_bar_next = np.append(self.alpha_bar[1:], 0.0)
        self.sqrt_alpha_bar, self.sqrt_one_minus_alpha_bar = np.sqrt(self.alpha_bar), np.sqrt(1 - self.alpha_bar)
        self.sqrt_recip_alpha_bar, self.sqrt_recipm1_alpha_bar = self.alpha_bar**-0.5, np.sqrt(1 / self.alpha_bar - 1)
        self.log_one_minus_alpha_bar = np.log(1 - self.alpha_bar)
        self.sqrt_alpha_bar_prev, self.one_minus_alpha_bar_prev = np.sqrt(self.alpha_bar_prev), 1 - self.alpha_bar_prev
        # q(x_{t-1} | x_t, x_0), Ho et al. eqs. 6-7. The variance is 0 at t = 0, so its log borrows that of t = 1.
        self.posterior_variance = betas * (1 - self.alpha_bar_prev) / (1 - self.alpha_bar)
        first = self.posterior_variance[1] if len(betas) > 1 else betas[0]
        self.posterior_log_variance_clipped = np.log(np.append(first, self.posterior_variance[1:]))
        self.posterior_mean_coef1 = betas * np.sqrt(self.alpha_bar_prev) / (1 - self.alpha_bar)
        self.posterior_mean_coef2 = (1 - self.alpha_bar_prev) * np.sqrt(1 - betas) / (1 - self.alpha_bar)
        self.log_betas = np.log(betas)
        self.fixed_large_log_variance = np.log(np.append(first, betas[1:]))
        self.model_t = timestep_map * self._t_scale
        self._tables = {}  # (name, device) -> fp32 tensor (T,)

    def _keep(self, kept):
        """Restrict to these timesteps: the betas that give the same alpha_bar at each of them (IDDPM section 4)."""
        alpha_bar = self.alpha_bar[kept]
        self._set_betas(1 - alpha_bar / np.append(1.0, alpha_bar[:-1]), self.timestep_map[kept])

    def _respaced(self, kept):
        if self.prediction == "x_prev" and len(kept) < self.num_timesteps:
            raise UserError('prediction="x_prev" is of one step of its own process: it cannot be respaced afterwards')
        process = copy.copy(self)
        process._keep(kept)
        return process

    def respace(self, spec: str) -> "GaussianDiffusion":
        """A process over a subset of the timesteps (see space_timesteps) whose model sees the original ones."""
        return self._respaced(space_timesteps(self.num_timesteps, spec))

    def at(self, name, t):
        """Entries t of a table as fp32 (N, 1, 1, 1) on the device of t."""
        if (name, t.device) not in self._tables:
            self._tables[name, t.device] = torch.from_numpy(getattr(self, name).astype(np.float32)).to(t.device)
        return self._tables[name, t.device][t][:, None, None, None]

    def predict(self, model, x_t, t, **cond):
        """The model's output at (x_t, t) in fp32; here t becomes the float (N,) that the model knows."""
        return model(x_t, self.at("model_t", t).flatten(), **cond).float()

    @property
    def learned_variance(self) -> bool:
        return self.variance.startswith("learned")

    def out_channels(self, channels: int) -> int:
        """How many channels the model must output for images of `channels`."""
        return channels * (2 if self.learned_variance else 1)

    # -----------------------------------------------------------------------------------------------------------------
    # q: noising

    def q_sample(self, x0, t, noise):
        """x_t ~ q(x_t | x_0) for standard normal noise (Ho et al. eq. 4)."""
        return self.at("sqrt_alpha_bar", t) * x0 + self.at("sqrt_one_minus_alpha_bar", t) * noise

    def q_posterior(self, x0, x_t, t):
        """(mean, log_variance) of q(x_{t-1} | x_t, x_0) (Ho et al. eqs. 6-7); log_variance is (N, 1, 1, 1)."""
        mean = self.at("posterior_mean_coef1", t) * x0 + self.at("posterior_mean_coef2", t) * x_t
        return mean, self.at("posterior_log_variance_clipped", t)

    def eps_from_x0(self, x_t, t, x0):
        """The noise that leads from x0 to x_t."""
        return (x_t - self.at("sqrt_alpha_bar", t) * x0) / self.at("sqrt_one_minus_alpha_bar", t)

    def target(self, x0, x_t, t, noise):
        """What a model with this `prediction` should output."""
        if self.prediction == "v":  # Salimans and Ho 2022, section 4
            return self.at("sqrt_alpha_bar", t) * noise - self.at("sqrt_one_minus_alpha_bar", t) * x0
        return {"eps": noise, "x0": x0, "x_prev": self.q_posterior(x0, x_t, t)[0]}[self.prediction]

    # -----------------------------------------------------------------------------------------------------------------
    # p: what an output of the model means

    def predict_x0(self, out, x_t, t, clip=False):
        """The x0 that a model's output (N, C or 2C, H, W) at x_t implies: the inverse of `target`."""
        assert out.shape[1] == self.out_channels(x_t.shape[1]), (out.shape, x_t.shape, self.variance)
        out = out[:, : x_t.shape[1]]
        if self.prediction == "eps":
            out = self.at("sqrt_recip_alpha_bar", t) * x_t - self.at("sqrt_recipm1_alpha_bar", t) * out
        elif self.prediction == "v":
            out = self.at("sqrt_alpha_bar", t) * x_t - self.at("sqrt_one_minus_alpha_bar", t) * out
        elif self.prediction == "x_prev":
            out = (out - self.at("posterior_mean_coef2", t) * x_t) / self.at("posterior_mean_coef1", t)
        return out.clamp(-1, 1) if clip else out

    def p_mean_variance(self, out, x_t, t, clip=False) -> dict[str, torch.Tensor]:
        """mean, variance, log_variance and x0, each (N, C, H, W), of p(x_{t-1} | x_t) given the model's output."""
        x0 = self.predict_x0(out, x_t, t, clip)
        mean, min_log = self.q_posterior(x0, x_t, t)
        if self.prediction == "x_prev":
            mean = out[:, : x_t.shape[1]]
        if self.variance == "fixed_small":
            log_variance = min_log.expand_as(x_t)
        elif self.variance == "fixed_large":
            log_variance = self.at("fixed_large_log_variance", t).expand_as(x_t)
        else:
            log_variance = out[:, x_t.shape[1] :]
            if self.variance == "learned_range":  # -1 ... 1 spans posterior variance ... beta (IDDPM eq. 15)
                share = (log_variance + 1) / 2
                log_variance = share * self.at("log_betas", t) + (1 - share) * min_log
        return {"mean": mean, "variance": log_variance.exp(), "log_variance": log_variance, "x0": x0}

    # -----------------------------------------------------------------------------------------------------------------
    # Losses and likelihood

    def _vb(self, p, x0, x_t, t):
        """Term t of the variational bound in bits/dim (N,): L_{t-1}, or the decoder's -log p(x_0 | x_1) at t = 0."""
        mean, log_variance = self.q_posterior(x0, x_t, t)
        kl = normal_kl(mean, log_variance, p["mean"], p["log_variance"])
        nll = -discretized_gaussian_log_likelihood(x0, p["mean"], p["log_variance"])
        return torch.where(t == 0, _mean_flat(nll), _mean_flat(kl)) / math.log(2)

    def losses(self, model, x0, t, noise, **cond) -> dict[str, torch.Tensor]:
        """Per-image training losses (N,) in fp32: "loss", and its parts "mse" and "vb" where it has them.

        x0 (N, C, H, W) in [-1, 1], t (N,) int64, noise like x0; calls model(x_t, model_t, **cond). "kl" is the bound's
        term in bits/dim, "rescaled_kl" T times it, so that its mean over t estimates the whole bound. With a learned
        variance "mse" is IDDPM's hybrid (eq. 16): the vb term teaches the variance alone, the mean being stopped;
        "rescaled_mse" multiplies that term by T/1000.
        """
        x_t = self.q_sample(x0, t, noise)
        out = self.predict(model, x_t, t, **cond)
        if self.loss.endswith("kl"):
            vb = self._vb(self.p_mean_variance(out, x_t, t), x0, x_t, t)
            return {"loss": vb * self.num_timesteps if self.loss == "rescaled_kl" else vb}
        prediction = out[:, : x0.shape[1]]
        mse = _mean_flat((self.target(x0, x_t, t, noise) - prediction) ** 2)
        if not self.learned_variance:
            return {"loss": mse, "mse": mse}
        stopped = torch.cat([prediction.detach(), out[:, x0.shape[1] :]], dim=1)
        vb = self._vb(self.p_mean_variance(stopped, x_t, t), x0, x_t, t)
        if self.loss == "rescaled_mse":
            vb = vb * (self.num_timesteps / 1000)
        return {"loss": mse + vb, "mse": mse, "vb": vb}

    @torch.no_grad()
    def bits_per_dim(self, model, x0, generator=None, **cond) -> dict[str, torch.Tensor]:
        """The variational bound on -log2 p(x0) per dimension, x0 being 8-bit pixels in [-1, 1]; T calls of the model.

        total_bpd and prior_bpd (N,); vb, xstart_mse and mse (of eps) (N, T) in the published order, column 0 being
        t = T-1; total_bpd = vb.sum(1) + prior_bpd. `generator` as in `sample`.
        """
        terms = []
        for step in reversed(range(self.num_timesteps)):
            t = full(x0, step)
            noise = randn_like(x0, generator)
            x_t = self.q_sample(x0, t, noise)
            p = self.p_mean_variance(self.predict(model, x_t, t, **cond), x_t, t, self.clip_denoised)
            eps = self.eps_from_x0(x_t, t, p["x0"])
            terms.append((self._vb(p, x0, x_t, t), _mean_flat((p["x0"] - x0) ** 2), _mean_flat((eps - noise) ** 2)))
        vb, xstart_mse, mse = (torch.stack(term, dim=1) for term in zip(*terms))
        last, zero = full(x0, self.num_timesteps - 1), x0.new_zeros(())
        prior = normal_kl(self.at("sqrt_alpha_bar", last) * x0, self.at("log_one_minus_alpha_bar", last), zero, zero)
        prior = _mean_flat(prior) / math.log(2)
        return {"total_bpd": vb.sum(1) + prior, "prior_bpd": prior, "vb": vb, "xstart_mse": xstart_mse, "mse": mse}

    # -----------------------------------------------------------------------------------------------------------------
    # Sampling: the steps themselves are in gaussian_samplers.py

    def _with_steps(self, steps):
        """The process respaced to a number of steps (0 or None: all) or to a spec such as "ddim50"."""
        if isinstance(steps, str) or not steps:
            return self.respace(steps or "")
        if not 1 <= steps <= self.num_timesteps:
            raise UserError(f"steps={steps} sampling steps; accepted: 1 to {self.num_timesteps}, or 0 for all")
        if steps == 1:  # it must start from noise, not from t = 0, which the published rule keeps of one
            return self._respaced([self.num_timesteps - 1])
        return self.respace(str(steps))

    def check_sampling(self, steps, sampler: str, eta: float = 0.0) -> None:
        """UserError for settings that `sample` cannot follow."""
        _check("sampler", sampler, SAMPLERS)
        if not 0 <= eta <= 1 or (eta and sampler != "ddim"):
            raise UserError(f"eta={eta}; accepted: 0 (deterministic) to 1, for sampler=ddim")
        self._with_steps(steps)

    @torch.no_grad()
    def sample(self, denoiser, noise, steps=0, sampler="ddpm", generator=None, progress=None, eta=0.0):
        """Images (N, C, H, W) from x_T = noise, by `steps` calls of denoiser(x_t, model_t) -> prediction.

        `steps`: how many timesteps to keep, evenly from T-1 to 0 (0: all), or a respacing spec. `sampler`: "ddpm",
        "ddim" (stochastic where `eta` > 0) or "dpm++". `generator` has .randn_like(x); None is torch.randn_like.
        progress(i, steps, x0) follows step i = 1 ... steps with the present prediction of x0. Raises UserError.
        """
        self.check_sampling(steps, sampler, eta)
        process, x_t, x0 = self._with_steps(steps), noise, None
        T = process.num_timesteps
        for i, step in enumerate(reversed(range(T)), start=1):
            if sampler == "ddpm":
                x_t, x0 = ddpm_step(process, denoiser, x_t, full(x_t, step), generator)
            elif sampler == "ddim":
                x_t, x0 = ddim_step(process, denoiser, x_t, full(x_t, step), eta, generator)
            else:
                x_t, x0 = dpmpp_step(process, denoiser, x_t, step, x0)
            if progress is not None:
                progress(i, T, x0)
        return x_t

    @torch.no_grad()
    def ddim_reverse(self, denoiser, x0, steps=0):
        """The noise (N, C, H, W) from which sample(..., steps, "ddim") comes back near x0: DDIM's ODE in reverse.

        Takes x0 for x_t at t = 0, whose noise is imperceptible, since the model has seen nothing cleaner.
        """
        process, x_t = self._with_steps(steps), x0
        for step in range(process.num_timesteps - 1):
            x_t, _ = ddim_reverse_step(process, denoiser, x_t, full(x_t, step))
        return x_t
