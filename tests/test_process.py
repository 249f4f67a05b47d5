"""From settings to a process, its losses and its samples: what base_train and sample can ask of improved-diffusion."""

from types import SimpleNamespace

import pytest
import torch

from nanodiff.common import UserError
from nanodiff.diffusion.process import SAMPLERS, choose_sampler, make_process
from nanodiff.sampling.draw import SampleSettings, sample_images

GAUSSIAN = dict(
    noise_schedule="cosine", num_timesteps=20, variance="fixed_small", gaussian_loss="mse", rescale_timesteps=False
)
IMAGES = {"kind": "images"}


def process_of(objective, **changes):
    return make_process(GAUSSIAN | {"objective": objective} | changes, IMAGES)


class Model(torch.nn.Module):
    """Outputs tanh of x_t, and again for a learned variance."""

    def __init__(self, process):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.config = SimpleNamespace(
            num_classes=0, low_res=0, vector_dim=0, vector_len=0, in_channels=3, out_channels=process.out_channels(3)
        )

    def forward(self, x_t, t):
        return torch.tanh(self.scale * x_t).repeat(1, self.config.out_channels // 3, 1, 1)


@pytest.mark.parametrize("variance", ["fixed_small", "fixed_large", "learned", "learned_range"])
@pytest.mark.parametrize("objective", ["eps", "x_prev"])
def test_every_gaussian_objective_and_variance_trains_and_samples(objective, variance):
    process = process_of(objective, variance=variance)
    model = Model(process)
    x0, noise = torch.randn(2, 4, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    process.losses(model, x0.clamp(-1, 1), torch.tensor([0, 1, 10, 19]), noise, {})["loss"].mean().backward()
    assert model.scale.grad.isfinite()
    for sampler in process.samplers:
        settings = SampleSettings(20, choose_sampler(process, sampler, 20))
        assert sample_images(model, process, range(3), {}, (3, 4, 4), settings, 2).isfinite().all()


def test_the_table_of_samplers_is_complete():
    flow, flow_map, gaussian = process_of("flow"), process_of("flow_map"), process_of("eps")
    assert flow.samplers | flow_map.samplers | gaussian.samplers == SAMPLERS
    assert all(step.__doc__ for step in SAMPLERS.values())
    assert choose_sampler(flow, "auto", 25) == "heun" and choose_sampler(gaussian, "auto", 20) == "ddim"
    assert choose_sampler(flow_map, "auto", 4) == "map"


@pytest.mark.parametrize(
    "objective, choice, said",
    [
        ("flow", ("map", 4), "sampler='map'.*flow matching"),
        ("flow", ("ddim", 25), "sampler='ddim'.*flow matching.*auto, euler, heun, sde"),
        ("eps", ("heun", 10), "sampler='heun'.*Gaussian diffusion.*auto, ddpm"),
        ("eps", ("auto", 21), r"sample_steps\)=21.*1 to 20"),
        ("eps", ("ddpm", 10, 0.5), "eta=0.5 with sampler=ddpm"),
        ("eps", ("auto", "ddim19"), "ddim19.*stride"),
        ("flow", ("auto", "ddim10"), "respacing='ddim10'.*flow matching"),
        ("x_prev", ("auto", 10), r"sample_steps\)=10; accepted: 20.*x_prev"),
    ],
)
def test_mistakes_are_named_before_sampling(objective, choice, said):
    with pytest.raises(UserError, match=said):
        choose_sampler(process_of(objective), *choice)
