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

    It is tuned from a flow model, its `teacher`, whose velocity v is guided by cfg_scale (Boffi et al. 2025, the
    Lagrangian form without a derivative). With sg = no gradient, m uniform in the last quarter of the jump from t to r
    and w the length of that quarter above m:
        x_m = x_t - (t - m) sg u(x_t, t, m)
        (t - r) u(x_t, t, r)  <-  (t - m) sg u(x_t, t, m) + w v(x_m, m) + (m - r - w) sg u(x_t, t, r)
    At each moment of the quarter the first term counts if m lies below it, else v; the odds add up to 1, so the exact
    map is its own mean target. One Euler step with v over all of m - r would bias the fixed point: jumps would shrink
    the data (deviation 0.15 to 0.09 in one jump). A bias remains for the last 0.05 of t if the teacher predicts x0:
    there one Euler step goes to the mean of x0. The last term has mean 0 and removes most of the noise. An exact
    target is learned slowly: after eleven minutes on the shapes four jumps are still behind the flow run's 21
    evaluations (runs/LOG.md, 25).
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
            return velocity(x_t, t, **cond)
        null = null_condition(model.config, cond)
        v, v_null = with_and_without(velocity, x_t, t, cond, null)
        guided = v_null + self.cfg_scale * (v - v_null)
        return torch.where(self.is_guided(t), guided, v)

    def losses(self, model, x0, t, noise, cond, draw=None) -> dict[str, torch.Tensor]:
        """{"loss": (N,), "t": (N,)}: the loss of u, and the t that the jumps began at. Without `draw`, in validation:
        the plain loss of v. draw(like) returns numbers uniform in [0, 1), a row for each image."""
        if draw is None:
            return super().losses(model, x0, t, noise, cond)
        u_r, u_m, u_kind = draw(t.new_empty(len(t), 3)).unbind(1)
        # Sampling jumps from t = 1 and to r = 0, which random numbers never hit: 25% of rows start at t = 1, 10% end at
        # r = 0, 20% do both. 25% jump from a random t to a random r, and in 20% r = t.
        t = torch.where(u_kind < 0.45, 1.0, t)
        r = torch.where((u_kind > 0.25) & (u_kind < 0.55), 0.0, t * u_r)
        jumps = u_kind < 0.8
        r = torch.where(jumps, r, t)
        share = torch.where(jumps, 0.25 * u_m, 1.0)  # (m - r) / (t - r)
        weight = torch.where(jumps, 0.25 - share, 1.0)  # w / (t - r)
        if self.teacher.process.prediction == "x0":  # v is clamped below MIN_T: from there on, one step with v at MIN_T
            floor = ((MIN_T - r) / (t - r)).clamp(0, 1)
            raised = (floor - share).clamp(min=0)
            share = share + raised
            weight = weight + raised
        m = r + share * (t - r)
        gap = per_image(t - m)
        share = per_image(share)
        weight = per_image(weight)
        x_t = self.noised(x0, per_image(t), noise)
        u_tr = self.velocity(model, x_t, t, r, **cond)
        with torch.no_grad():
            u_tm = self.velocity(model, x_t, t, m, **cond)
            x_m = x_t - gap * u_tm
            v = self.teacher_velocity(x_m, m, **cond)
            target = (1 - share) * u_tm + weight * v + (share - weight) * u_tr
        error = u_tr - target
        # |error| beyond a width: squares are ruled by a few large errors, and one jump then draws worse (runs/LOG.md).
        # But |error| learns a median. As the width grows, the loss turns into squares, which learn the exact mean.
        width = 0.1 / (1 - self.done**2)
        smooth_l1 = (error.square() + width**2).sqrt() - width
        return {"loss": smooth_l1.flatten(1).mean(1), "t": t}
