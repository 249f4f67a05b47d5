"""Guidance: the published forward_with_cfg, and its laws."""

import pytest
import torch
from conftest import refused
from figures import assert_figures, build, inputs, wave
from test_dit import golden, published_model

from nanodiff.diffusion.flow import FlowMatching
from nanodiff.diffusion.gaussian import GaussianDiffusion
from nanodiff.diffusion.guidance import make_denoiser
from nanodiff.sampling.draw import SampleSettings
from nanodiff.sampling.loaded import parse_classes


def test_published_forward_with_cfg():
    """The published function returns [guided 3, rest of each half]; ours the class's half of it."""
    model = published_model()
    figures = golden["forward_with_cfg"]
    x = wave((4, 4, 8, 8), 0, 1)[:2]
    t = torch.full((2,), 500.0)
    y = torch.tensor([1, 2])
    settings = SampleSettings(cfg_scale=4.0, cfg_channels=3)
    out = make_denoiser(model, {"y": y}, settings)(x, t)
    null = model(x, t, torch.full_like(y, 10))
    null_half = torch.cat([out[:, :3], null[:, 3:]], dim=1)
    assert_figures(torch.cat([out, null_half]), figures, tolerance=1e-5)


def test_unconditional_models():
    model = build(num_classes=0)
    x, t, _ = inputs()
    assert torch.equal(make_denoiser(model, {}, SampleSettings())(x, t), model(x, t))


@pytest.mark.parametrize(
    "rescale, num_timesteps",
    [
        (False, 50),
        (True, 50),
        (False, 1000),
    ],
)
def test_guided_within_the_interval_only_and_never_by_scale_1(rescale, num_timesteps):
    """Whatever t the model sees: of 50 steps, those with t / T in [0.2, 0.6] are guided; by default all."""
    process = GaussianDiffusion(num_timesteps=num_timesteps, rescale_timesteps=rescale, variance="learned_range")
    model = build(out_channels=6)
    batches = []
    x, _, _ = inputs()
    cond = {"y": torch.zeros(len(x), dtype=torch.int64)}
    model.register_forward_pre_hook(lambda _, args: batches.append(len(args[0])))
    part_of_range = process.respaced(50).model_t[::-1] / process.t_end
    for scale, (low, high) in (
        (2.0, (0.2, 0.6)),
        (2.0, (0.0, 1.0)),
        (1.0, (0.2, 0.6)),
    ):
        batches.clear()
        settings = SampleSettings(cfg_scale=scale, cfg_interval=(low, high))
        denoiser = make_denoiser(model, cond, settings)
        process.sample(denoiser, x, 50, "ddpm")
        guided = [n == 2 * len(x) for n in batches]
        assert guided == [scale != 1 and low <= part <= high for part in part_of_range]


@pytest.mark.parametrize(
    "low, high",
    [
        (0.3, 0.7),
        (0.2, 0.6),
        (0.4, 0.8),
    ],
)
def test_a_step_at_an_end_of_the_interval_is_guided(low, high):
    model = build()
    batches = []
    x, _, _ = inputs()
    cond = {"y": torch.zeros(len(x), dtype=torch.int64)}
    model.register_forward_pre_hook(lambda _, args: batches.append(len(args[0])))
    settings = SampleSettings(cfg_scale=2.0, cfg_interval=(low, high))
    denoiser = make_denoiser(model, cond, settings)
    FlowMatching().sample(denoiser, x, 10, "euler")
    assert batches.count(2 * len(x)) == 5  # of ten, though fp32 rounds 0.6 and 0.8 up


@pytest.mark.parametrize(
    "names",
    [
        ["1", "2", "c"],
        ["a", "2", "b, c"],
    ],
)
def test_names_win_over_numbers(names):
    assert parse_classes("2, 2", names) == [1, 1]
    assert parse_classes("0", names) == [0]
    assert parse_classes("", names) is None
    assert parse_classes(f'1,"{names[2]}"', names)[1] == 2
    for wrong in ("7", "-1", "1.5", "9" * 5000, "0,,1"):
        refused("is unknown; there are 3 classes", parse_classes, wrong, names)


def test_numbers_of_classes_that_are_numbers_are_their_names():
    """0 would else be the class 1 of 1, 2, 3, as of Flowers and of EMNIST's letters."""
    assert parse_classes("2, 10", ["1", "2", "10"]) == [1, 2]
    refused("'0' is unknown; there are 3 classes; accepted: 1, 2, 10$", parse_classes, "0", ["1", "2", "10"])
