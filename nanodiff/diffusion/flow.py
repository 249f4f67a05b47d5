"""Flow matching on straight paths (Lipman et al. 2023, arXiv:2210.02747; Liu et al. 2023, arXiv:2209.03003).

x_t = (1 - t) x0 + t noise, t in [0, 1]; the velocity v = dx_t/dt = noise - x0 is what the network learns.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch

from nanodiff.common import Tensors
from nanodiff.conditions import null_condition

# How a network sees t
TIME_INPUTS = {
    "1000t": lambda t: 1000.0 * t,  # the range that timestep_embedding is made for
    # waves 16 times slower: nearby t look alike, so rarely trained t learn from the others
    "62.5t": lambda t: 62.5 * t,
    "t": lambda t: t,  # REPA
    "1-t": lambda t: 1.0 - t,  # SiT
}
LAST_T = 0.055  # the start of ralston's last step, if steps are longer
MIN_T = 0.05  # v = (x_t - x0) / t: a smaller divisor would weight errors of x0 by more than 400


def per_image(x):
    return x.view(-1, 1, 1, 1)  # (N,) -> (N, 1, 1, 1), beside images


# Samplers: step(velocity, x, t, t_next, generator) -> (x at t_next, prediction of x0). velocity(x, t) evaluates the
# network; t and t_next are floats, or tensors that broadcast, 1 >= t > t_next >= 0; generator has randn_like, as torch
# does. To add a sampler, write such a function and enter it in SAMPLERS.


def euler(velocity, x, t, t_next, generator):
    """First order, one evaluation per step."""
    v = velocity(x, t)
    return x - (t - t_next) * v, x - t * v


def heun(velocity, x, t, t_next, generator):
    """Second order, two evaluations per step; the last step is Euler's (EDM, Karras et al. 2022, algorithm 1)."""
    v = velocity(x, t)
    h = t - t_next
    x0 = x - t * v
    if t_next == 0:  # no network call at t = 0
        return x0, x0
    v_next = velocity(x - h * v, t_next)
    return x - h / 2 * (v + v_next), x0


def ralston_step(velocity, x, t, t_next):
    """Third order, three evaluations, none at t_next (Ralston 1962)."""
    h = t - t_next
    k1 = velocity(x, t)
    k2 = velocity(x - h / 2 * k1, t - h / 2)
    k3 = velocity(x - 0.75 * h * k2, t - 0.75 * h)
    return x - h / 9 * (2 * k1 + 3 * k2 + 4 * k3), x - t * k1


def ralston(velocity, x, t, t_next, generator):
    """Third order, three evaluations per step; the last step, from t = 0.055 or less, is Euler's.

    Few training images have a smaller t, so the velocity is noisy there. Euler's step is the posterior mean.
    """
    if t_next == 0:
        return euler(velocity, x, t, t_next, generator)
    return ralston_step(velocity, x, t, t_next)


def sde(velocity, x, t, t_next, generator):
    """Euler-Maruyama for the reverse SDE with the ODE's marginals (SiT, Ma et al. 2024, arXiv:2401.08740, eq. 4).

    Backwards in time dx = [v - w/2 score] dt + sqrt(w) dW, with w = t and
    score = -E[noise | x_t] / t = -(x + (1 - t) v) / t.
    """
    v = velocity(x, t)
    h = t - t_next
    x0 = x - t * v
    if t_next == 0:  # Euler's step, without noise
        return x0, x0
    drift = v + 0.5 * (x + (1 - t) * v)
    return x - h * drift + (t * h) ** 0.5 * generator.randn_like(x), x0


SAMPLERS = {"euler": euler, "heun": heun, "ralston": ralston, "sde": sde}


@dataclass
class Training:
    """What a loss needs only in training."""

    progress: float  # fraction of the run completed
    draw: Callable  # draw(x): random numbers uniform in [0, 1), of x's shape, a row per image


