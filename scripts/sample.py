"""
Sample from a trained model: a grid to look at, or an .npz of any number of images, as ADM's evaluations read it.

    python3 -m scripts.sample                                   # the newest run, averaged weights
    python3 -m scripts.sample --model=shapes_dit_d4 --classes=0,3 --num_images=16 --cfg_scale=4
    torchrun --standalone --nproc_per_node=8 -m scripts.sample --model=cifar10_dit_d12 --num_images=50000 --npz
    python3 -m scripts.sample --model=DiT-XL-2-256x256.pt         # Meta's or improved-diffusion's published format
    python3 -m scripts.sample --model=ema.pt,heads=2,num_timesteps=100    # with settings that such a file lacks
    python3 -m scripts.sample --model=upsampler --low_res=base_samples.npz  # super-resolution of other samples

Image i depends only on (seed, i) and its conditions. After a stop or a kill the same command resumes, on any number of
ranks, and writes the same bytes.
"""

import math
import sys
import time
from pathlib import Path

import numpy as np
import torch

from configurator import configure
from nanodiff.common import Progress, UserError, at, base_dir, count, get_dist, print0
from nanodiff.device import autocast_to, choose_dtype, device_name, init_device
from nanodiff.dist import from_first_rank, leave_together, over_ranks
from nanodiff.files import name_of_settings, sha256_of, write_atomic
from nanodiff.formats.load import find, load_run
from nanodiff.png import encode_png, make_grid
from nanodiff.prepare.containers import is_image
from nanodiff.sampling.draw import in_words
from nanodiff.sampling.loaded import open_samples, settings_for
from nanodiff.sampling.settings import (  # configure overrides them
    SAMPLERS,  # noqa: F401 (for the rule of `sampler`)
    batch_size,
    cfg_channels,
    classes,
    dtype,
    eta,
    first,
    from_images,
    num_images,
    seed,
    size,
    strength,
)
from nanodiff.sampling.store import SampleStore

# Model
model = ""  # tag or folder of a run, or an exported or published file; "" = the run written to last
checkpoint_step = "newest"  # newest or >= 0: step of the run's checkpoint
ema = ""  # which weights: the rate of an average, or raw; "" = the first rate
lora = ""  # adapters of base_train (lora_rank) to merge into the weights: a .safetensors file
lora_scale = 1.0  # strength of the adapters
device_type = ""  # ""|cuda|cpu|mps: "" = the best present
# Output
npz = False  # also write arr_0 (N, H, W, C), labels and protocol
out = ""  # path of the output, without suffix; "" = named by changed settings, in samples/ of the run's folder or, for
#           a file, of $NANODIFF_BASE_DIR
MODULES = ("sampling/settings",)  # with the settings of Loaded.sample
config = configure(globals(), modules=MODULES)
APART = "model checkpoint_step seed respacing npz out device_type".split()  # not repeated in the name
GRID_IMAGES = 256  # the most that a grid shows

# ---------------------------------------------------------------------------------------------------------------------
# Setup: the model, the sampler

rank, _, world = get_dist()
device = init_device(device_type, 604_800, config)  # ranks wait for the slowest, and while rank 0 writes
compute_dtype = choose_dtype(dtype, device)
loaded = load_run(model, device, checkpoint_step, ema, lora, lora_scale)
samples = open_samples(loaded, **config)
settings, codec = samples.settings, samples.codec
config |= settings.named  # the output's name says what differs from the run's own
config.defaults |= settings_for(loaded).named
npz |= out.endswith(".npz")
if samples.is_mixed and npz:
    raise UserError(f"npz: one file holds images of one size; give --size={codec.image_size}x{codec.image_size}, say")
if npz and not classes:
    samples.in_proportion(loaded.data.name, "train", num_images)
if num_images > GRID_IMAGES and not npz:
    raise UserError(f"num_images={num_images}: a grid shows {GRID_IMAGES}; --npz keeps more")

# ---------------------------------------------------------------------------------------------------------------------
# Output path, and the protocol: everything an image depends on

apart = APART if loaded.is_named_by(model) else APART[1:]  # else the name says which of several files
name = name_of_settings(f"sample_{loaded.step:06d}_seed{seed}", config, *apart)
if not loaded.run_dir:
    name = f"{loaded.path.stem}_{name}"
