"""From settings to a process, its losses and its samples: what base_train and sample can ask of improved-diffusion."""

import pytest
from conftest import refused

from nanodiff.diffusion.process import SAMPLERS, choose_sampler, make_process

GAUSSIAN = dict(
    noise_schedule="cosine", num_timesteps=20, variance="fixed_small", gaussian_loss="mse", rescale_timesteps=False
)
IMAGES = {"kind": "images"}


def process_of(objective, **changes):
    return make_process(GAUSSIAN | {"objective": objective} | changes, IMAGES)


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
    refused(said, choose_sampler, process_of(objective), *choice)
