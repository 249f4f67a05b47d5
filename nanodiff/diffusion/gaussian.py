"""Gaussian diffusion in discrete time: schedules, respacing, losses, bits/dim, samplers.

Notation of DDPM (Ho et al. 2020, arXiv:2006.11239) with t from 0: q(x_t | x_0) = N(sqrt(alpha_bar_t) x_0,
(1 - alpha_bar_t) I). IDDPM is Nichol and Dhariwal 2021, arXiv:2102.09672.
"""

import copy
import math
import re
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from nanodiff.common import Tensors, UserError


def make_betas(schedule: str, num_timesteps: int) -> np.ndarray:
    """betas (T,) in float64.

    linear: from 1e-4 to 0.02 at T = 1000 (Ho et al.), times 1000 / T otherwise.
    cosine: alpha_bar(s) = cos^2((s + 0.008) / 1.008 * pi / 2) for s = t / T, betas capped at 0.999 (IDDPM eq. 17).
    """
    if schedule == "linear":
        betas = np.linspace(0.1 / num_timesteps, 20 / num_timesteps, num_timesteps)
    else:
        s = np.arange(num_timesteps + 1) / num_timesteps
        alpha_bar = np.cos((s + 0.008) / 1.008 * np.pi / 2) ** 2
        betas = np.minimum(1 - alpha_bar[1:] / alpha_bar[:-1], 0.999)
    if not ((betas > 0) & (betas < 1)).all():
        raise UserError(f"noise_schedule={schedule} with num_timesteps={num_timesteps} has betas outside (0, 1)")
    return betas


def space_timesteps(num_timesteps: int, spec: str) -> list[int]:
    """Timesteps to keep, ascending, as in IDDPM's code. "": all; "250": so many, evenly spaced; "10,15,20": so many
    from each third; "ddim50": every k-th, if an integer k gives 50."""
    spec = spec or str(num_timesteps)
    if not re.fullmatch("ddim[1-9][0-9]*|[1-9][0-9]*(,[1-9][0-9]*)*", spec):
        raise UserError(f'steps (sample_steps) or respacing={spec!r}; accepted: "250", "10,15,20", "ddim50" or ""')
    counts = [int(count) for count in spec.removeprefix("ddim").split(",")]
    if spec.startswith("ddim"):
        stride = math.ceil(num_timesteps / counts[0])
        timesteps = list(range(0, num_timesteps, stride))
        if len(timesteps) != counts[0]:
            raise UserError(f"respacing={spec!r}: no integer stride takes {counts[0]} of {num_timesteps} timesteps")
        return timesteps
    timesteps = []
    sections = np.array_split(np.arange(num_timesteps), len(counts))
    for section, count in zip(sections, counts):
        if count > len(section):
            raise UserError(
                f"steps (sample_steps) or respacing={spec!r}: {count} timesteps of {len(section)}; "
                f"accepted: 1 to {len(section)}"
            )
        stride = (len(section) - 1) / max(count - 1, 1)
        position = 0.0
        for _ in range(count):
            timesteps.append(int(section[round(position)]))
            position += stride  # summed, not multiplied: rounds as the published code does, also at halves
    return timesteps


# ---------------------------------------------------------------------------------------------------------------------
# Likelihoods, in nats per element


def normal_kl(mean1, log_variance1, mean2, log_variance2) -> Tensor:
    """KL(N(mean1, exp(log_variance1)) || N(mean2, exp(log_variance2)))."""
    # The terms cancel to about 1e-7 in fp32: summed in the published order to reproduce published figures
    gap = -1 + log_variance2 - log_variance1 + torch.exp(log_variance1 - log_variance2)
    return 0.5 * (gap + (mean1 - mean2) ** 2 * torch.exp(-log_variance2))


def discretized_gaussian_log_likelihood(x, mean, log_variance) -> Tensor:
    """Log probability under N(mean, exp(log_variance)) of the bin of each 8-bit pixel x = k/127.5 - 1; the end bins
    are open (Ho et al. eq. 13)."""

    def cdf(z):  # as published, good to 3e-4: erf would shift published bits/dim
        cubic = z + 0.044715 * z**3
        return 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * cubic))

    inv_std = torch.exp(-0.5 * log_variance)
    below = cdf((x - mean - 1 / 255) * inv_std)
    above = cdf((x - mean + 1 / 255) * inv_std)
    below = torch.where(x < -0.999, 0.0, below)
    above = torch.where(x > 0.999, 1.0, above)
    return torch.log((above - below).clamp(min=1e-12))


