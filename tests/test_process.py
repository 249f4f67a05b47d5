"""From settings to a process and its samplers. What is refused: tests/test_mistakes.py."""

from nanodiff.conditions import DataInfo
from nanodiff.diffusion.process import SAMPLERS, choose_sampler, make_process


def test_the_table_of_samplers_is_complete():
    kinds = ("flow", "flow_map", "eps")
    data = DataInfo(kind="images", channels=3, resolution=8, class_names=[])
    flow, flow_map, gaussian = (make_process({"objective": kind}, data) for kind in kinds)
    assert flow.samplers | flow_map.samplers | gaussian.samplers == SAMPLERS
    assert all(step.__doc__ for step in SAMPLERS.values())
    assert choose_sampler(flow, "auto", 9) == "ralston" and choose_sampler(gaussian, "auto", 20) == "ddim"
    assert choose_sampler(flow_map, "auto", 4) == "map"
