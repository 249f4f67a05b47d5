"""
Steps against quality: a table of a run's samplers, and a chart in its report.

    python -m scripts.compare_samplers --run=shapes_cpu
    python -m scripts.compare_samplers --run=cifar10 --samplers=euler,heun --steps=10,25 --num_images=2000

Error: root mean square difference to images, in [-1, 1], that the same noise becomes in many steps; for samplers that
draw noise of their own there is none. Evaluations: of the network, a guided pair counted once. Distance: the Frechet
distance of base_eval --metric=fd_classifier, of as many samples each; of few it is biased upwards, alike for all.
"""

import json
from contextlib import nullcontext

import numpy as np
import torch

from configurator import configure
from nanodiff.common import Progress, UserError, get_dist
from nanodiff.data.dataset import match_labels
from nanodiff.data.latents import load_codec
from nanodiff.device import choose_dtype, init_device
from nanodiff.diffusion.process import choose_sampler
from nanodiff.diffusion.sampling import SampleSettings, network_evaluations, sample_images
from nanodiff.files import write_atomic
from nanodiff.formats.load import load_run
from nanodiff.metrics.features import collect_features, compare, image_set, load_network, reference_features
from nanodiff.web.report import LiveReport

run = ""  # tag or folder of a run; "" = the run that was written to last
checkpoint_step = -1  # >= -1: step of the checkpoint; -1 = the newest
ema = ""  # which average of the weights: a rate, or raw; "" = the first rate
autoencoder = ""  # path of that of a latent model; "" = where it was when the latents were made
samplers = "auto"  # comma-separated; auto = all that the run's process has
steps = "5,10,20,50,250"  # comma-separated: of the samplers
reference_steps = 1000  # >= 1: of the second-order sampler that the error is taken against
error_images = 32  # >= 1: images the error is taken over
num_images = 400  # >= 0: samples the distance is taken over, on labelled sets; 0 = the error alone
cfg_scale = 2.0  # >= 0: classifier-free guidance; 1 = none
seed = 0  # >= 0: of the samples
batch_size = 64  # >= 1: images at a time
device_type = ""  # ""|cuda|cpu|mps: "" = the best that is present
dtype = "auto"  # auto|bfloat16|float16|float32: of the matrix products
config = configure(globals())

# ---------------------------------------------------------------------------------------------------------------------
# Setup

if get_dist()[2] > 1:
    raise UserError("compare_samplers runs in one process")
device = init_device(device_type)
compute_dtype = choose_dtype(dtype, device)
autocast = nullcontext() if compute_dtype == torch.float32 else torch.autocast(device.type, dtype=compute_dtype)
loaded = load_run(run, device, checkpoint_step, ema)
process, model = loaded.process, loaded.model
codec = load_codec(loaded.data, device, autoencoder)
if loaded.config["low_res_size"] or codec.undecodable:
    raise UserError(codec.undecodable or f"{loaded.source} is a super-resolution model")
codec.keep_loaded()
names = list(process.samplers) if samplers == "auto" else samplers.split(",")
if not all(text.isdigit() and int(text) for text in steps.split(",")):
    raise UserError(f"steps={steps!r}; accepted: whole numbers from 1, comma-separated")
# More steps than a Gaussian diffusion has timesteps there are not
counts = sorted({min(int(text), process.num_timesteps or 10**6) for text in steps.split(",")})
plan = [(choose_sampler(process, name, count), count) for name in names for count in counts]
reference_sampler = "dpm++" if process.num_timesteps else "heun"
if loaded.num_classes and num_images:
    network = load_network("fd_classifier", loaded.data["name"], device)
    dataset = image_set(loaded.data["name"], "train")
    known = reference_features(dataset, network)
    numbers = torch.tensor(match_labels(loaded.data["class_names"], dataset.class_names, loaded.source))
else:
    num_images = 0  # a set without labels has no classifier
guidance = {"cfg_scale": cfg_scale if loaded.has_null_class else 1.0}

# ---------------------------------------------------------------------------------------------------------------------
# Draw


def draw(ids, sampler, count) -> torch.Tensor:
    """x0 (n, C, H, W) of the samples of those numbers: the same noise and classes for every sampler."""
    ids = torch.as_tensor(ids)
    cond = {"y": ids % loaded.num_classes} if loaded.num_classes else {}
    seeds = [(seed << 32) + i for i in ids.tolist()]
    settings = SampleSettings(count, sampler, **guidance)
    with autocast:
        return sample_images(model, process, seeds, cond, codec.shape, settings, batch_size).float()


few = np.arange(error_images)
most = min(reference_steps, process.num_timesteps or reference_steps)
with Progress(len(plan) + 1, "samplings", "comparing") as bar:
    reference = draw(few, reference_sampler, most)
    bar.update()
    rows = []
    for sampler, count in plan:
        row = {"sampler": sampler, "steps": count}
        row["evaluations"] = network_evaluations(model, process, SampleSettings(count, sampler))
        stochastic = sampler in ("sde", "ddpm")
        row["error"] = None if stochastic else float((draw(few, sampler, count) - reference).square().mean().sqrt())
        if num_images:
            images_of = lambda ids, s=sampler, n=count: codec.to_pixels(draw(ids, s, n))
            found = collect_features(images_of, num_images, network, batch_size)
            row["fd_classifier"] = compare("fd_classifier", found, known)["fd_classifier"]
            asked = numbers[torch.arange(num_images) % loaded.num_classes]
            row["class_accuracy"] = float((found.logits.argmax(1) == asked).double().mean())
        rows.append(row)
        bar.update()

# ---------------------------------------------------------------------------------------------------------------------
# The table, here and in the run's report

result = {"metric": "samplers"} | loaded.described() | {"rows": rows} | guidance | {"seed": seed, "dtype": dtype}
result |= {"reference": f"{reference_sampler}, {most} steps", "error_images": error_images, "num_images": num_images}
print(f"{loaded.source}, guidance {guidance['cfg_scale']:g}; error to {result['reference']}, {error_images} images")
head = list(rows[0])
print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
for row in rows:
    cells = ["" if value is None else f"{value:.3g}" if type(value) is float else str(value) for value in row.values()]
    print(f"| {' | '.join(cells)} |")
if loaded.run_dir:
    path = loaded.run_dir / f"eval_samplers_{loaded.step:06d}.json"
    write_atomic(path, json.dumps(result, indent=1).encode())
    LiveReport(loaded.run_dir).refresh(last=True)
    print(f"written to {path} and, with a chart, to {loaded.run_dir / 'report.html'}")
