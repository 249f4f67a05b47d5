"""Guidance at sampling time, and the label drop in training that makes it possible."""

import torch

from nanodiff.common import UserError


def drop_labels(y, u, label_drop: float, null: int):
    """y (N,) with the null class where u (N,), uniform in [0, 1), is below `label_drop` (Ho & Salimans 2022)."""
    return torch.where(u < label_drop, null, y)


def make_denoiser(model, y=None, cfg_scale=1.0, cfg_interval=(0.0, 1.0), cfg_channels=None, weak_model=None, **cond):
    """denoiser(x_t, model_t) -> prediction: the model with its labels y (N,) and `cond` bound, guided.

    Classifier-free guidance (Ho & Salimans 2022, arXiv:2207.12598): null + cfg_scale (class - null), both in a single
    forward pass of twice the batch; with `weak_model` autoguidance (Karras et al. 2024, arXiv:2406.02507): weak +
    cfg_scale (strong - weak). Only where t / 1000 is in cfg_interval (Kynkaanniemi et al. 2024, arXiv:2404.07724); only
    the first `cfg_channels` of the prediction (None = as many as x_t has: a learned variance stays the class's own).
    cfg_scale 1 is the plain model. Raises UserError for another scale with neither labels nor a weak model.
    """
    if cfg_scale != 1 and weak_model is None and y is None:
        raise UserError(f"cfg_scale={cfg_scale} without labels; accepted: 1, as there is nothing to guide towards")
    cond = cond if y is None else {"y": y, **cond}
    low, high = cfg_interval

    def inside(t):  # t (N,) is the same for all images; to look at it waits for the device, so only if need be
        return (low <= 0 and high >= 1) or low <= t[0].item() / 1000 <= high

    def denoiser(x_t, t):
        if cfg_scale == 1 or not inside(t):
            return model(x_t, t, **cond)
        if weak_model is not None:
            strong, weak = model(x_t, t, **cond).float(), weak_model(x_t, t, **cond).float()
        else:
            both = {key: torch.cat([value, value]) for key, value in cond.items()}
            both["y"] = torch.cat([y, torch.full_like(y, model.config.num_classes)])
            strong, weak = model(torch.cat([x_t, x_t]), torch.cat([t, t]), **both).float().chunk(2)
        c = cfg_channels or x_t.shape[1]
        guided = weak[:, :c] + cfg_scale * (strong[:, :c] - weak[:, :c])
        return torch.cat([guided, strong[:, c:]], dim=1)

    return denoiser
