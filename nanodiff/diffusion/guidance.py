"""Guidance: turn a trained model into the denoiser that a sampler calls."""

import torch

from nanodiff.common import Tensors
from nanodiff.conditions import null_condition


def make_denoiser(model, cond: Tensors, settings):
    """denoiser(x_t, model_t, time) -> guided prediction; `cond`, the model's other inputs (see conditioning), is bound.

    `time`: the t of all images, a float in [0, 1]. Reading it from a tensor would wait for the GPU.

    Classifier-free guidance (Ho & Salimans 2022, arXiv:2207.12598): null + cfg_scale (class - null), in one forward
    pass of twice the batch, where t is in cfg_interval (Kynkaanniemi et al. 2024, arXiv:2404.07724). It guides the
    first cfg_channels of the prediction; 0 = x_t's channels, so no learned variance.
    """
    cfg_scale = settings.cfg_scale
    null = null_condition(model.config, cond)
    low, high = settings.cfg_interval

    def denoiser(x_t, t, time=1.0, **jump):
        if cfg_scale == 1 or not low - 1e-6 <= time <= high + 1e-6:  # t is rounded to fp32
            return model(x_t, t, **cond, **jump)
        out, out_null = with_and_without(model, x_t, t, cond, null)
        c = settings.cfg_channels or x_t.shape[1]
        base = out_null[:, :c]
        out_guided = base + cfg_scale * (out[:, :c] - base)
        return torch.cat([out_guided, out[:, c:]], dim=1)

    return denoiser


def with_and_without(predict, x_t, t, cond: Tensors, null: Tensors):
    """predict(x_t, t, **cond), and the same with `null` instead, in one pass of twice the batch; both in fp32."""
    both = {name: torch.cat([value, null.get(name, value)]) for name, value in cond.items()}
    x_t = torch.cat([x_t, x_t])
    t = torch.cat([t, t])
    return predict(x_t, t, **both).float().chunk(2)