def mean_flat(x):
    return x.mean(dim=(1, 2, 3))  # (N, C, H, W) -> (N,)


# ---------------------------------------------------------------------------------------------------------------------
# Samplers: step(process, x_t, i, p, x0_last, generator, eta) -> x_{t-1}, from timestep i, an int. p: the mean and
# log_variance of p(x_{t-1} | x_t) and the prediction of x0; x0_last: the previous step's prediction, or None. To add a
# sampler, write such a function and enter it in SAMPLERS.


def full(x, i: int):
    return torch.full((len(x),), i, device=x.device)  # t (N,) int64: every image at timestep i


def ddpm(process, x_t, i, p, x0_last, generator, eta):
    """Ancestral sampling: x_{t-1} ~ p(x_{t-1} | x_t), and its mean at t = 0 (Ho et al. algorithm 2)."""
    mean, log_variance, _ = p
    if i == 0:
        return mean
    return mean + torch.exp(0.5 * log_variance) * generator.randn_like(x_t)


def ddim(process, x_t, i, p, x0_last, generator, eta):
    """DDIM (Song et al. 2020, arXiv:2010.02502, eq. 12): deterministic at eta = 0, as noisy as ddpm at eta = 1."""
    t = full(x_t, i)
    _, _, x0 = p
    eps = process.eps_from_x0(x_t, t, x0)
    coef = process.coefficients(t)
    variance = eta**2 * coef.posterior_variance  # sigma_t^2 of eq. 16
    direction = (coef.one_minus_alpha_bar_prev - variance).sqrt() * eps
    x_prev = coef.sqrt_alpha_bar_prev * x0 + direction
    if eta:
        x_prev += variance.sqrt() * generator.randn_like(x_t)
    return x_prev


def dpmpp(process, x_t, i, p, x0_last, generator, eta):
    """DPM-Solver++(2M) (Lu et al. 2022, arXiv:2211.01095, algorithm 2): second order in lambda = log(alpha / sigma)."""
    _, _, x0 = p
    if i == 0:  # lambda = infinity
        return x0
    alpha = process.tables["sqrt_alpha_bar"]
    sigma = process.tables["sqrt_one_minus_alpha_bar"]
    lam = np.log(alpha / sigma)
    h = lam[i - 1] - lam[i]
    D = x0  # the first step is DDIM's
    if x0_last is not None:
        r = (lam[i] - lam[i + 1]) / h
        c = 1 / (2 * r)
        if i == 1:  # lambda leaps at t = 0: extrapolate as if steps were even, else detail overshoots
            c = min(c, 0.5)
        D = (1 + c) * x0 - c * x0_last
    shrink = sigma[i - 1] / sigma[i]
    gain = alpha[i - 1] * math.expm1(-h)
    return x_t * shrink - D * gain  # tensors first: a numpy number on the left would give an array


SAMPLERS = {"ddpm": ddpm, "ddim": ddim, "dpm++": dpmpp}


