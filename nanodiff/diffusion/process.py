"""Build a diffusion process from settings; the table of all samplers."""

from dataclasses import fields

from nanodiff.common import UserError
from nanodiff.diffusion import flow_map, gaussian
from nanodiff.diffusion.flow import FlowMatching
from nanodiff.diffusion.flow_map import FlowMap
from nanodiff.diffusion.gaussian import GaussianDiffusion
from nanodiff.diffusion.guidance import parse_interval

OBJECTIVES = ("flow", "flow_x0", "flow_map", "flow_map_x0", "eps", "x0", "x_prev", "v")
SAMPLERS = flow_map.SAMPLERS | gaussian.SAMPLERS  # name -> step function, whose docstring says what it does


def make_process(config: dict, facts: dict) -> FlowMatching | GaussianDiffusion:
    """The process of config["objective"]: flow matching, a flow map, or for eps, x0, x_prev and v Gaussian diffusion.

    `facts`: a codec's description. Gaussian diffusion clips predictions of x0 to [-1, 1], except for latents.
    """
    objective = config["objective"]
    kind = GaussianDiffusion
    others = {"clip_denoised": facts["kind"] != "latents"}
    if objective.startswith("flow"):
        kind = FlowMap if objective.startswith("flow_map") else FlowMatching
        prediction = "x0" if objective.endswith("x0") else "v"
        others = {"prediction": prediction, "cfg_interval": parse_interval(config.get("cfg_interval", "0,1"))}
    settings = {field.name: config[field.name] for field in fields(kind) if field.name in config}
    return kind(**settings | others)


def choose_sampler(process, sampler: str, steps: int | str, eta: float = 0.0) -> str:
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
