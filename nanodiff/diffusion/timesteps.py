"""Which timesteps to train on: uniform, bell-weighted, logit-normal (flow matching), loss-second-moment (Gaussian).

A sampler is given uniform numbers u (N,) in [0, 1), so that the randomness stays the trainer's (who may stratify it),
and returns t (N,) with the importance weights (N,) that keep the mean of the weighted losses unbiased.
"""

import math

import torch
import torch.distributed as dist

from nanodiff.common import UserError, collective


class Uniform:
    """t = floor(u T), int64, for a Gaussian process; t = u, float, for flow matching, whose num_timesteps is 0.

    `low` and `high`, in [0, 1], are the part of the range of t that is drawn from.
    """

    def __init__(self, process, low: float = 0.0, high: float = 1.0):
        self.num_timesteps, self.low, self.high = process.num_timesteps, low, high

    def sample(self, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(t, weight), each (N,) on the device of u; weight, fp32, multiplies the image's loss."""
        u = self.low + (self.high - self.low) * u
        t = (u * self.num_timesteps).long().clamp(max=self.num_timesteps - 1) if self.num_timesteps else u
        return t, torch.ones_like(u)

    def update(self, t: torch.Tensor, losses: torch.Tensor) -> None:
        """Learn from the unweighted losses (N,) at t (N,). Every rank must call it, with equally many."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        pass


class Bell(Uniform):
    """Uniform t, weighted by exp(-2 (t - 1/2)^2) less its value at the ends, scaled to mean 1 over t in [0, 1].

    What DiffSynth-Studio fine-tunes flow matching with. Like logit-normal t, a choice of loss weighting.
    """

    def sample(self, u):
        t, _ = super().sample(u)
        end = math.exp(-0.5)
        mean = math.sqrt(math.pi / 2) * math.erf(math.sqrt(0.5)) - end  # of the bell above `end`
        bell = torch.exp(-2 * (t.float() / (self.num_timesteps or 1) - 0.5).square())
        return t, (bell - end).clamp(min=0) / mean


class LogitNormal(Uniform):
    """t = sigmoid(mean + std z), z standard normal: more of the middle (Esser et al. 2024, arXiv:2403.03206, eq. 19).

    The weights are 1: this is a choice of loss weighting, not an estimator of the uniform one.
    """

    def __init__(self, process, mean: float = 0.0, std: float = 1.0):
        super().__init__(process)
        if self.num_timesteps:
            raise UserError('timesteps="logit-normal" is for flow matching; Gaussian diffusion has discrete timesteps')
        self.mean, self.std = mean, std

    def sample(self, u):
        z = math.sqrt(2) * torch.erfinv(2 * u - 1)  # the normal's inverse CDF; torch.special.ndtri is not there on MPS
        return torch.sigmoid(self.mean + self.std * z), torch.ones_like(u)


class LossSecondMoment(Uniform):
    """p_t proportional to sqrt(E[L_t^2]) over each t's last `history` losses (IDDPM, arXiv:2102.09672, eq. 18).

    Uniform until every t has its full history; afterwards mixed with a share `uniform_prob` of uniform, as published.
    The history lives on the CPU in float64, the same on every rank.
    """

    def __init__(self, process, history: int = 10, uniform_prob: float = 0.001):
        super().__init__(process)
        if not self.num_timesteps:
            raise UserError('timesteps="loss-second-moment" is for Gaussian diffusion; flow matching has continuous t')
        self.uniform_prob = uniform_prob
        self.history = torch.zeros(self.num_timesteps, history, dtype=torch.float64)  # each row is a ring buffer
        self.seen = torch.zeros(self.num_timesteps, dtype=torch.int64)  # losses ever seen at each t

    def probabilities(self) -> torch.Tensor:
        """p_t, float64 (T,) on the CPU, summing to 1."""
        T = self.num_timesteps
        if (self.seen < self.history.shape[1]).any():
            return torch.full((T,), 1 / T, dtype=torch.float64)
        p = self.history.square().mean(dim=1).sqrt()
        return (1 - self.uniform_prob) * p / p.sum() + self.uniform_prob / T

    def sample(self, u):
        p = self.probabilities()
        t = torch.searchsorted(p.cumsum(0), u.cpu().double(), right=True).clamp(max=len(p) - 1)  # inverse CDF
        weight = 1 / (len(p) * p[t])
        return t.to(u.device), weight.to(u.device, torch.float32)

    @collective("the gathering of losses by timestep")
    @torch.no_grad()
    def update(self, t, losses):
        pairs = torch.stack([t.float(), losses.detach().float()])  # (2, N): one collective; fp32 holds any t exactly
        if dist.is_initialized():
            gathered = [torch.empty_like(pairs) for _ in range(dist.get_world_size())]
            dist.all_gather(gathered, pairs)
            pairs = torch.cat(gathered, dim=1)
        t, losses = pairs[0].cpu().long(), pairs[1].cpu().double()
        # One loss after another, all at once: sorted by t, an image's place within its group is its turn in the ring.
        order = torch.argsort(t, stable=True)
        t, losses = t[order], losses[order]
        turn = torch.arange(len(t)) - torch.searchsorted(t, t)
        count = torch.bincount(t, minlength=self.num_timesteps)
        size = self.history.shape[1]
        last = turn >= count[t] - size  # more than a ring of losses at one t: the latest would overwrite the others
        self.history[t[last], ((self.seen[t] + turn) % size)[last]] = losses[last]
        self.seen += count

    def state_dict(self):
        return {"history": self.history.clone(), "seen": self.seen.clone()}

    def load_state_dict(self, state):
        if state["history"].shape != self.history.shape:
            have, want = tuple(state["history"].shape), tuple(self.history.shape)
            raise UserError(f"loss-second-moment history of shape {have} does not fit this process: {want} is accepted")
        self.history.copy_(state["history"])
        self.seen.copy_(state["seen"])


TIMESTEPS = {"uniform": Uniform, "bell": Bell, "logit-normal": LogitNormal, "loss-second-moment": LossSecondMoment}


def make_timesteps(name: str, process, **options) -> Uniform:
    """The sampler of that name for a process: "uniform" or "bell" (low=0, high=1), "logit-normal" (mean=0, std=1; flow
    matching only) or "loss-second-moment" (history=10, uniform_prob=0.001; Gaussian only). UserError otherwise."""
    if name not in TIMESTEPS:
        raise UserError(f"timesteps={name!r} is not known; accepted: {', '.join(TIMESTEPS)}")
    return TIMESTEPS[name](process, **options)
