"""Small backbones and their inputs; weights and comparisons by the rule of tests/golden/*.json."""

from dataclasses import replace

import numpy as np
import torch
from numpy.testing import assert_allclose

from nanodiff.models.build import build_model
from nanodiff.models.dit import DiTConfig
from nanodiff.models.unet import UNetConfig

DIT = dict(
    image_size=16,
    in_channels=3,
    out_channels=3,
    patch_size=4,
    width=64,
    depth=2,
    heads=2,
    num_classes=5,
)
UNET = dict(
    image_size=16,
    in_channels=3,
    out_channels=3,
    model_channels=32,
    num_res_blocks=1,
    channel_mult=(1, 2),
    num_heads=4,
    num_classes=5,
)
CONFIGS = {
    "modern": DiTConfig(**DIT),
    "classic": DiTConfig(**DIT, block="classic"),
    "unet": UNetConfig(**UNET),
}


def filled(config, seed=0):
    """A backbone with random numbers also in what starts at zero, which would hide all before it."""
    model = build_model(config, "cpu", seed)
    g = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        if not p.any():
            p.data.copy_(0.1 * torch.randn(p.shape, generator=g))
    return model


def build(kind="modern", seed=0, **settings):
    return filled(replace(CONFIGS[kind], **settings), seed)


def inputs(n=3, size=16):
    """x_t, model_t and y of a backbone of 3 channels."""
    g = torch.Generator().manual_seed(1)
    x_t = torch.randn(n, 3, size, size, generator=g)
    return x_t, torch.linspace(0, 999.0, n), torch.arange(n)


def wave(shape, i=0, scale=1.0, salt=0.0):
    numbers = np.arange(np.prod(shape), dtype=np.float64)
    values = scale * np.sin(0.37 * numbers + 1.7 * i + salt)
    return torch.tensor(values.reshape(shape), dtype=torch.float32)


def rule_weights(parameters, gain=1.0, salt=0.0):
    """{name: tensor} from a golden file's list of (name, shape)."""
    weights = {}
    for i, (name, shape) in enumerate(parameters):
        scale = 0.1 if len(shape) < 2 else gain / np.sqrt(np.prod(shape[1:]))
        weights[name] = wave(shape, i, scale, salt)
        if (len(shape) == 1 and name.endswith(".weight")) or name.endswith("running_var"):
            weights[name] += 1
    return weights


def assert_figures(out, figures, tolerance=2e-5):
    """Shape, first and last values, mean and rms, within `tolerance` of the largest value."""
    assert list(out.shape) == figures["shape"]
    flat = out.detach().double().flatten().numpy()
    atol = tolerance * np.abs(flat).max()
    first = figures["first"]
    last = figures["last"]
    assert_allclose(flat[: len(first)], first, rtol=0, atol=atol)
    assert_allclose(flat[-len(last) :], last, rtol=0, atol=atol)
    assert_allclose(flat.mean(), figures["mean"], atol=atol)
    assert_allclose(np.sqrt((flat**2).mean()), figures["rms"], atol=atol)
