"""Flow maps: flow matching in one to four steps (Boffi et al. 2025, arXiv:2505.18825)."""

import functools

import torch

from nanodiff.common import UserError, print0
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

    It is tuned from a flow model, its `teacher`, whose velocity v is guided by cfg_scale. The map jumps to within 1/4
    of r, and the teacher walks the rest. With sg = no gradient and m = min(t, r + 1/4):
        x_m = x_t - (t - m) sg u(x_t, t, m)
        (t - r) u(x_t, t, r)  <-  (t - m) sg u(x_t, t, m) + (m - r) k
    k is the mean of v on the way from x_m to time r, by one Runge-Kutta step of third order, three evaluations: four
    such steps draw as well as 25 evaluations by Heun's method (runs/LOG.md, 25). So jumps up to 1/4 are taught by the
    teacher alone, and a longer one by those that are 1/4 shorter, as in progressive distillation (Salimans & Ho 2022,
    arXiv:2202.00512).
    At r = t this is u <- v(x_t, t), so euler, heun and sde still work.
    """

    samplers = SAMPLERS
    default_sampler = "map"
    default_steps = 4
    teacher = None  # for training

    def learn_from(self, teacher) -> None:
        """`teacher`: a trained flow model (formats.load.Loaded)."""
        if teacher is None or teacher.process.is_gaussian:
            raise UserError("objective=flow_map tunes a flow run: give its name as init_from")
        if self.cfg_scale != 1 and teacher.why_unguided:
            print0(f"cfg_scale={self.cfg_scale} is ignored for the teacher {teacher.source}: {teacher.why_unguided}")
            self.cfg_scale = 1.0
        self.teacher = teacher

    def velocity(self, model, x_t, t, r=None, **cond):
        """Given r (N,) <= t, the mean velocity between t and r; without, the flow model's v at t."""
        if r is not None:
            cond["h"] = 50.0 * (t - r)  # in [0, 50]: 20 times slower waves than t gets, as u changes slowly with r
        return super().velocity(model, x_t, t, **cond)

    def teacher_velocity(self, x_t, t, **cond):
        """v (N, C, H, W) at x_t and t (N,), guided."""
        model = self.teacher.model
        velocity = functools.partial(self.teacher.process.velocity, model)
        if self.cfg_scale == 1:
            v = velocity(x_t, t, **cond)
        else:
            null = null_condition(model.config, cond)
            v, v_null = with_and_without(velocity, x_t, t, cond, null)
            guided = v_null + self.cfg_scale * (v - v_null)
            v = torch.where(self.is_guided(t), guided, v)
        if self.teacher.process.prediction == "x0":  # x - x0 was divided by MIN_T at least, which is too much below it
            v = v * per_image(MIN_T / t.clamp(0.01, MIN_T))
        return v

    def losses(self, model, x0, t, noise, cond, draw=None) -> dict[str, torch.Tensor]:
        """{"loss": (N,), "t": (N,)}: the loss of u, and the t that the jumps began at. Without `draw`, in validation:
        the plain loss of v. draw(like) returns numbers uniform in [0, 1), a row for each image."""
        if draw is None:
            return super().losses(model, x0, t, noise, cond)
        u_n, u_i, u_kind = draw(t.new_empty(len(t), 3)).unbind(1)
        # 80% of the rows: a jump of the sampler in n = 1, 2, 3 or 4 steps. 20%: one of at most 1/4, anywhere
        n = 1 + (4 * u_n).floor()
        i = (n * u_i).floor()
        is_short = u_kind < 0.2
        t = self.shift(torch.where(is_short, u_i, (i + 1) / n))
        r = self.shift(torch.where(is_short, (u_i - 0.25 * u_n).clamp(min=0), i / n))
        share = (0.25 / (t - r)).clamp(max=1)  # (m - r) / (t - r)
        h = share * (t - r)
        m = r + h
        x_t = self.noised(x0, per_image(t), noise)
        u_tr = self.velocity(model, x_t, t, r, **cond)
        with torch.no_grad():
            u_tm = self.velocity(model, x_t, t, m, **cond)
            x_m = x_t - per_image(t - m) * u_tm
            # Ralston's method
            k1 = self.teacher_velocity(x_m, m, **cond)
            k2 = self.teacher_velocity(x_m - per_image(h / 2) * k1, m - h / 2, **cond)
            k3 = self.teacher_velocity(x_m - per_image(0.75 * h) * k2, m - 0.75 * h, **cond)
            k = (2 * k1 + 3 * k2 + 4 * k3) / 9
            target = u_tm + per_image(share) * (k - u_tm)
        # Squares are ruled by a few large errors, and one jump then draws worse (runs/LOG.md). The median that absolute
        # errors learn is the mean here: given x_t the target is no longer random
        loss = torch.nn.functional.smooth_l1_loss(u_tr, target, beta=0.1, reduction="none")
        return {"loss": loss.flatten(1).mean(1), "t": t}
