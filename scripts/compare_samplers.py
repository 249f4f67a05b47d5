"""
Steps against quality: a table of a run's samplers, also in its report.

    python -m scripts.compare_samplers --run=shapes_cpu
    python -m scripts.compare_samplers --run=cifar10 --samplers=euler,heun --steps=10,25 --num_images=2000

Error: RMS difference, in [-1, 1], from images sampled from the same noise in many steps; none for samplers that add
noise. Evaluations: a guided pair counts once. Distance: base_eval's fd_classifier; few samples bias it upwards.
"""

import json
from dataclasses import replace

import numpy as np
import torch

from configurator import configure
from nanodiff.common import Progress, UserError, get_dist, in_batches, print0
from nanodiff.data.dataset import match_labels
from nanodiff.device import autocast_to, choose_dtype, init_device
from nanodiff.diffusion.process import SAMPLERS, choose_sampler  # noqa: F401 (the settings name SAMPLERS)
from nanodiff.files import name_of_settings, write_atomic
from nanodiff.formats.load import load_run
from nanodiff.metrics import features
from nanodiff.sampling.draw import SampleSettings, network_evaluations
from nanodiff.web.report import LiveReport

run = ""  # tag or folder of a run; "" = the run that was written to last
checkpoint_step = "newest"  # newest|best or >= 0: which checkpoint of the run, or its step
ema = ""  # which weights: the rate of an average, or raw; "" = the first rate
autoencoder = ""  # path of a latent model's VAE; "" = where it was when the latents were made
samplers = "auto"  # {SAMPLERS}, comma-separated; auto = all of the run's process
steps = "5,10,20,50,250"  # numbers of steps, comma-separated
reference_steps = 1000  # >= 1: steps of the second-order reference for the error
error_images = 32  # >= 1: images for the error
num_images = 400  # 0 or >= 10: samples for the distance, on labelled sets; 0 = the error alone
cfg_scale = 2.0  # [0, 100]: classifier-free guidance; 1 = none
cfg_interval = "0,1"  # guide only where t, from 0 (image) to 1 (noise), is in this interval
seed = 0  # >= 0: of the samples
batch_size = 64  # >= 1: images at a time
device_type = ""  # ""|cuda|cpu|mps: "" = the best present
dtype = "auto"  # auto|bfloat16|float16|float32: of the matrix products
config = configure(globals())

# ---------------------------------------------------------------------------------------------------------------------
# Setup

if get_dist()[2] > 1:
    raise UserError("compare_samplers runs in one process")
device = init_device(device_type)
compute_dtype = choose_dtype(dtype, device)
autocast = autocast_to(device, compute_dtype)
loaded = load_run(run, device, checkpoint_step, ema)
process = loaded.process
names = process.samplers if samplers == "auto" else samplers.split(",")
if not all(text.isdigit() and int(text) for text in steps.split(",")):
    raise UserError(f"steps={steps!r}; accepted: whole numbers from 1, comma-separated")
most_steps = process.num_timesteps or 10**6  # a Gaussian diffusion cannot take more steps than it has timesteps
counts = sorted({min(int(text), most_steps) for text in steps.split(",")})
guided = loaded.settings(counts[0], "auto", config.given.get("cfg_scale"), cfg_interval)
samples = loaded.samples(guided, seed, autoencoder=autoencoder)
codec = samples.codec
if loaded.model.config.low_res or codec.undecodable:
    raise UserError(codec.undecodable or f"{loaded.source} is a super-resolution model")
plan = []
for name in names:
    for count in counts:
        plan.append(replace(guided, steps=count, sampler=choose_sampler(process, name, count)))
second_order = "dpm++" if process.num_timesteps else "heun"
reference_settings = replace(guided, steps=min(reference_steps, most_steps), sampler=second_order)
num_images = num_images if loaded.num_classes else 0  # a set without labels has no classifier
if num_images:
    network = features.load_network("fd_classifier", loaded.data["name"], device)
    dataset = features.image_set(loaded.data["name"], "train")
    known = features.reference_features(dataset, network)
    class_numbers = torch.tensor(match_labels(loaded.data["class_names"], dataset.class_names, loaded.source))

# ---------------------------------------------------------------------------------------------------------------------
# Draw


def draw(ids, settings) -> torch.Tensor:
    """x0 (n, C, H, W) of the samples `ids`: the same noise and classes for every sampler."""
    drawn = replace(samples, settings=settings)
    on_step = lambda *_: bar.update(0)  # show the progress line during a long sampling
    with autocast:
        x0 = drawn.draw(ids, codec.shape, batch_size, on_step)
    if bad := drawn.not_finite:
        raise UserError(f"{settings.sampler}, {settings.steps} steps: {bad} of {len(x0)} images are not finite")
    return x0.float()


few = np.arange(error_images)
rows = []
with Progress(len(plan) + 1, "samplings", "comparing") as bar:
    reference = draw(few, reference_settings)
    bar.update()
    for settings in plan:
        evaluations = network_evaluations(loaded.model, process, SampleSettings(settings.steps, settings.sampler))
        row = {"sampler": settings.sampler, "steps": settings.steps, "evaluations": evaluations, "error": None}
        if settings.sampler not in ("sde", "ddpm"):
            row["error"] = float((draw(few, settings) - reference).square().mean().sqrt())
        if num_images:
            pixels = lambda ids, settings=settings: codec.to_pixels(draw(ids, settings))
            found = features.collect_features(pixels, in_batches(np.arange(num_images), batch_size), network)
            row["fd_classifier"] = features.compare("fd_classifier", found, known)["fd_classifier"]
            asked = class_numbers[samples.labels(range(num_images))]
            row["class_accuracy"] = float((found.logits.argmax(1) == asked).double().mean())
        rows.append(row)
        bar.update()

# ---------------------------------------------------------------------------------------------------------------------
# The table, printed and in the run's report

reference = f"{second_order}, {reference_settings.steps} steps"
result = {"metric": "samplers"} | loaded.described() | {"rows": rows} | guided.guidance
result |= {"seed": seed, "dtype": dtype, "reference": reference, "error_images": error_images, "num_images": num_images}
print0(f"{loaded.source}, guidance {guided.cfg_scale:g}; error against {reference}, {error_images} images")
print0(f"| {' | '.join(rows[0])} |\n|{'---|' * len(rows[0])}")
for row in rows:
    cells = ["" if value is None else f"{value:.3g}" if type(value) is float else str(value) for value in row.values()]
    print0(f"| {' | '.join(cells)} |")
if loaded.run_dir:
    apart = ("run", "checkpoint_step", "batch_size", "device_type")  # they change no figure
    path = loaded.run_dir / (name_of_settings(f"eval_samplers_{loaded.step:06d}", config, *apart) + ".json")
    write_atomic(path, json.dumps(result, indent=1).encode())
    LiveReport(loaded.run_dir).refresh()
    print0(f"written to {path} and {loaded.run_dir / 'report.html'}")
