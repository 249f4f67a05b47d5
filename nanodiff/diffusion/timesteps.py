"""Distributions of t in training.

t, weight = timesteps.sample(u)  # (N,) each, for u (N,) uniform in [0, 1): t and the weight of each image's loss
timesteps.record(t, losses)  # of all micro-steps, (M, B), losses unweighted; a collective; may wait for the GPU

To add a distribution, write a function of u and the process, and enter it in the table for its kind of process.
"""

import math

import torch
import torch.distributed as dist

from nanodiff.common import UserError
from nanodiff.dist import collective


def uniform(u, process):
    """t = floor(u T), int64; for flow matching t = u, shifted."""
    if process.is_gaussian:
        T = process.num_timesteps
        t = (u * T).long().clamp(max=T - 1)
    else:
        t = process.shift(u)
    return t, torch.ones_like(u)


def bell(u, process):
    """Uniform t, weighted by exp(-2 (t - 1/2)^2) minus its end value, scaled to mean 1, as in DiffSynth-Studio."""

    def height(t):
        from_middle = t / process.t_max - 0.5
        above_end = torch.exp(-2 * from_middle.square()) - math.exp(-0.5)
        return above_end.clamp(min=0)

    t, _ = uniform(u, process)
    evenly = (torch.arange(1000, device=u.device) + 0.5) / 1000
    everywhere, _ = uniform(evenly, process)
    return t, height(t) / height(everywhere).mean()


def logit_normal(u, process):
    """Sigmoid of N(0, timestep_std^2), shifted: favours the middle (Esser et al. 2024, arXiv:2403.03206, eq. 19)."""
    z = process.timestep_std * math.sqrt(2) * torch.erfinv(2 * u - 1)  # the inverse CDF; MPS lacks torch.special.ndtri
    return process.shift(torch.sigmoid(z)), torch.ones_like(u)


class Timesteps(torch.nn.Module):
    """A distribution of t, restricted to t / T in [low, high]. A torch module, so that buffers can hold its state."""

    def __init__(self, draw, process, low: float = 0.0, high: float = 1.0):
        super().__init__()
        self.draw = draw
        self.process = process
        # draw grows with u, so these t come from one range of u
        t, _ = draw((torch.arange(100_000) + 0.5) / 100_000, process)
        t = t / process.t_max
        self.u_low = (t < low).float().mean().item()
        self.u_high = (t <= high).float().mean().item()
        if self.u_low >= self.u_high:
            raise UserError(f"t_range={low:g},{high:g} holds no t; accepted: a wider one")

    def sample(self, u):
        return self.draw(self.u_low + (self.u_high - self.u_low) * u, self.process)

    def record(self, t, losses) -> None:
        """Record the losses, if the distribution learns from them."""


class LossSecondMoment(Timesteps):
    """p_t proportional to sqrt(E[L_t^2]) over the last `length` losses at each t (IDDPM, arXiv:2102.09672, eq. 18).

    Uniform until each t has `length` losses; then a share `uniform_prob` is. All ranks keep the same history.
    """

    length = 10
    uniform_prob = 0.001

    def __init__(self, process):
        super().__init__(uniform, process)
        T = process.num_timesteps
        self.register_buffer("history", torch.zeros(T, self.length, dtype=torch.float64))  # on the CPU; rows are rings
        self.register_buffer("seen", torch.zeros(T, dtype=torch.int64))  # losses ever seen at each t

    def probabilities(self) -> torch.Tensor:
        """p_t (T,) in float64, summing to 1."""
        T = len(self.seen)
        if (self.seen < self.length).any():
            return torch.full((T,), 1 / T, dtype=torch.float64)
        p = self.history.square().mean(dim=1).sqrt()
        return (1 - self.uniform_prob) * p / p.sum() + self.uniform_prob / T

    def sample(self, u):
        p = self.probabilities()
        weights = 1 / (len(p) * p)  # keep the mean loss unbiased
        # Each (T,), by one copy to the device
        table = torch.stack([p.cumsum(0), weights]).float()
        cdf, weights = table.to(u.device, non_blocking=True)
        t = torch.searchsorted(cdf, u, right=True)  # the inverse CDF
        t = t.clamp(max=len(p) - 1)
        return t, weights[t]

    @collective("the gathering of losses by timestep")
    def record(self, t, losses) -> None:
        pairs = torch.stack([t.float(), losses.float()])  # (2, ...): one collective; fp32 holds any t
        if dist.is_initialized():
            copies = [torch.empty_like(pairs) for _ in range(dist.get_world_size())]
            dist.all_gather(copies, pairs)
            pairs = torch.stack(copies, dim=2)  # (2, micro-steps, ranks, B): in the order of the step's images
        history = self.history.numpy()  # views, whose items are cheap to set
        counts = self.seen.numpy()
        for t, loss in pairs.flatten(1).T.tolist():
            row = int(t)
            history[row, counts[row] % self.length] = loss
            counts[row] += 1


FOR_BOTH = {"uniform": uniform, "bell": bell}
FOR_FLOW = {"logit-normal": logit_normal}  # t is continuous; may use process.shift and process.timestep_std
FOR_GAUSSIAN = {"loss-second-moment": LossSecondMoment}  # t is an integer below process.num_timesteps
TIMESTEPS = FOR_BOTH | FOR_FLOW | FOR_GAUSSIAN


def make_timesteps(name: str, process, low: float = 0.0, high: float = 1.0) -> Timesteps:
    """The distribution `name`; "auto" is logit-normal for flow matching, else uniform."""
    table = FOR_BOTH | (FOR_GAUSSIAN if process.is_gaussian else FOR_FLOW)
    if name == "auto":
        name = "uniform" if process.is_gaussian else "logit-normal"
    if name not in table:
        raise UserError(f"timesteps={name} is not for {process.kind}; accepted: auto, {', '.join(table)}")
    draw = table[name]
    if draw is LossSecondMoment:
        if (low, high) != (0, 1):
            raise UserError(f"t_range={low:g},{high:g} with timesteps={name}; accepted: 0,1")
        return LossSecondMoment(process)
    return Timesteps(draw, process, low, high)
