"""From settings to a diffusion process; the tables of objectives and samplers; may the model be guided?"""

import math
from dataclasses import fields

from nanodiff.common import Settings, UserError
from nanodiff.conditions import DataInfo
from nanodiff.diffusion import flow_map, gaussian
from nanodiff.diffusion.flow import FlowMatching
from nanodiff.diffusion.flow_map import FlowMap
from nanodiff.diffusion.gaussian import GaussianDiffusion
from nanodiff.diffusion.guidance import parse_interval

OBJECTIVES = {  # objective -> kind of process, what the network predicts
    "flow": (FlowMatching, "v"),
    "flow_x0": (FlowMatching, "x0"),
    "flow_map": (FlowMap, "v"),
    "flow_map_x0": (FlowMap, "x0"),
}
OBJECTIVES |= {prediction: (GaussianDiffusion, prediction) for prediction in ("eps", "x0", "x_prev", "v")}
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


def learns_guidance(config: Settings, step: float = math.inf) -> bool:
    """True if a run with these settings has taught the model guidance by `step`, so that samples need none."""
    kind, _ = OBJECTIVES[config["objective"]]
    guided_from = config.get("guided_from", 1.0)
    if kind.is_map:
        return True
    return guided_from < 1 and guided_from * config["num_iterations"] < max(step, 1)  # 0: the source was guided


def why_unguided(config: Settings, has_condition: bool, step: float = math.inf) -> str:
    """Why the model of a run with these settings cannot be guided at `step`; "" if it can."""
    if learns_guidance(config, step):
        return "the model has learned guidance"  # and would be guided twice
    if not has_condition or config["label_drop"] == 0:
        return "the model has no null condition to guide away from"
    return ""


def choose_sampler(
    process,
    sampler: str,
    steps: int | str,
    eta: float = 0.0,
) -> str:
    """Resolve "auto", and refuse what process.sample would fail on. `steps`: a number, or a respacing."""
    if sampler == "auto":
        sampler = process.default_sampler
    if sampler not in process.samplers:
        raise UserError(
            f"sampler={sampler!r} is not a sampler of {process.kind}; accepted: auto, {', '.join(process.samplers)}"
        )
    if eta and sampler != "ddim":
        raise UserError(f"eta={eta} with sampler={sampler}; accepted: 0, as only ddim takes another eta")
    if process.is_gaussian:
        process.respaced(steps)
    elif isinstance(steps, str):
        raise UserError(f"respacing={steps!r} with {process.kind}, whose t is continuous; accepted: steps")
    return sampler