@dataclass(eq=False)
class GaussianDiffusion:
    """A diffusion process over images (N, C, H, W); timesteps t are int64 (N,) in [0, T).

    The model outputs the `objective` and, with a learned `variance`, C more channels; it sees t, or 1000 t / T with
    `rescale_timesteps`. `clip_denoised` clamps predictions of x0 to [-1, 1] in sampling and bits/dim, not in training.
    """

    # Only objective=eps|x0|x_prev|v
    noise_schedule: str = "cosine"  # linear|cosine: betas of the Gaussian diffusion
    num_timesteps: int = 1000  # >= 1: T of the Gaussian diffusion
    rescale_timesteps: bool = True  # the model sees t in [0, 1000) whatever T is; some published models see t itself
    variance: str = "fixed_small"  # fixed_small|fixed_large|learned|learned_range: variance of p(x_{t-1}|x_t); small =
    #                                the posterior's, large = beta; learned_range is IDDPM's
    gaussian_loss: str = "mse"  # mse|rescaled_mse|kl|rescaled_kl: IDDPM's hybrid is rescaled_mse with learned variance
    objective: str = "eps"
    clip_denoised: bool = True

    kind = "Gaussian diffusion"
    is_gaussian = True
    is_map = False
    samplers = SAMPLERS
    default_sampler = "ddim"

    def __post_init__(self):
        T = self.num_timesteps
        self.num_outputs = 2 if self.variance.startswith("learned") else 1  # of the network, per channel of x_t
        self.t_end = 1000 if self.rescale_timesteps else T  # the model sees t in [0, t_end)
        self.default_steps = T if self.objective == "x_prev" else min(25, T)
        betas = make_betas(self.noise_schedule, T)
        model_t = np.arange(T) * (self.t_end / T)
        self.set_alpha_bar(np.cumprod(1 - betas), model_t)

    def set_alpha_bar(self, alpha_bar: np.ndarray, model_t: np.ndarray) -> None:
        """alpha_bar and model_t, the t that the model sees: (T,) in float64."""
        self.num_timesteps = self.t_max = len(alpha_bar)
        self.model_t = model_t
        self.alpha_bar = alpha_bar
        alpha_bar_prev = np.append(1.0, alpha_bar[:-1])
        one_minus_alpha_bar = 1 - alpha_bar
        one_minus_alpha_bar_prev = 1 - alpha_bar_prev
        self.betas = betas = 1 - alpha_bar / alpha_bar_prev
        # q(x_{t-1} | x_t, x_0), Ho et al. eqs. 6 and 7. At t = 0 the variance is 0, so its log is taken from t = 1
        posterior_variance = betas * one_minus_alpha_bar_prev / one_minus_alpha_bar
        first = posterior_variance[1] if len(betas) > 1 else betas[0]
        self.tables = {  # (T,) each, in float64
            "model_t": model_t,
            "log_betas": np.log(betas),
            "one_minus_alpha_bar_prev": one_minus_alpha_bar_prev,
            "sqrt_alpha_bar": np.sqrt(alpha_bar),
            "sqrt_alpha_bar_prev": np.sqrt(alpha_bar_prev),
            "sqrt_one_minus_alpha_bar": np.sqrt(one_minus_alpha_bar),
            "posterior_variance": posterior_variance,
            "posterior_log_variance_clipped": np.log(np.append(first, posterior_variance[1:])),
            "posterior_mean_coef1": betas * np.sqrt(alpha_bar_prev) / one_minus_alpha_bar,
            "posterior_mean_coef2": one_minus_alpha_bar_prev * np.sqrt(1 - betas) / one_minus_alpha_bar,
            "fixed_large_log_variance": np.log(np.append(first, betas[1:])),
        }
        self.on_device = {}  # device -> all tables in fp32

    def coefficients(self, t) -> SimpleNamespace:
        """Entries t (N,) of each table as fp32 (N, 1, 1, 1), as MPS has no float64."""
        device = t.device
        if device not in self.on_device:
            tables = np.stack(list(self.tables.values())).astype(np.float32)
            self.on_device[device] = torch.from_numpy(tables).to(device)
        rows = self.on_device[device][:, t, None, None, None]
        return SimpleNamespace(**dict(zip(self.tables, rows)))

    def respaced(self, steps: int | str) -> "GaussianDiffusion":
        """The process over some of its timesteps. `steps`: a number or a spec for space_timesteps.

        Kept timesteps keep their alpha_bar, which gives new betas (IDDPM section 4); the model sees the original t.
        """
        T = self.num_timesteps
        timesteps = space_timesteps(T, str(steps))
        if len(timesteps) == 1:
            timesteps = [T - 1]  # pure noise; published code keeps t = 0
        if len(timesteps) == T:
            return self
        if self.objective == "x_prev":
            raise UserError(f"steps (sample_steps)={steps}; accepted: {T}, as objective=x_prev predicts single steps")
        process = copy.copy(self)
        process.set_alpha_bar(self.alpha_bar[timesteps], self.model_t[timesteps])
        return process

    def q_sample(self, x0, t, noise):
        """x_t ~ q(x_t | x_0) (Ho et al. eq. 4)."""
        coef = self.coefficients(t)
        return coef.sqrt_alpha_bar * x0 + coef.sqrt_one_minus_alpha_bar * noise

    def noised(self, x0, i: int, noise):
        """x0 at timestep i of sampling: the image itself at -1, pure noise at T - 1."""
        if i == -1:
            return x0
        if i == self.num_timesteps - 1:
            return noise
        return self.q_sample(x0, full(x0, i), noise)

    def q_posterior(self, x0, x_t, t):
        """mean (N, C, H, W) and log_variance (N, 1, 1, 1) of q(x_{t-1} | x_t, x_0)."""
        coef = self.coefficients(t)
        mean = coef.posterior_mean_coef1 * x0 + coef.posterior_mean_coef2 * x_t
        return mean, coef.posterior_log_variance_clipped

    def eps_from_x0(self, x_t, t, x0):
        coef = self.coefficients(t)
        return (x_t - coef.sqrt_alpha_bar * x0) / coef.sqrt_one_minus_alpha_bar

    def target(self, x0, x_t, t, noise):
        """What the model should output, (N, C, H, W)."""
        if self.objective == "eps":
            return noise
        if self.objective == "x0":
            return x0
        if self.objective == "x_prev":
            return self.q_posterior(x0, x_t, t)[0]
        coef = self.coefficients(t)  # v: Salimans and Ho 2022, arXiv:2202.00512, section 4
        return coef.sqrt_alpha_bar * noise - coef.sqrt_one_minus_alpha_bar * x0

    def predict(self, model, x_t, t, **cond):
        """The model's output at x_t in fp32: the objective (N, C, H, W), and C channels of a learned variance or 0."""
        model_t = self.coefficients(t).model_t.flatten()
        out = model(x_t, model_t, **cond).float()
        return out.tensor_split([x_t.shape[1]], dim=1)

    def predict_x0(self, prediction, x_t, t):
        """The x0 that a prediction at x_t implies: the inverse of `target`."""
        coef = self.coefficients(t)
        if self.objective == "eps":
            return (x_t - coef.sqrt_one_minus_alpha_bar * prediction) / coef.sqrt_alpha_bar
        if self.objective == "x0":
            return prediction
        if self.objective == "x_prev":
            return (prediction - coef.posterior_mean_coef2 * x_t) / coef.posterior_mean_coef1
        return coef.sqrt_alpha_bar * x_t - coef.sqrt_one_minus_alpha_bar * prediction

    def p_mean_variance(self, prediction, log_variance, x_t, t, clip=False):
        """mean and log_variance of p(x_{t-1} | x_t), and x0, from the model's output: (N, C, H, W) each; a fixed
        log_variance is (N, 1, 1, 1)."""
        coef = self.coefficients(t)
        x0 = self.predict_x0(prediction, x_t, t)
        if clip:
            x0 = x0.clamp(-1, 1)
        mean, min_log = self.q_posterior(x0, x_t, t)
        if self.objective == "x_prev":
            mean = prediction
        if self.variance == "fixed_small":
            log_variance = min_log
        if self.variance == "fixed_large":
            log_variance = coef.fixed_large_log_variance
        if self.variance == "learned_range":  # -1 ... 1 interpolates from posterior variance to beta (IDDPM eq. 15)
            share = (log_variance + 1) / 2
            log_variance = share * coef.log_betas + (1 - share) * min_log
        return mean, log_variance, x0

    def denoise(self, model, x_t, t, **cond):
        """p_mean_variance of the model's output, for sampling and bits/dim: clipped if clip_denoised."""
        prediction, log_variance = self.predict(model, x_t, t, **cond)
        return self.p_mean_variance(prediction, log_variance, x_t, t, self.clip_denoised)

    def vb_term(self, p, x0, x_t, t):
        """Term t of the variational bound (Ho et al. eq. 5) in bits/dim (N,): KL, or at t = 0 -log p(x_0 | x_1).

        `p`: from p_mean_variance.
        """
        mean, log_variance, _ = p
        kl = normal_kl(*self.q_posterior(x0, x_t, t), mean, log_variance)
        nll = -discretized_gaussian_log_likelihood(x0, mean, log_variance)
        return torch.where(t == 0, mean_flat(nll), mean_flat(kl)) / math.log(2)

    def losses(self, model, x0, t, noise, cond, training=None) -> Tensors:
        """Per-image training losses (N,) in fp32: "loss" and, if it has such parts, "mse" and "vb".

        kl: term t of the bound. rescaled_kl: T times kl, whose mean over t is the whole bound. mse: the squared error
        of the prediction, plus vb if the variance is learned; the gradient of vb reaches only the variance.
        rescaled_mse: the same, with vb times T / 1000 (IDDPM eq. 16).
        """
        x_t = self.q_sample(x0, t, noise)
        prediction, log_variance = self.predict(model, x_t, t, **cond)
        scales = {"rescaled_kl": self.num_timesteps, "rescaled_mse": self.num_timesteps / 1000}

        def vb_of(prediction):
            p = self.p_mean_variance(prediction, log_variance, x_t, t)
            return scales.get(self.gaussian_loss, 1) * self.vb_term(p, x0, x_t, t)

        if self.gaussian_loss.endswith("kl"):
            return {"loss": vb_of(prediction)}
        target = self.target(x0, x_t, t, noise)
        mse = mean_flat((target - prediction) ** 2)
        if self.num_outputs == 1:
            return {"loss": mse, "mse": mse}
        vb = vb_of(prediction.detach())
        return {"loss": mse + vb, "mse": mse, "vb": vb}

    @torch.no_grad()
    def bits_per_dim(self, model, x0, cond, generator) -> Tensors:
        """The variational bound on -log2 p(x0) per dimension, for 8-bit pixels x0 in [-1, 1]; T evaluations.

        total_bpd and prior_bpd are (N,); vb, xstart_mse and mse (the error of eps) are (N, T), t = T-1 first.
        """
        terms = []  # for each timestep vb, xstart_mse and mse: (3, N)
        T = self.num_timesteps
        for i in reversed(range(T)):
            t = full(x0, i)
            noise = generator.randn_like(x0)
            x_t = self.q_sample(x0, t, noise)
            p = self.denoise(model, x_t, t, **cond)
            _, _, x0_pred = p
            eps_pred = self.eps_from_x0(x_t, t, x0_pred)
            vb = self.vb_term(p, x0, x_t, t)
            xstart_mse = mean_flat((x0_pred - x0) ** 2)
            mse = mean_flat((eps_pred - noise) ** 2)
            terms.append(torch.stack([vb, xstart_mse, mse]))
        vb, xstart_mse, mse = torch.stack(terms, dim=2)
        last = self.coefficients(full(x0, T - 1))
        zero = x0.new_zeros(())
        kl = normal_kl(last.sqrt_alpha_bar * x0, 2 * last.sqrt_one_minus_alpha_bar.log(), zero, zero)
        prior = mean_flat(kl) / math.log(2)
        return {
            "total_bpd": vb.sum(1) + prior,
            "prior_bpd": prior,
            "vb": vb,
            "xstart_mse": xstart_mse,
            "mse": mse,
        }

    @torch.no_grad()
    def sample(
        self,
        denoiser,
        noise,
        steps: int | str = "",
        sampler="ddpm",
        generator=torch,
        on_step=None,
        eta=0.0,
        start_image=None,
    ):
        """Images (N, C, H, W) from x_T = noise. `denoiser`: see make_denoiser.

        `steps`: see respaced; eta is ddim's. Step i = 1 ... steps calls on_step(i, steps, predicted x0). `start_image`
        (draw.py's StartImages): an image to start from at a later step, and the part to restore after each step.
        """
        process = self.respaced(steps)
        T = process.num_timesteps
        x_t = noise
        x0 = None
        if start_image:
            T = round(start_image.strength * T)
            x_t = process.noised(start_image.x0, T - 1, noise)
        for i in reversed(range(T)):
            time = process.model_t[i] / process.t_end
            p = process.denoise(denoiser, x_t, full(x_t, i), time=time)
            x_t = SAMPLERS[sampler](process, x_t, i, p, x0, generator, eta)
            _, _, x0 = p
            if start_image:
                is_kept = start_image.is_kept(T - i, T)
                x_t = torch.where(is_kept, process.noised(start_image.x0, i - 1, noise), x_t)
            if on_step:
                on_step(T - i, T, x0)
        return x_t
