"""
Evaluate a trained model.

    python -m scripts.base_eval --metric=loss               # validation loss of the averaged weights, by quarter of t
    python -m scripts.base_eval --metric=class_accuracy     # do samples look like the class they were asked for?
    python -m scripts.base_eval --metric=bpd                # bits/dim of a Gaussian diffusion, also by timestep
    torchrun --standalone --nproc_per_node=8 -m scripts.base_eval --run=... --metric=...
"""

import json
from contextlib import nullcontext

import numpy as np
import torch
import torch.distributed as dist

from configurator import configure
from nanodiff.codec import load_codec
from nanodiff.common import Progress, UserError, choose_dtype, get_dist, init_device, print0, write_atomic
from nanodiff.dataset import open_dataset
from nanodiff.evaluation import bits_per_dim, sample_images, sum_over_ranks, validation_loss
from nanodiff.judge import get_judge
from nanodiff.recipe import choose_sampler, load_run

run = ""  # tag or folder of a run; "" = the run that was written to last
metric = "loss"  # loss|bpd|class_accuracy: what to measure
checkpoint_step = -1  # >= -1: step of the checkpoint; -1 = the newest
ema = ""  # which average of the weights: a rate, or raw; "" = the first rate
data = ""  # data set to evaluate on; "" = the one trained on
autoencoder = ""  # path of that of a latent model; "" = where it was when the latents were made
num_images = 400  # >= 1: validation images, or samples
sampler = "auto"  # auto|euler|heun|sde|ddpm|ddim|dpm++: auto = heun for flow, ddim for the rest
steps = 50  # >= 1: of the sampler
cfg_scale = 2.0  # >= 0: classifier-free guidance; 1 = none
seed = 0  # >= 0: of the samples, or of noise and t in the validation loss
batch_size = 64  # >= 1: images at a time on each rank
device_type = ""  # ""|cuda|cpu|mps: "" = the best that is present
dtype = "auto"  # auto|bfloat16|float16|float32: of the matrix products
config = configure(globals())

rank, _, world = get_dist()
device = init_device(device_type)
compute_dtype = choose_dtype(dtype, device)
autocast = nullcontext() if compute_dtype == torch.float32 else torch.autocast(device.type, dtype=compute_dtype)
loaded = load_run(run, device, checkpoint_step, ema)
num_classes, low_res_size = loaded.num_classes, loaded.config["low_res_size"]
if not (data or loaded.data["name"]):
    raise UserError(f"{loaded.source} does not tell what it was trained on: give data=...")
val_set = open_dataset(data or loaded.data["name"], "val")
codec = load_codec(loaded.data, device, autoencoder, val_set)
if num_classes and val_set.num_classes != num_classes:
    raise UserError(f"data={val_set.name!r} has {val_set.num_classes} classes, {loaded.source} wants {num_classes}")
if min(num_images, len(val_set)) < world:
    raise UserError(f"{world} ranks for {min(num_images, len(val_set))} images: num_images={num_images}")
result = {
    "metric": metric,
    "checkpoint": loaded.source,
    "step": loaded.step,
    "weights": loaded.weights,
    "data": val_set.name,
}

if metric == "loss":
    mean, quarters = validation_loss(
        loaded.model, loaded.process, val_set, num_images, seed, codec, batch_size, device, autocast, low_res_size
    )
    result |= {"num_images": min(num_images, len(val_set)), "loss": mean}
    result |= {f"loss_q{i}": q for i, q in enumerate(quarters) if q == q}  # of fewer than 4 images some are NaN

elif metric == "bpd":
    if not loaded.process.num_timesteps:
        raise UserError(f"metric=bpd: {loaded.source} was trained with flow matching; accepted: objective eps, x0 or v")
    if loaded.data["kind"] != "images":
        raise UserError(f"metric=bpd: {loaded.source} was trained on latents; accepted: models of pixels")
    with Progress(min(num_images, len(val_set)), "images", "bits/dim") as bar:
        terms = bits_per_dim(
            loaded.model, loaded.process, val_set, num_images, codec, batch_size, device, autocast, low_res_size,
            bar.update,
        )  # fmt: skip
    result |= {"num_images": min(num_images, len(val_set)), "timesteps": loaded.process.num_timesteps}
    result |= {name: value for name, value in terms.items() if name.endswith("bpd")}
    if rank == 0 and loaded.run_dir:
        path = loaded.run_dir / f"bpd_terms_{loaded.step:06d}.npz"
        np.savez(path, **{name: value for name, value in terms.items() if not name.endswith("bpd")})
        print0(f"vb, xstart_mse and mse by timestep, first t = T-1: {path}")

elif metric == "class_accuracy":
    if not num_classes:
        raise UserError(f"metric={metric}: {loaded.source} was trained without classes")
    if low_res_size:
        raise UserError(f"metric={metric}: {loaded.source} is a super-resolution model")
    sampler = choose_sampler(loaded.process, sampler, steps)
    cfg_scale = cfg_scale if loaded.has_null_class else 1.0
    judge = get_judge(open_dataset(data or loaded.data["name"], "train"), val_set, device)
    labels = torch.arange(num_images) % num_classes
    share = torch.arange(num_images).tensor_split(world)[rank]
    with Progress(len(share), "images", "sampling") as bar:
        images = sample_images(
            loaded.model, loaded.process, [(seed << 32) + int(i) for i in share], {"y": labels[share]},
            codec.shape, steps, sampler, batch_size, device, autocast, bar.update, cfg_scale=cfg_scale,
        )  # fmt: skip
    hits = (judge.predict(codec.to_pixels(images)) == labels[share]).sum()
    accuracy = float(sum_over_ranks(hits, device)) / num_images
    result |= {"num_images": num_images, "sampler": sampler, "steps": steps, "cfg_scale": cfg_scale, "seed": seed}
    result |= {"class_accuracy": accuracy, "judge_accuracy_on_real_images": judge.accuracy}

for key, value in result.items():
    print0(f"{key:>30}  {value}")
if rank == 0 and loaded.run_dir:
    path = loaded.run_dir / f"eval_{metric}_{loaded.step:06d}.json"
    write_atomic(path, json.dumps(result, indent=1).encode())
    print0(f"written to {path}")
if world > 1:
    dist.barrier()  # gloo may abort a rank that leaves while another still works
    dist.destroy_process_group()
