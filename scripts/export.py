"""
Write a trained model as a file to take elsewhere: for nanodiff, or in a published format.

    python -m scripts.export --run=shapes_dit_d4                         # then: scripts.sample --run=FILE.safetensors
    python -m scripts.export --run=my_dit --form=meta                    # as facebookresearch/DiT's .pt
    python -m scripts.export --run=my_dit --form=diffusers               # a folder for its DiTTransformer2DModel
    python -m scripts.export --run=my_unet --form=improved_diffusion     # as openai/improved-diffusion's .pt
    python -m scripts.export --run=DiT-XL-2-256x256.pt --form=diffusers  # from one format to another

A .safetensors holds all that sampling needs; the other forms hold weights alone, and what goes with them is printed.
"""

import io
import json
from dataclasses import asdict
from pathlib import Path

import torch

from configurator import configure
from nanodiff.common import UserError, print0
from nanodiff.files import write_atomic
from nanodiff.formats.adapters import apply_adapters
from nanodiff.formats.load import load_run
from nanodiff.formats.published import to_diffusers, to_improved_diffusion, to_meta
from nanodiff.models.unet import UNetConfig
from nanodiff.safetensors import save_safetensors

run = ""  # tag or folder of a run, or a published checkpoint file; "" = the run that was written to last
checkpoint_step = -1  # >= -1: step of the checkpoint; -1 = the newest
ema = ""  # which average of the weights: a rate, or raw; "" = the first rate
lora = ""  # adapters of scripts/lora_train.py to merge into the weights: .safetensors files, comma-separated
lora_scale = "1"  # how much of them: a number for each, comma-separated, or one for all
form = "safetensors"  # safetensors|meta|diffusers|improved_diffusion: what to write
out = ""  # path of the file, or of the folder for diffusers; "" = exports/ in the run's folder
config = configure(globals())

suffix = {"safetensors": ".safetensors", "diffusers": ""}.get(form, ".pt")
if out and not out.endswith(suffix):
    raise UserError(f"out={out!r} for form={form}; accepted: a path that ends in {suffix}")
loaded = load_run(run, torch.device("cpu"), checkpoint_step, ema)
apply_adapters(loaded, lora, lora_scale)
model_config, state_dict = loaded.model.config, loaded.model.state_dict()
is_unet = isinstance(model_config, UNetConfig)
arch = "unet" if is_unet else "dit_classic" if model_config.block == "classic" else "dit"

# What each form can express, and its names and shapes
if form == "improved_diffusion":
    if not is_unet:
        raise UserError(f"form={form} takes a unet; {loaded.source} is a {arch}")
    state_dict = to_improved_diffusion(state_dict, model_config)
elif form != "safetensors":
    if arch != "dit_classic" or not model_config.num_classes or model_config.low_res:
        given = f"a {arch} with {model_config.num_classes or 'no'} classes{', low_res' if model_config.low_res else ''}"
        raise UserError(f"form={form} takes a dit_classic with classes and no low_res; {loaded.source} is {given}")
    if form == "meta":
        state_dict = to_meta(state_dict, model_config)
    else:
        diffusers_config, state_dict = to_diffusers(state_dict, model_config)

if loaded.run_dir:
    default = loaded.run_dir / "exports" / f"{loaded.run_dir.name}_{loaded.step:06d}_{loaded.weights}"
else:
    default = Path(Path(loaded.source).stem)  # here
if form != "safetensors":
    default = default.with_name(f"{default.name}_{form}")
path = Path(out or f"{default}{suffix}")
described = dict(step=loaded.step, ema=loaded.weights, arch=arch, model_config=asdict(model_config))
described |= dict(config=loaded.config, data=loaded.data)
folder = path if form == "diffusers" else path.parent
try:
    folder.mkdir(parents=True, exist_ok=True)
    if form == "safetensors":
        save_safetensors(state_dict, path, {name: json.dumps(value) for name, value in described.items()})
    elif form == "diffusers":  # the config last: without it the folder does not load
        save_safetensors(state_dict, path / "diffusion_pytorch_model.safetensors", {"format": "pt"})
        write_atomic(path / "config.json", json.dumps(diffusers_config, indent=2).encode())
    else:
        buffer = io.BytesIO()
        torch.save(state_dict, buffer)
        write_atomic(path, buffer.getbuffer())
except OSError as e:
    raise UserError(f"out={out!r}: cannot write {path}: {e.strerror}") from e

num_params = sum(p.numel() for p in loaded.model.parameters())
print0(f"{num_params:,} parameters of {loaded.source} ({loaded.weights}): {path}")
if form == "safetensors":
    print0(f"to sample: python -m scripts.sample --run={path}")
else:
    names = ("objective", "flow_prediction", "noise_schedule", "num_timesteps", "variance", "rescale_timesteps")
    process = {name: loaded.config[name] for name in names if name in loaded.config}
    print0(f"what is not in the weights: {json.dumps({'model': asdict(model_config), 'process': process})}")
if form == "diffusers":
    print0("diffusers embeds t with other frequencies than the published DiT; this gives the model's own output:")
    print0("    for block in model.transformer_blocks: block.norm1.emb.time_proj.downscale_freq_shift = 0")
if form == "improved_diffusion" and model_config.num_classes and model_config.null_class:
    print0("the null class, for which that format has no row, was left out: no classifier-free guidance")
