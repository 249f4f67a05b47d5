"""From settings to a process and its samplers. What is refused: tests/test_mistakes.py."""

from nanodiff.diffusion.process import SAMPLERS, choose_sampler, make_process


def test_the_table_of_samplers_is_complete():
    kinds = ("flow", "flow_map", "eps")
    flow, flow_map, gaussian = (make_process({"objective": kind}, {"kind": "images"}) for kind in kinds)
    assert flow.samplers | flow_map.samplers | gaussian.samplers == SAMPLERS
    assert all(step.__doc__ for step in SAMPLERS.values())
    assert choose_sampler(flow, "auto", 9) == "ralston" and choose_sampler(gaussian, "auto", 20) == "ddim"
    assert choose_sampler(flow_map, "auto", 4) == "map"
