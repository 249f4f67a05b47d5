"""Flow maps: flow matching in one to four steps (Boffi et al. 2025, arXiv:2505.18825)."""

import functools
from itertools import pairwise

import torch

from nanodiff.common import Tensors
from nanodiff.conditions import null_condition
from nanodiff.diffusion import flow
from nanodiff.diffusion.flow import MIN_T, FlowMatching, per_image
from nanodiff.diffusion.guidance import with_and_without


def jump(velocity, x, t, t_next, generator):
    """One jump, exact for a perfect flow map at any length: the mean velocity between t and t_next times their gap."""
    u = velocity(x, t, t_next)
    return x - (t - t_next) * u, x - t * u


SAMPLERS = {"map": jump} | flow.SAMPLERS


class FlowMap(FlowMatching):
    """Flow matching in one to four steps: the network also sees r <= t and learns the mean velocity u(x_t, t, r).

    It is tuned from a flow model, its `teacher`, whose velocity v is guided by cfg_scale. For a target the map jumps to
    m = min(t, r + 1/4), and the teacher continues to r. With sg = no gradient, and times before the shift:
        x_m = x_t - (t - m) sg u(x_t, t, m)
        x_r = x_m moved from m to r along v, by one step of ralston, or two if the shift exceeds 4
        (t - r) u(x_t, t, r)  <-  x_t - x_r
    So the teacher alone teaches jumps of at most 1/4; a longer jump is taught by one that is 1/4 shorter, as in
    progressive distillation (Salimans & Ho 2022, arXiv:2202.00512). Four steps of ralston, 12 evaluations, draw nearly
    as well as heun's 25 (runs/LOG.md, 28), but lose fine detail: from 1/4 to 0 one step keeps 0.99 of a deviation of
    0.15, 0.65 of one of 0.05. The shipped map's four jumps score a third worse than its teacher's 25 evaluations
    (runs/weights/README.md). With r + 1/16 instead of r + 1/4 the map lands by jumps that it is not taught, of 7, 11
    and 15 sixteenths, and photographs fall apart (runs/LOG.md, 25).
    As r approaches t, u becomes v(x_t, t), so the flow model's samplers still work. Only the last third of the blocks,
    rounded up, sees t - r (Lee et al. 2025, arXiv:2510.24474): the others read x_t as the flow model does.
    """

    is_map = True
    samplers = SAMPLERS
    default_sampler = "map"
    default_steps = 4
    teacher = None  # for training, a flow model (formats.load.Loaded): see formats.start.teach
    classes = None  # the teacher's class index per class, null last

    def velocity(self, model, x_t, t, r=None, **cond):
        """The mean velocity between t and r (N,) <= t; without r, the flow model's v at t."""
        if r is not None:
            cond["h"] = 50.0 * (t - r)  # in [0, 50], so slow waves, as u changes slowly with r
        return super().velocity(model, x_t, t, **cond)

    def teacher_velocity(self, cond, x_t, t):
        """v (N, C, H, W) at x_t and t (N, 1, 1, 1), guided."""
        t = t.flatten()
        if "y" in cond:
            cond = cond | {"y": self.classes[cond["y"]]}
        model = self.teacher.model
        velocity = functools.partial(self.teacher.process.velocity, model)
        if self.cfg_scale == 1:
            v = velocity(x_t, t, **cond)
        else:
            v, v_null = with_and_without(velocity, x_t, t, cond, null_condition(model.config, cond))
            v = torch.where(self.is_guided(t), v_null + self.cfg_scale * (v - v_null), v)
        if self.teacher.process.prediction == "x0":  # below t = MIN_T, x - x0 was divided by MIN_T instead of t
            v = v * per_image(MIN_T / t.clamp(0.01, MIN_T))
        return v

    def losses(self, model, x0, t, noise, cond, training=None) -> Tensors:
        """{"loss": (N,), "t": (N,)}: the loss of u, and the t at which the jumps begin. Without `training`, the plain
        loss of v."""
        if training is None:
            return super().losses(model, x0, t, noise, cond)
        u_n, u_i, u_kind = training.draw(t.new_empty(len(t), 3)).unbind(1)
        # 80% of the rows jump between two of the times 0, 1/4, 1/2, 3/4, 1; 20% jump by at most 1/4, anywhere
        quarters = 1 + (4 * u_n).floor()
        first = ((5 - quarters) * u_i).floor()
        is_short = u_kind < 0.2
        start = torch.where(is_short, 0.01 + 0.99 * u_i, (first + quarters) / 4)
        end = (start - torch.where(is_short, 0.01 + 0.24 * u_n, quarters / 4)).clamp(min=0)
        near = torch.minimum(start, end + 0.25)
        t, m, r = map(self.shift, (start, near, end))
        x_t = self.noised(x0, per_image(t), noise)
        u_tr = self.velocity(model, x_t, t, r, **cond)
        with torch.no_grad():
            x_r = x_t - per_image(t - m) * self.velocity(model, x_t, t, m, **cond)
            velocity = functools.partial(self.teacher_velocity, cond)
            walk = (m, self.shift((near + end) / 2), r) if self.timestep_shift > 4 else (m, r)
            for times in pairwise(map(per_image, walk)):
                x_r, _ = flow.ralston_step(velocity, x_r, *times)
            target = (x_t - x_r) / per_image(t - r)
        # A few large errors dominate squares, and one jump then draws worse (runs/LOG.md, 20). Absolute errors learn
        # the median, which is also the mean, as the target is a function of x_t
        loss = torch.nn.functional.smooth_l1_loss(u_tr, target, beta=0.1, reduction="none")
        return {"loss": loss.flatten(1).mean(1), "t": t}
