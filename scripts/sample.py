"""
Sample from a trained model: a grid to look at, or an .npz of any number of images.

    python -m scripts.sample                                   # the newest run, its newest checkpoint, averaged weights
    python -m scripts.sample --run=shapes_dit_d4 --classes=0,3 --num_images=16 --cfg_scale=4
    torchrun --standalone --nproc_per_node=8 -m scripts.sample --run=cifar10_dit_d12 --num_images=50000 --npz=True
    python -m scripts.sample --run=DiT-XL-2-256x256.pt         # Meta's or improved-diffusion's published format

Image i depends on (seed, i) and its class alone: not on the batch size, nor on the number of ranks.
"""

import json
import os
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from configurator import configure
from nanodiff.codec import load_codec
from nanodiff.common import Progress, UserError, choose_dtype, get_dist, init_device, print0, write_atomic
from nanodiff.evaluation import sample_images
from nanodiff.png import encode_png, make_grid
from nanodiff.recipe import choose_sampler, load_run

run = ""  # tag or folder of a run, or a published checkpoint file; "" = the run that was written to last
checkpoint_step = -1  # >= -1: step of the checkpoint; -1 = the newest
ema = ""  # which average of the weights: a rate, or raw; "" = the first rate
num_images = 64  # >= 1: how many
classes = ""  # class numbers, comma-separated, in turn; "" = all in turn
sampler = "auto"  # auto|euler|heun|sde|ddpm|ddim|dpm++: auto = heun for flow, ddim for the rest
steps = 50  # >= 1: of the sampler
cfg_scale = 2.0  # >= 0: classifier-free guidance; 1 = none
cfg_interval = "0,1"  # guide only where t, from 0 (image) to 1 (noise), is in this interval
cfg_channels = 0  # >= 0: guide only the first channels, 3 as in the published DiT; 0 = all
seed = 0  # >= 0: of the images
batch_size = 64  # >= 1: images at a time on each rank
npz = False  # write arr_0 (N, H, W, C) uint8 and labels too
out = ""  # path without suffix of what is written; "" = samples/ in the run's folder
autoencoder = ""  # path of that of a latent model; "" = where it was when the latents were made
device_type = ""  # ""|cuda|cpu|mps: "" = the best that is present
dtype = "auto"  # auto|bfloat16|float16|float32: of the matrix products
# Of a published checkpoint file, which holds weights alone; by default as in the published models
num_heads = 0  # >= 0: attention heads; 0 = the published
image_size = 0  # >= 0: pixels a side of a UNet; 0 = such that attention starts at 16 pixels
noise_schedule = "auto"  # auto|linear|cosine: of a UNet
num_timesteps = 0  # >= 0: of a UNet's process; 0 = the published
rescale_timesteps = "auto"  # auto|yes|no: does a UNet see t in [0, 1000)?
config = configure(globals())

rank, _, world = get_dist()
device = init_device(device_type)
compute_dtype = choose_dtype(dtype, device)
autocast = nullcontext() if compute_dtype == torch.float32 else torch.autocast(device.type, dtype=compute_dtype)
published = dict(noise_schedule=noise_schedule, num_timesteps=num_timesteps, rescale_timesteps=rescale_timesteps)
loaded = load_run(run, device, checkpoint_step, ema, num_heads=num_heads, image_size=image_size, **published)
codec = load_codec(loaded.data, device, autoencoder)
if codec.obstacle:
    print0(f"latents are shown as they are: {codec.obstacle}")
num_classes, low_res_size = loaded.num_classes, loaded.config["low_res_size"]
if low_res_size:
    raise UserError(f"{loaded.source} is a super-resolution model: its training run shows samples of it")
sampler = choose_sampler(loaded.process, sampler, steps)
if not loaded.has_null_class:
    cfg_scale = 1.0  # the model was never trained without labels: there is nothing to guide away from
try:
    low, high = (float(x) for x in cfg_interval.split(","))
    if not 0 <= low < high <= 1:
        raise ValueError
except ValueError:
    raise UserError(f"cfg_interval={cfg_interval!r}; accepted: two numbers from 0 to 1, such as 0.1,0.8") from None
try:
    chosen = [int(c) for c in classes.split(",")] if classes else list(range(max(num_classes, 1)))
except ValueError:
    raise UserError(f"classes={classes!r}; accepted: numbers from 0 to {num_classes - 1}, such as 0,3") from None
if classes and not all(0 <= c < num_classes for c in chosen):
    raise UserError(f"classes={classes!r}: this model has {num_classes or 'no'} classes, numbered from 0")
if num_images < world:
    raise UserError(f"num_images={num_images}; accepted: at least one for each of {world} ranks")
default = (loaded.run_dir / "samples" if loaded.run_dir else Path(".")) / f"sample_{loaded.step:06d}_seed{seed}"
stem = Path(out.removesuffix(".png").removesuffix(".npz") if out else default)
try:  # before the hours of sampling, not after
    stem.parent.mkdir(parents=True, exist_ok=True)
except OSError as e:
    raise UserError(f"out={out!r}: cannot write to {stem.parent}: {e.strerror}") from None
if not os.access(stem.parent, os.W_OK):
    raise UserError(f"out={out!r}: cannot write to {stem.parent}: no permission")

# Image i is drawn from seed (seed, i); rank r takes a contiguous share
labels = torch.tensor([chosen[i % len(chosen)] for i in range(num_images)])
share = torch.arange(num_images).tensor_split(world)[rank]
cond = {"y": labels[share]} if num_classes else {}
protocol = {
    "checkpoint": loaded.source, "step": loaded.step, "weights": loaded.weights, "sampler": sampler, "steps": steps,
    "cfg_scale": cfg_scale, "cfg_interval": [low, high], "classes": classes or "all, balanced",
    "num_images": num_images, "seed": seed, "dtype": str(compute_dtype)[6:],
    "rounding": "round(127.5 (x + 1)), clamped to 0..255",
}  # fmt: skip
print0("protocol: " + json.dumps(protocol))
with Progress(len(share), "images", "sampling") as bar:
    images = sample_images(
        loaded.model, loaded.process, [(seed << 32) + int(i) for i in share], cond, codec.shape, steps, sampler,
        batch_size, device, autocast, bar.update, cfg_scale=cfg_scale, cfg_interval=(low, high),
        cfg_channels=cfg_channels or None,
    )  # fmt: skip
images = codec.to_pixels(images)
if world > 1:
    parts = [None] * world
    dist.gather_object(images, parts if rank == 0 else None)

if rank == 0:
    images = (torch.cat(parts) if world > 1 else images).numpy()
    png, protocol_json = stem.with_name(f"{stem.name}.png"), json.dumps(protocol)
    columns = len(chosen) if 4 <= len(chosen) <= 10 else 8
    grid = make_grid(images[:256], columns, scale=max(1, 48 // images.shape[-1]))
    try:
        write_atomic(png, encode_png(grid, {"protocol": protocol_json}))
        print0(f"{min(num_images, 256)} images: {png}")
        if npz:
            tmp, final = stem.with_name(f".{stem.name}.tmp.npz"), stem.with_name(f"{stem.name}.npz")
            np.savez(tmp, arr_0=images.transpose(0, 2, 3, 1), labels=labels.numpy(), protocol=protocol_json)
            os.replace(tmp, final)
            print0(f"{num_images} images: {final}")
    except OSError as e:
        raise UserError(f"out={out!r}: cannot write {stem}: {e.strerror}") from e
if world > 1:
    dist.barrier()  # gloo may abort a rank that leaves while another still works
    dist.destroy_process_group()
