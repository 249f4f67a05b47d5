"""From settings to a process and its samplers. What is refused: tests/test_mistakes.py."""

from nanodiff.conditions import DataInfo
from nanodiff.diffusion.process import SAMPLERS, make_process
from nanodiff.sampling.draw import choose_sampler


def test_the_table_of_samplers_is_complete():
    data = DataInfo(kind="images", channels=3, resolution=8, class_names=[])
    flow = make_process({"objective": "flow"}, data)
    flow_map = make_process({"objective": "flow_map"}, data)
    gaussian = make_process({"objective": "eps"}, data)
    assert flow.samplers | flow_map.samplers | gaussian.samplers == SAMPLERS
    for step in SAMPLERS.values():
        assert step.__doc__
    assert choose_sampler(flow, "auto", 9) == "ralston"
    assert choose_sampler(gaussian, "auto", 20) == "ddim"
    assert choose_sampler(flow_map, "auto", 4) == "map"
