"""Distributions of t in training.

t, weight = timesteps.sample(u)  # (N,) each, for u (N,) uniform in [0, 1): t and the weight of each image's loss
timesteps.update(t, losses)  # unweighted losses (N,); called by every rank with the same N
"""

import math

import torch
import torch.distributed as dist

from nanodiff.common import UserError, collective


def uniform(u, process):
    """t = floor(u T), int64; for flow matching t = u, shifted."""
    T = process.num_timesteps
    t = (u * T).long().clamp(max=T - 1) if T else process.shift(u)
    return t, torch.ones_like(u)


def bell(u, process):
    """Uniform t, weighted by exp(-2 (t - 1/2)^2) minus its end value, scaled to mean 1, as in DiffSynth-Studio."""

    def height(t):
        return (torch.exp(-2 * (t.float() / (process.num_timesteps or 1) - 0.5).square()) - math.exp(-0.5)).clamp(min=0)

    t, _ = uniform(u, process)
    everywhere, _ = uniform((torch.arange(1000, device=u.device) + 0.5) / 1000, process)
    return t, height(t) / height(everywhere).mean()


def logit_normal(u, process):
    """Sigmoid of N(0, timestep_std^2), shifted: more of the middle (Esser et al. 2024, arXiv:2403.03206, eq. 19)."""
    z = process.timestep_std * math.sqrt(2) * torch.erfinv(2 * u - 1)  # the inverse CDF; MPS lacks torch.special.ndtri
    return process.shift(torch.sigmoid(z)), torch.ones_like(u)


class Timesteps:
    """A stateless distribution, restricted to [low, high] of its u."""

    def __init__(self, draw, process, low: float = 0.0, high: float = 1.0):
        self.draw, self.process, self.low, self.high = draw, process, low, high

    def sample(self, u):
        return self.draw(self.low + (self.high - self.low) * u, self.process)

    def update(self, t, losses) -> None: ...

    def state_dict(self) -> dict:
        return {}

    def load_state_dict(self, state: dict) -> None: ...


class LossSecondMoment:
    """p_t proportional to sqrt(E[L_t^2]) over the last `history` losses at each t (IDDPM, arXiv:2102.09672, eq. 18).

    Uniform until each t has that many, then with a `uniform_prob` share of uniform. All ranks keep the same history.
    """

    def __init__(self, process, history: int = 10, uniform_prob: float = 0.001):
        self.num_timesteps, self.uniform_prob = process.num_timesteps, uniform_prob
        self.history = torch.zeros(self.num_timesteps, history, dtype=torch.float64)  # on the CPU; rows are rings
        self.seen = torch.zeros(self.num_timesteps, dtype=torch.int64)  # losses ever seen at each t

    def probabilities(self) -> torch.Tensor:
        """p_t (T,) in float64, summing to 1."""
        T = self.num_timesteps
        if (self.seen < self.history.shape[1]).any():
            return torch.full((T,), 1 / T, dtype=torch.float64)
        p = self.history.square().mean(dim=1).sqrt()
        return (1 - self.uniform_prob) * p / p.sum() + self.uniform_prob / T

    def sample(self, u):
        p = self.probabilities()
        t = torch.searchsorted(p.cumsum(0), u.cpu().double(), right=True).clamp(max=len(p) - 1)  # inverse CDF
        weight = 1 / (len(p) * p[t])  # keeps the mean loss unbiased
        return t.to(u.device), weight.to(u.device, torch.float32)

    @collective("the gathering of losses by timestep")
    @torch.no_grad()
    def update(self, t, losses) -> None:
        pairs = torch.stack([t.float(), losses.detach().float()])  # (2, N): one collective; fp32 holds any t exactly
        if dist.is_initialized():
            gathered = [torch.empty_like(pairs) for _ in range(dist.get_world_size())]
            dist.all_gather(gathered, pairs)
            pairs = torch.cat(gathered, dim=1)
        history, seen = self.history.numpy(), self.seen.numpy()  # views, whose items are cheap to set
        for t, loss in zip(pairs[0].long().tolist(), pairs[1].tolist()):
            history[t, seen[t] % history.shape[1]] = loss
            seen[t] += 1

    def state_dict(self) -> dict:
        return {"history": self.history.clone(), "seen": self.seen.clone()}

    def load_state_dict(self, state: dict) -> None:
        self.history.copy_(state["history"])
        self.seen.copy_(state["seen"])


TIMESTEPS = {"uniform": uniform, "bell": bell, "logit-normal": logit_normal, "loss-second-moment": LossSecondMoment}


def make_timesteps(name: str, process, low: float = 0.0, high: float = 1.0) -> Timesteps | LossSecondMoment:
    """The distribution `name`; "auto" is logit-normal for flow matching, else uniform."""
    if name == "auto":
        name = "uniform" if process.num_timesteps else "logit-normal"
    if name not in TIMESTEPS:
        raise UserError(f"timesteps={name!r} is unknown; accepted: {', '.join(TIMESTEPS)}")
    if name == "logit-normal" and process.num_timesteps:
        raise UserError("timesteps=logit-normal is for flow matching; Gaussian diffusion has discrete t")
    if name == "loss-second-moment":
        if not process.num_timesteps:
            raise UserError("timesteps=loss-second-moment is for Gaussian diffusion; flow matching has continuous t")
        return LossSecondMoment(process)
    return Timesteps(TIMESTEPS[name], process, low, high)


def quartile_sums(t, values, weight, process) -> torch.Tensor:
    """(2, 4) fp32: the sums of weight * values (N,) and of weight (N,) in each quarter of the range of t (N,)."""
    quarter = (t * 4 / (process.num_timesteps or 1)).long().clamp(max=3)
    is_in = quarter[:, None] == torch.arange(4, device=t.device)  # (N, 4)
    weighted = torch.stack([weight * values.detach().float(), weight.float()])  # (2, N)
    return (weighted[:, :, None] * is_in).sum(1)