@dataclass(eq=False)
class FlowMatching:
    """The network predicts `prediction`, "v" or "x0"; the loss is on v in both cases.

    x0-prediction: v = (x_t - out) / max(t, 0.05), in losses and in sampling (Li & He 2025, arXiv:2511.13720).
    `cfg_scale`, `cfg_interval`: the classifier-free guidance that the model learns, from `guided_from` of the run on.
    """

    prediction: str = "v"
    cfg_scale: float = 1.0
    cfg_interval: tuple[float, float] = (0.0, 1.0)
    time_input: str = "1000t"  # one of TIME_INPUTS
    # Only objective=flow|flow_x0
    guided_from: float = 1.0  # [0, 1]: fraction of the run after which the model itself learns cfg_scale's guidance in
    #                           cfg_interval, so that samples need none and cost half; 1 = never.
    #                           Slow waves of t, time_input=62.5t, blur the interval's ends
    # Only objective=flow|flow_x0|flow_map|flow_map_x0
    timestep_shift: float = 0.0  # >= 0: s moves t to s t / (1 + (s - 1) t), towards noise if s > 1, in samples too;
    #                       0 = 1 up to 32 pixels or latents per side, above that side / 32
    # Only objective=flow|flow_x0|flow_map|flow_map_x0, Only timesteps=auto|logit-normal
    timestep_std: float = 1.0  # > 0: standard deviation of logit(t), if t is logit-normal; below 1 favours the middle.
    #                     1.4 draws t > 0.98, where samples start, for 1 image in 370, 1.0 for 1 in 20,000

    kind = "flow matching"
    is_gaussian = False
    t_max = 1  # t is continuous, in [0, 1]
    is_map = False
    num_outputs = 1  # of the network, per channel of x_t
    samplers = SAMPLERS
    default_sampler = "ralston"
    default_steps = 9  # 25 evaluations

    def shift(self, t):
        """t with the same effect of noise on s^2 times as many pixels (Esser et al. 2024, arXiv:2403.03206, eq. 23)."""
        s = self.timestep_shift or 1
        return s * t / (1 + (s - 1) * t)

    def velocity(self, model, x_t, t, **cond):
        """v (N, C, H, W) fp32 at x_t and t (N,) in [0, 1]."""
        out = model(x_t, TIME_INPUTS[self.time_input](t), **cond).float()
        if self.prediction == "v":
            return out
        return (x_t - out) / per_image(t).clamp(min=MIN_T)

    def noised(self, x0, t, noise):
        """x_t at t, a float or a tensor that broadcasts."""
        return (1 - t) * x0 + t * noise

    def is_guided(self, t):
        """(N, 1, 1, 1) bool: True where t (N,) lies in cfg_interval."""
        low, high = self.cfg_interval
        return per_image((low <= t) & (t <= high))

    def losses(self, model, x0, t, noise, cond, training=None) -> Tensors:
        """{"loss": (N,)}: the mean squared error of v (Lipman et al., eq. 14); x0, noise (N, C, H, W), t (N,).

        `training`: a Training; None in validation.
        From `guided_from` of the run on, the model learns its own classifier-free guidance of scale w (GFT, Chen et al.
        2025, arXiv:2501.15420; Tang et al. 2025, arXiv:2502.12154). With sg = no gradient, the target becomes
            noise - x0 + (1 - 1/w) sg[v(x_t, t, y) - v(x_t, t, null)],
        whose solution is v(x_t, t, y) = null + w (class - null), with the null and class velocities of plain training.
        The bracket is 0 where the label is dropped.
        """
        x_t = self.noised(x0, per_image(t), noise)
        v = self.velocity(model, x_t, t, **cond)
        target = noise - x0
        if training and training.progress >= self.guided_from:
            null_cond = cond | null_condition(model.config, cond)
            with torch.no_grad():  # for all rows: a compiled model has one batch size
                toward_class = v - self.velocity(model, x_t, t, **null_cond)
            share = self.is_guided(t) * (1 - 1 / self.cfg_scale)
            target = target + share * toward_class
        error = (v - target).square()
        return {"loss": error.flatten(1).mean(1)}

    @torch.no_grad()
    def sample(
        self,
        denoiser,
        noise,
        steps: int,
        sampler="ralston",
        generator=torch,
        on_step=None,
        eta=0.0,
        start_image=None,
    ):
        """Images (N, C, H, W) in fp32, at t = 0, from noise at t = 1, in `steps` steps, uniform before the shift.
        `denoiser`: see make_denoiser.

        Step i = 1 ... steps calls on_step(i, steps, predicted x0). eta is ignored: it is DDIM's. `start_image`
        (draw.py's StartImages): an image to start from at a later step, and the part to restore after each step.
        """

        def velocity(x, *times):
            tensors = [torch.full((len(x),), t, device=x.device) for t in times]
            return self.velocity(denoiser, x, *tensors, time=times[0])

        times = torch.linspace(1, 0, steps + 1)
        if sampler == "ralston":
            times[:-1] = torch.linspace(1, min(LAST_T, 1 / steps), steps)
        times = self.shift(times).tolist()
        x = noise.float()
        if start_image:
            steps = round(start_image.strength * steps)
            times = times[-1 - steps :]
            x = self.noised(start_image.x0, times[0], x)
        for i, (t, t_next) in enumerate(pairwise(times), start=1):
            x, x0 = self.samplers[sampler](velocity, x, t, t_next, generator)
            if start_image:
                x = torch.where(start_image.is_kept(i, steps), self.noised(start_image.x0, t_next, noise), x)
            if on_step:
                on_step(i, steps, x0)
        return x
