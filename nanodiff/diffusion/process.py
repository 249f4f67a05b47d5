"""From settings to a diffusion process; the tables of objectives and samplers; may the model be guided?"""

import math
from dataclasses import fields

from nanodiff.common import Settings, UserError
from nanodiff.conditions import DataInfo
from nanodiff.diffusion import flow_map, gaussian
from nanodiff.diffusion.flow import FlowMatching
from nanodiff.diffusion.flow_map import FlowMap
from nanodiff.diffusion.gaussian import GaussianDiffusion

OBJECTIVES = {  # objective -> kind of process, what the network predicts
    "flow": (FlowMatching, "v"),
    "flow_x0": (FlowMatching, "x0"),
    "flow_map": (FlowMap, "v"),
    "flow_map_x0": (FlowMap, "x0"),
}
OBJECTIVES |= {prediction: (GaussianDiffusion, prediction) for prediction in "eps x0 x_prev v".split()}
SAMPLERS = flow_map.SAMPLERS | gaussian.SAMPLERS  # name -> step function, whose docstring says what it does


def make_process(config: Settings, data: DataInfo) -> FlowMatching | GaussianDiffusion:
    """The process of config["objective"]: flow matching, a flow map, or for eps, x0, x_prev and v Gaussian diffusion.

    Gaussian diffusion clips predictions of x0 to [-1, 1], except for latents.
    """
    kind, prediction = OBJECTIVES[config["objective"]]
    settings = {field.name: config[field.name] for field in fields(kind) if field.name in config}
    if kind.is_gaussian:
        settings["clip_denoised"] = data.kind != "latents"
    else:
        settings["prediction"] = prediction
        settings["cfg_interval"] = parse_interval(config.get("cfg_interval", "0,1"))
    return kind(**settings)


def parse_interval(text: str, name: str = "cfg_interval", least: float = 0.0, most: float = 1.0):
    """(0.3, 0.8) from "0.3,0.8", such as a range of t from 0 (image) to 1 (noise); `name`: of the setting."""
    try:
        low, high = (float(x) for x in text.split(","))
    except ValueError:
        low = high = math.nan
    if not least <= low < high <= most:
        raise UserError(f"{name}={text!r}; accepted: two numbers LOW,HIGH from {least:g} to {most:g}, such as 0.3,0.8")
    return low, high


def learns_guidance(config: Settings, step: float = math.inf) -> bool:
    """True if a run with these settings has taught the model guidance by `step`, so that samples need none."""
    kind, _ = OBJECTIVES[config["objective"]]
    guided_from = config.get("guided_from", 1.0)
    if kind.is_map:
        return True
    return guided_from < 1 and guided_from * config["num_iterations"] < max(step, 1)  # 0: the source was guided


def why_unguided(config: Settings, conditions: list[str], step: float = math.inf) -> str:
    """Why the model of a run with these settings cannot be guided at `step`; "" if it can."""
    if learns_guidance(config, step):
        return "the model has learned guidance"  # and would be guided twice
    if not conditions or config["label_drop"] == 0:
        return "the model has no null condition to guide away from"
    return ""
