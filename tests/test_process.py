"""From settings to a process and its samplers. What is refused: tests/test_mistakes.py."""

from nanodiff.diffusion.process import SAMPLERS, choose_sampler, make_process


def test_the_table_of_samplers_is_complete():
    facts = {"kind": "images"}
    flow = make_process({"objective": "flow"}, facts)
    flow_map = make_process({"objective": "flow_map"}, facts)
    gaussian = make_process({"objective": "eps"}, facts)
    assert flow.samplers | flow_map.samplers | gaussian.samplers == SAMPLERS
    for step in SAMPLERS.values():
        assert step.__doc__
    assert choose_sampler(flow, "auto", 25) == "heun"
    assert choose_sampler(gaussian, "auto", 20) == "ddim"
    assert choose_sampler(flow_map, "auto", 4) == "map"