folder = (loaded.run_dir or base_dir()) / "samples"
stem = str(at(out.removesuffix(".png").removesuffix(".npz") or folder / name))
if out and (is_image(stem) or Path(stem).is_dir()):
    raise UserError(f"out={out!r} is a folder, or no PNG; accepted: the path of a file, without suffix, .png or .npz")
png = Path(f"{stem}.png")
if out and png.exists() and b"protocol" not in png.read_bytes():
    raise UserError(f"out={out!r}: {png} is no picture of samples; choose another out, or remove it")
output = Path(f"{stem}.npz") if npz else png
latents = codec.data.latents or {}
protocol = loaded.described() | samples.protocol
protocol |= {
    "data": loaded.data.name,
    "size": size or ("as the data's" if samples.is_mixed else f"{codec.image_size}x{codec.image_size}"),
    "eta": eta,
    **(samples.start_images.description if samples.start_images else {}),
    "cfg_channels": cfg_channels or "all",
    "lora": f"{lora}, SHA-256 {sha256_of(find(lora)[0])}" if lora else "",
    "lora_scale": lora_scale,
    "classes": classes or protocol["classes"],
    "class_names": loaded.class_names,
    "num_images": num_images,
    "first": first,
    "batch_size": batch_size,
    "autoencoder": latents.get("autoencoder"),
    "autoencoder_sha256": latents.get("sha256"),
    "dtype": str(compute_dtype).removeprefix("torch."),
    "device": device_name(device) if device.type == "cuda" else device.type,
    "torch": torch.__version__,
}
print0(f"{loaded.title}: {in_words(protocol)}")
if from_images and num_images < (n := len(samples.start_images.x0)):
    print0(f"note: from_images has {n} images, num_images={num_images} uses {num_images} of them")
if from_images and strength and not protocol["network_evaluations"]:
    print0(f"strength={strength} of {settings.steps} steps rounds to none: the samples are the images themselves")

# ---------------------------------------------------------------------------------------------------------------------
# Each rank draws its batches, except those already drawn. A signal ends it at once: the same command resumes

ids = np.arange(first, first + num_images)
store = SampleStore(output, protocol, samples.batches(ids, batch_size))
if from_first_rank(rank == 0 and store.open(), "the store"):  # the other ranks wait here for the store's folder
    print0(f"{num_images:,} images of this protocol are there already: {output}")
    leave_together()
    sys.exit()
num_new = sum(len(store.parts[k]) for k in store.missing())  # by all ranks
if num_new < num_images:
    print0(f"{num_images - num_new:,} of {num_images:,} images are there already, in {store.folder}")
start = time.perf_counter()
with Progress(num_new, "images", "sampling") as bar:

    def on_step(i, steps, x0):
        bar.update(world * len(x0) / steps)  # the other ranks are about as far

    for k in store.missing(rank, world):
        with autocast_to(device, compute_dtype):
            x0 = samples.draw(store.parts[k], on_step)
        store.write(k, codec.to_output(x0).transpose(0, 2, 3, 1))  # (n, H, W, C)
not_finite = int(over_ranks(samples.not_finite))  # waits for the other ranks
if not_finite:
    print0(f"warning: {not_finite:,} of the images drawn are not finite (NaN): bad weights or {protocol['dtype']}")

# ---------------------------------------------------------------------------------------------------------------------
# Write a grid of the first images, and the file of all images

if rank == 0:
    images = [codec.picture(array.transpose(2, 0, 1)[None])[0] for array in store.first(GRID_IMAGES)]  # (C, H, W)
    num_shown = len(images)
    columns = samples.columns * math.ceil(num_shown / (8 * samples.columns))  # as wide as a screen
    order = ""
    if second_images := samples.second_images(ids[:num_shown]):
        images = [image for pair in zip(second_images, images) for image in pair]
        columns = 8
        order = " (second image, sample, second image, ...)"
    grid = make_grid(images, columns)
    write_atomic(png, encode_png(grid, protocol=store.protocol))
    seconds = time.perf_counter() - start
    print0(f"{count(num_new, 'image', 'images')} in {seconds:,.1f} s; a grid of {num_shown}{order}: {png}")
    if npz:
        store.write_npz(samples.labels(ids))
        print0(f"{count(num_images, 'image', 'images')}: {output}")
    store.close()
leave_together()
