"""Flow matching on straight paths (Lipman et al. 2023, arXiv:2210.02747; Liu et al. 2023, arXiv:2209.03003).

x_t = (1 - t) x0 + t noise, t in [0, 1]; the velocity v = dx_t/dt = noise - x0 is what the network learns.
"""

import functools
from itertools import pairwise

import torch

from nanodiff.common import UserError, print0
from nanodiff.diffusion.guidance import null_condition, with_and_without

MIN_T = 0.05  # v from a predicted x0 divides by t; below this, errors in x0 would count over 400-fold


# Samplers: step(velocity, x, t, t_next, generator) -> (x at t_next, prediction of x0); velocity(x, t) is the network's,
# floats 1 >= t > t_next >= 0; a flow map's also takes r. A new sampler is one such function and its entry in SAMPLERS.


def euler(velocity, x, t, t_next, generator=torch):
    """First order, one evaluation per step."""
    v = velocity(x, t)
    return x - (t - t_next) * v, x - t * v


def heun(velocity, x, t, t_next, generator=torch):
    """Second order, two evaluations per step; the last step is Euler's (EDM, Karras et al. 2022, algorithm 1)."""
    v = velocity(x, t)
    h = t - t_next
    x0 = x - t * v
    if t_next == 0:  # no network call at t = 0
        return x0, x0
    v_next = velocity(x - h * v, t_next)
    return x - h / 2 * (v + v_next), x0


def sde(velocity, x, t, t_next, generator=torch):
    """Euler-Maruyama for the reverse SDE with the ODE's marginals (SiT, Ma et al. 2024, arXiv:2401.08740, eq. 4).

    Backwards in time dx = [v - w/2 score] dt + sqrt(w) dW; w = t, score = -E[noise | x_t] / t = -(x + (1 - t) v) / t.
    """
    v = velocity(x, t)
    h = t - t_next
    x0 = x - t * v
    if t_next == 0:  # Euler's step, without noise
        return x0, x0
    drift = v + 0.5 * (x + (1 - t) * v)
    x_next = x - h * drift + (t * h) ** 0.5 * generator.randn_like(x)
    return x_next, x0


def flow_map(velocity, x, t, t_next, generator=torch):
    """One jump, exact for a perfect flow map at any length: the mean velocity between t and t_next times their gap."""
    u = velocity(x, t, t_next)
    return x - (t - t_next) * u, x - t * u


SAMPLERS = {"euler": euler, "heun": heun, "sde": sde}
MAP_SAMPLERS = {"map": flow_map} | SAMPLERS


class FlowMatching:
    """The network predicts `prediction`, "v" or "x0"; the loss is on v in both cases.

    x0-prediction: v = (x_t - out) / max(t, 0.05), in losses and in sampling (Li & He 2025, arXiv:2511.13720).
    `timestep_shift` s moves t towards the noise in both, by `shift`. `timestep_std`: of logit(t), if t is logit-normal.
    `cfg_scale`, `cfg_interval`: the classifier-free guidance that a model learns where losses are `guided`.
    """

    num_timesteps = 0  # t is continuous
    t_end = 1000.0  # the network sees t in [0, t_end)
    samplers = SAMPLERS
    default_sampler = "heun"
    default_steps = 50
    num_uniforms = 0  # random numbers per image that losses take besides t and noise

    def __init__(
        self,
        prediction: str = "v",
        timestep_shift: float = 1.0,
        timestep_std: float = 1.0,
        cfg_scale: float = 1.0,
        cfg_interval: tuple[float, float] = (0.0, 1.0),
    ):
        self.prediction = prediction
        self.timestep_shift = timestep_shift
        self.timestep_std = timestep_std
        self.cfg_scale = cfg_scale
        self.cfg_interval = cfg_interval

    def shift(self, t):
        """The same noise level for s^2 times as many pixels (Esser et al. 2024, arXiv:2403.03206, eq. 23)."""
        s = self.timestep_shift
        return t if s == 1 else s * t / (1 + (s - 1) * t)

    def out_channels(self, channels: int) -> int:
        return channels

    def velocity(self, model, x_t, t, r=None, **cond):
        """v (N, C, H, W) fp32 at x_t and t (N,) in [0, 1]; the network sees 1000 t. Given r (N,) <= t, the mean
        velocity between t and r, which flow maps alone know."""
        if r is not None:
            cond["h"] = 50.0 * (t - r)  # fewer waves than t gets: u is smooth in r
        out = model(x_t, 1000.0 * t, **cond).float()
        if self.prediction == "v":
            return out
        w = t.view(-1, 1, 1, 1)
        return (x_t - out) / w.clamp(min=MIN_T)

    def noised(self, x0, t, noise):
        """x_t; t is a float or broadcasts."""
        return (1 - t) * x0 + t * noise

    def training_inputs(self, guided: bool, u) -> dict:
        """What losses take in training, beyond a validation loss: is guidance learned by now; u (num_uniforms, N)."""
        return {"guided": guided}

    def is_guided(self, t):
        """(N, 1, 1, 1) bool: does t lie in the interval of guidance?"""
        low, high = self.cfg_interval
        inside = (low <= t) & (t <= high)
        return inside.view(-1, 1, 1, 1)

    def losses(self, model, x0, t, noise, guided=False, **cond) -> dict[str, torch.Tensor]:
        """{"loss": (N,)}: the mean squared error of v (Lipman et al., eq. 14); x0, noise (N, C, H, W), t (N,).

        `guided`: the model learns its own classifier-free guidance of scale w (GFT, Chen et al. 2025, arXiv:2501.15420;
        Tang et al. 2025, arXiv:2502.12154). With sg = no gradient, the target becomes
            v + (1 - 1/w) sg[v(x_t, t, y) - v(x_t, t, null)],
        which the model meets where v(x_t, t, y) is null + w (class - null) of plain training. The bracket is 0 where
        the label is dropped.
        """
        w = t.view(-1, 1, 1, 1)
        x_t = self.noised(x0, w, noise)
        v = self.velocity(model, x_t, t, **cond)
        target = noise - x0
        if guided:
            unlabelled = cond | null_condition(model.config, cond)
            with torch.no_grad():  # for all rows: a compiled model has one batch size
                toward_class = v - self.velocity(model, x_t, t, **unlabelled)
            share = self.is_guided(t) * (1 - 1 / self.cfg_scale)
            target = target + share * toward_class
        return {"loss": (v - target).square().flatten(1).mean(1)}

    @torch.no_grad()
    def sample(
        self,
        denoiser,
        noise,
        steps: int,
        sampler="heun",
        generator=torch,
        progress=None,
        eta=0.0,
        known=None,
    ):
        """Images (N, C, H, W) in fp32, at t = 0, from noise at t = 1, in `steps` steps, uniform before the shift.

        Step i = 1 ... steps calls progress(i, steps, predicted x0). eta is for DDIM alone. `known`, of
        sampling/given.py: an image to start from at a later step, and the part of it to put back after each step.
        """

        def velocity(x, *times):
            times = [torch.full((len(x),), t, device=x.device) for t in times]
            return self.velocity(denoiser, x, *times)

        times = self.shift(torch.linspace(1, 0, steps + 1)).tolist()
        x = noise.float()
        if known is not None and known.strength < 1:
            steps = round(known.strength * steps)
            times = times[-1 - steps :]
            x = self.noised(known.x0, times[0], x)
        for i, (t, t_next) in enumerate(pairwise(times), start=1):
            x, x0 = self.samplers[sampler](velocity, x, t, t_next, generator)
            if known is not None:
                x = torch.where(known.mask, self.noised(known.x0, t_next, noise), x)
            if progress is not None:
                progress(i, steps, x0)
        return x


