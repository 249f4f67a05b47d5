"""
Sample from a trained model: a grid to look at, or an .npz of any number of images, in the form of ADM's evaluations.

    python -m scripts.sample                                   # the newest run, its newest checkpoint, averaged weights
    python -m scripts.sample --run=shapes_dit_d4 --classes=0,3 --num_images=16 --cfg_scale=4
    torchrun --standalone --nproc_per_node=8 -m scripts.sample -- --run=cifar10_dit_d12 --num_images=50000 --npz
    python -m scripts.sample --run=DiT-XL-2-256x256.pt         # Meta's or improved-diffusion's published format
    python -m scripts.sample --guide_step=20000                # guided by an earlier checkpoint (autoguidance)

Image i depends on (seed, i) and its class alone: not on the batch size, nor on the number of ranks. The same
command continues a run that was stopped or killed, on any number of ranks; the bytes in the end are the same.
"""

import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch

from configurator import configure
from nanodiff.common import Progress, StopSignal, UserError, brief, get_dist, leave_together, print0, sum_over_ranks
from nanodiff.data.latents import load_codec
from nanodiff.device import choose_dtype, device_name, init_device
from nanodiff.diffusion.process import choose_sampler
from nanodiff.diffusion.sampling import SampleSettings, network_evaluations, sample_images
from nanodiff.files import write_atomic
from nanodiff.formats.adapters import apply_adapters
from nanodiff.formats.load import check_guide, load_run
from nanodiff.formats.sample_store import GRID_IMAGES, SampleStore
from nanodiff.models.build import parse_classes
from nanodiff.png import encode_png, make_grid

run = ""  # tag or folder of a run, or a published checkpoint file; "" = the run that was written to last
checkpoint_step = -1  # >= -1: step of the checkpoint; -1 = the newest
ema = ""  # which average of the weights: a rate, or raw; "" = the first rate
lora = ""  # adapters of scripts/lora_train.py to merge into the weights: .safetensors files, comma-separated
lora_scale = "1"  # how much of them: a number for each, comma-separated, or one for all
num_images = 64  # >= 1: how many; a grid shows the first 256
classes = ""  # class numbers, comma-separated, in turn; "" = all in turn
sampler = "auto"  # auto|euler|heun|sde|ddpm|ddim|dpm++: auto = heun for flow, ddim for the rest
steps = 50  # >= 1: of the sampler
respacing = ""  # which timesteps of a Gaussian diffusion, in place of steps: "250", "ddim50", "10,15,20" (IDDPM)
eta = 0.0  # [0, 1]: noise of ddim's steps; 1 = as much as ddpm
cfg_scale = 2.0  # >= 0: guidance, away from the null class or from another model; 1 = none
cfg_interval = "0,1"  # guide only where t, from 0 (image) to 1 (noise), is in this interval
cfg_channels = 0  # >= 0: guide only the first channels, 3 as in the published DiT; 0 = all
guide_run = ""  # a weaker model to guide away from: tag, folder or file; "" = this run, if one of the next two is given
guide_step = -1  # >= -1: step of its checkpoint; -1 = the newest
guide_ema = ""  # which average of its weights; "" = the first rate
seed = 0  # >= 0: of the images
batch_size = 64  # >= 1: images at a time on each rank
npz = False  # write arr_0 (N, H, W, C) uint8, labels and protocol too
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

# ---------------------------------------------------------------------------------------------------------------------
# Setup: the model, its guide, and what is asked of them

rank, _, world = get_dist()
device = init_device(device_type, timeout_s=7 * 24 * 3600)  # ranks wait for the slowest, and for the file
compute_dtype = choose_dtype(dtype, device)
autocast = nullcontext() if compute_dtype == torch.float32 else torch.autocast(device.type, dtype=compute_dtype)
published = dict(num_heads=num_heads, image_size=image_size, noise_schedule=noise_schedule)
published |= dict(num_timesteps=num_timesteps, rescale_timesteps=rescale_timesteps)
loaded = load_run(run, device, checkpoint_step, ema, **published)
apply_adapters(loaded, lora, lora_scale)
codec = load_codec(loaded.data, device, autoencoder)
codec.keep_loaded()
if codec.undecodable:
    print0(f"latents are shown as they are: {codec.undecodable}")
num_classes, low_res_size = loaded.num_classes, loaded.config["low_res_size"]
if low_res_size:
    raise UserError(f"{loaded.source} is a super-resolution model: its training run shows samples of it")
guide = None
if guide_run or guide_step >= 0 or guide_ema:
    guide = load_run(guide_run or str(loaded.run_dir or loaded.source), device, guide_step, guide_ema, **published)
    check_guide(guide, loaded)
elif not loaded.has_null_class:
    cfg_scale = 1.0  # the model was never trained without labels: there is nothing to guide away from
sampler = choose_sampler(loaded.process, sampler, steps, eta, respacing)
try:
    low, high = (float(x) for x in cfg_interval.split(","))
    if not 0 <= low < high <= 1:
        raise ValueError
