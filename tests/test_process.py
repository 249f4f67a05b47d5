"""From settings to a process and its samplers. What is refused: tests/test_mistakes.py."""

from nanodiff.diffusion.process import SAMPLERS, choose_sampler, make_process

GAUSSIAN = dict(
    noise_schedule="cosine", num_timesteps=20, variance="fixed_small", gaussian_loss="mse", rescale_timesteps=False
)


def test_the_table_of_samplers_is_complete():
    kinds = [GAUSSIAN | {"objective": objective} for objective in ("flow", "flow_map", "eps")]
    flow, flow_map, gaussian = (make_process(kind, {"kind": "images"}) for kind in kinds)
    assert flow.samplers | flow_map.samplers | gaussian.samplers == SAMPLERS
    assert all(step.__doc__ for step in SAMPLERS.values())
    assert choose_sampler(flow, "auto", 25) == "heun" and choose_sampler(gaussian, "auto", 20) == "ddim"
    assert choose_sampler(flow_map, "auto", 4) == "map"
