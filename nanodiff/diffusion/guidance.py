"""Guidance: turn a trained model into the denoiser that a sampler calls."""

import math

import torch

from nanodiff.common import Tensors, UserError, print0
from nanodiff.conditions import null_condition


def parse_interval(
    text: str,
    name: str = "cfg_interval",
    least: float = 0.0,
    most: float = 1.0,
):
    """(0.3, 0.8) from "0.3,0.8", such as a range of t from 0 (image) to 1 (noise); `name`: of the setting."""
    try:
        low, high = (float(x) for x in text.split(","))
    except ValueError:
        low = high = math.nan
    if not least <= low < high <= most:
        raise UserError(f"{name}={text!r}; accepted: two numbers LOW,HIGH from {least:g} to {most:g}, such as 0.3,0.8")
    return low, high


def choose_guidance(
    cfg_scale: float,
    cfg_interval: str,
    fault: str,
    overrides,
):
    """The scale of the guidance that samples get, and its interval of t.

    `fault`: why the model cannot be guided, or "". If it cannot, both settings are ignored; a line names those in
    `overrides`.
    """
    interval = parse_interval(cfg_interval)
    if cfg_scale != 1 and not fault:
        return cfg_scale, interval
    names = [name for name in ("cfg_scale", "cfg_interval", "cfg_channels") if name in overrides]
    if names and overrides.get("cfg_scale") != 1:
        settings = " and ".join(f"{name}={overrides[name]}" for name in names)
        print0(f"samples are not guided and ignore {settings}: {fault or 'cfg_scale=1'}")
    return 1.0, (0.0, 1.0)


def make_denoiser(model, cond: Tensors, settings):
    """denoiser(x_t, model_t, time) -> guided prediction; `cond`, the model's other inputs (see conditioning), is bound.

    `time`: the t of all images, a float in [0, 1]. Reading it from a tensor would wait for the GPU.

    Classifier-free guidance (Ho & Salimans 2022, arXiv:2207.12598): null + cfg_scale (class - null), in one forward
    pass of twice the batch, where t is in cfg_interval (Kynkaanniemi et al. 2024, arXiv:2404.07724). It guides the
    first cfg_channels of the prediction; 0 = as many as x_t has, so without a learned variance.
    """
    cfg_scale = settings.cfg_scale
    if cfg_scale != 1:
        null = null_condition(model.config, cond)
        if not null:
            raise UserError(f"cfg_scale={cfg_scale} without conditions; accepted: 1, there is nothing to guide to")
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