except ValueError:
    raise UserError(f"cfg_interval={cfg_interval!r}; accepted: two numbers from 0 to 1, such as 0.1,0.8") from None
chosen = parse_classes(classes, num_classes)
if num_images > GRID_IMAGES and not npz:
    raise UserError(f"num_images={num_images}: a grid shows {GRID_IMAGES}; --npz keeps more")
default = (loaded.run_dir / "samples" if loaded.run_dir else Path(".")) / f"sample_{loaded.step:06d}_seed{seed}"
stem = Path(out.removesuffix(".png").removesuffix(".npz") if out else default)
png, output = (stem.with_name(f"{stem.name}.{suffix}") for suffix in ("png", "npz" if npz else "png"))
try:  # before the hours of sampling, not after
    stem.parent.mkdir(parents=True, exist_ok=True)
except OSError as e:
    raise UserError(f"out={out!r}: cannot write to {stem.parent}: {e.strerror}") from None

# All that an image depends on, and no more: the number of ranks is not in it
settings = SampleSettings(
    steps, sampler, cfg_scale, (low, high), eta, respacing, guide and guide.model, cfg_channels or None
)
latents = {} if codec.undecodable else codec.facts.get("latents", {})
protocol = loaded.described() | {
    "sampler": sampler, "steps": steps, "respacing": respacing, "eta": eta,
    "network_evaluations": network_evaluations(loaded.model, loaded.process, settings),
    "cfg_scale": cfg_scale, "cfg_interval": [low, high], "cfg_channels": cfg_channels or "all",
    "guide": guide and guide.described(), "lora": lora, "lora_scale": lora_scale if lora else "",
    "classes": classes or "all, balanced", "class_names": loaded.data["class_names"][:num_classes],
    "num_images": num_images, "seed": seed, "batch_size": batch_size,
    "autoencoder": latents.get("autoencoder"), "autoencoder_sha256": latents.get("sha256"),
    "rounding": "round(127.5 (x + 1)), clamped to 0..255", "dtype": str(compute_dtype)[6:],
    "device": device_name(device) if device.type == "cuda" else device.type, "torch": torch.__version__,
}  # fmt: skip
print0(f"protocol: {json.dumps(brief(protocol))}")

# ---------------------------------------------------------------------------------------------------------------------
# Draw: each rank its parts, a part a batch, less those that are there from a run that was stopped

store = SampleStore(output, protocol, num_images, batch_size)
finished = store.open() if rank == 0 else False
finished = bool(sum_over_ranks(torch.tensor(int(finished)), device))  # the other ranks wait here for the store
todo = [] if finished else store.missing(rank, world)
before, start = num_images if finished else store.num_drawn(), time.perf_counter()
if 0 < before < num_images:
    print0(f"{before:,} of {num_images:,} images are there already, in {store.folder}")
labels = torch.tensor([chosen[i % len(chosen)] for i in range(num_images)])
stop = StopSignal()
with Progress(num_images - before, "images", "sampling") as bar:
    for k in todo:
        ids = store.ids(k)
        seeds = [(seed << 32) + i for i in ids]
        cond = {"y": labels[list(ids)]} if num_classes else {}
        with autocast:
            x0 = sample_images(loaded.model, loaded.process, seeds, cond, codec.shape, settings, batch_size)
        store.write(k, codec.to_pixels(x0).permute(0, 2, 3, 1).numpy())  # (n, H, W, C)
        bar.update(store.num_drawn() - before - bar.done)  # what the other ranks have drawn counts as well
        if stop.received:
            break
stopped = stop.agreed(device)  # waits for the other ranks

# ---------------------------------------------------------------------------------------------------------------------
# The end: a grid of the first images, and the file of all

if rank == 0 and stopped:
    print0(f"stopped by signal {stopped} at {store.num_drawn():,} of {num_images:,} images: the same command continues")
elif rank == 0 and finished:
    print0(f"{num_images:,} images of this protocol are there already: {output}")
elif rank == 0:
    seconds, drawn = time.perf_counter() - start, num_images - before
    print0(f"drew {drawn:,} images in {seconds:,.1f} s, {drawn / seconds:,.2f} a second")
    images = store.first(GRID_IMAGES).transpose(0, 3, 1, 2)  # (n, C, H, W)
    columns = len(chosen) if 4 <= len(chosen) <= 10 else 8
    grid = make_grid(images, columns, scale=max(1, 48 // images.shape[-1]))
    try:
        write_atomic(png, encode_png(grid, {"protocol": store.protocol}))
        print0(f"{len(images)} images: {png}")
        if npz:
            store.write_npz(labels.numpy())
            print0(f"{num_images:,} images: {output}")
    except OSError as e:
        raise UserError(f"out={out!r}: cannot write {stem}: {e.strerror}; the same command goes on from there") from e
    store.close()
leave_together()
if stopped:
    sys.exit(128 + stopped)  # as a shell would say it: 0 means that the file is there
