"""Flow matching on straight paths (Lipman et al. 2023, arXiv:2210.02747; Liu et al. 2023, arXiv:2209.03003).

x_t = (1 - t) x0 + t noise, t in [0, 1]; the velocity v = dx_t/dt = noise - x0 is what the network learns.
"""

from itertools import pairwise

import torch

from nanodiff.common import UserError

SAMPLERS = ("euler", "heun", "sde")
MIN_T = 0.05  # v of an x0-prediction divides by t; below this it would weigh errors of x0 by more than 400


def _full(t, x):
    return t.view(-1, *[1] * (x.ndim - 1))


class FlowMatching:
    """The network puts out `prediction`, v or x0; the loss is on v in both cases. Raises UserError for another.

    x0-prediction: v = (x_t - out) / max(t, 0.05) in losses and in sampling alike (Li & He 2025, arXiv:2511.13720).
    """

    num_timesteps = 0  # continuous

    def __init__(self, prediction: str = "v"):
        if prediction not in ("v", "x0"):
            raise UserError(f"flow_prediction={prediction!r} is not known; accepted: v, x0")
        self.prediction = prediction

    def out_channels(self, channels: int) -> int:
        """Channels that the network must put out for images of `channels`."""
        return channels

    def velocity(self, model, x_t, t, **cond):
        """v (N, C, H, W) fp32 at x_t and t (N,) in [0, 1]; the network sees 1000 t."""
        out = model(x_t, 1000.0 * t, **cond).float()
        return out if self.prediction == "v" else (x_t - out) / _full(t, x_t).clamp(min=MIN_T)

    def losses(self, model, x0, t, noise, **cond) -> dict[str, torch.Tensor]:
        """{"loss": (N,)}: the mean square of v's error (Lipman et al., eq. 14); x0, noise (N, C, H, W), t (N,)."""
        w = _full(t, x0)
        x_t = (1 - w) * x0 + w * noise
        error = self.velocity(model, x_t, t, **cond) - (noise - x0)
        return {"loss": error.square().flatten(1).mean(1)}

    @torch.no_grad()
    def sample(self, denoiser, noise, steps: int, sampler: str = "heun", generator=None, progress=None):
        """Integrate from noise at t = 1 to images at t = 0 in `steps` equal steps; (N, C, H, W) fp32.

        euler: first order, `steps` evaluations. heun: second order, 2 steps - 1 evaluations (the last step is Euler's,
        so that the network is not asked at t = 0, as in EDM). sde: Euler-Maruyama for the reverse SDE with the same
        marginals and w_t = t (SiT, Ma et al. 2024, arXiv:2401.08740, eq. 4); its last step is Euler's, without noise.
        progress(i, steps, x0) follows step i = 1 ... steps. Raises UserError for an unknown sampler or steps < 1.
        """
        if sampler not in SAMPLERS:
            raise UserError(f"sampler={sampler!r} is none of flow matching's; accepted: {', '.join(SAMPLERS)}")
        if steps < 1:
            raise UserError(f"steps={steps}; accepted: 1 or more")
        x = noise.float()
        times = torch.linspace(1, 0, steps + 1).tolist()

        def v_at(x, t):
            return self.velocity(denoiser, x, torch.full((len(x),), t, device=x.device))

        for i, (t, t_next) in enumerate(pairwise(times), start=1):
            h = t - t_next
            v = v_at(x, t)
            x0 = x - t * v  # E[x0 | x_t], and all that the last step does
            if sampler == "sde" and t_next > 0:
                # dx = [v - w/2 score] dt + sqrt(w) dW backwards in time, w = t, and
                # score = -E[noise | x_t] / t = -(x + (1 - t) v) / t
                drift = v + 0.5 * (x + (1 - t) * v)
                z = torch.randn_like(x) if generator is None else generator.randn_like(x)
                x = x - h * drift + (t * h) ** 0.5 * z
            elif sampler == "heun" and t_next > 0:
                x = x - h / 2 * (v + v_at(x - h * v, t_next))
            else:
                x = x - h * v
            if progress is not None:
                progress(i, steps, x0)
        return x