class FlowMap(FlowMatching):
    """Flow matching in one to four steps: the network also sees r <= t and learns the mean velocity u(x_t, t, r).

    It is tuned from a flow model, its `teacher`, whose velocity v is guided by cfg_scale (Boffi et al. 2025,
    arXiv:2505.18825, the Lagrangian form without a derivative). For r < m < t, m near r, and sg = no gradient:
        x_m = x_t - (t - m) sg u(x_t, t, m)
        (t - r) u(x_t, t, r)  <-  (t - m) sg u(x_t, t, m) + (m - r) v(x_m, m)
    At r = t this is u <- v(x_t, t), which keeps the other samplers alive.
    """

    samplers = MAP_SAMPLERS
    default_sampler = "map"
    default_steps = 4
    num_uniforms = 3
    teacher = None  # for training

    def learn_from(self, teacher) -> None:
        """`teacher`: a trained flow model (formats.load.Loaded)."""
        if teacher is None or teacher.process.num_timesteps:
            raise UserError("objective=flow_map tunes a flow run: give its name as init_from")
        if self.cfg_scale != 1 and not teacher.can_guide:
            print0(f"cfg_scale={self.cfg_scale} is ignored: {teacher.source} cannot be guided, or has learned guidance")
            self.cfg_scale = 1.0
        self.teacher = teacher

    def training_inputs(self, guided: bool, u) -> dict:
        return {"u": u}

    def teacher_velocity(self, x_t, t, **cond):
        """v (N, C, H, W) at x_t and t (N,), guided."""
        velocity, model = self.teacher.process.velocity, self.teacher.model
        if self.cfg_scale == 1:
            return velocity(model, x_t, t, **cond)
        null = null_condition(model.config, cond)
        v, v_null = with_and_without(functools.partial(velocity, model), x_t, t, cond, null)
        guided = v_null + self.cfg_scale * (v - v_null)
        return torch.where(self.is_guided(t), guided, v)

    def losses(self, model, x0, t, noise, u=None, **cond) -> dict[str, torch.Tensor]:
        """{"loss": (N,)}: of u, given u (3, N) uniform in [0, 1); without, the plain loss of v, for validation."""
        if u is None:
            return super().losses(model, x0, t, noise, **cond)
        u_r, u_m, u_kind = u
        # Sampling jumps from t = 1 and to r = 0, which random numbers never hit: 25% of rows start at t = 1, 10% end at
        # r = 0, 20% do both. 25% jump from a random t to a random r, and in 20% r = t.
        t = torch.where(u_kind < 0.45, 1.0, t)
        r = torch.where((u_kind > 0.25) & (u_kind < 0.55), 0.0, t * u_r)
        jumps = u_kind < 0.8
        r = torch.where(jumps, r, t)
        share = torch.where(jumps, 0.25 * u_m, 1.0)  # (m - r) / (t - r)
        m = r + share * (t - r)
        w, gap, share = (x.view(-1, 1, 1, 1) for x in (t, t - m, share))
        x_t = self.noised(x0, w, noise)
        with torch.no_grad():
            u_tm = self.velocity(model, x_t, t, m, **cond)
            target = (1 - share) * u_tm + share * self.teacher_velocity(x_t - gap * u_tm, m, **cond)
        error = self.velocity(model, x_t, t, r, **cond) - target
        # |error|, smooth near 0: squares are ruled by a few large errors, and one jump then draws worse (runs/LOG.md)
        smooth_l1 = (error.square() + 0.1**2).sqrt() - 0.1
        return {"loss": smooth_l1.flatten(1).mean(1)}
