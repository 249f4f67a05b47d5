"""
Write a trained model to a file: for nanodiff, or in a published format.

    python -m scripts.export --run=shapes_dit_d4                         # then: scripts.sample --run=FILE.safetensors
    python -m scripts.export --run=my_dit --form=meta                    # as facebookresearch/DiT's .pt
    python -m scripts.export --run=my_dit --form=diffusers               # a folder for its DiTTransformer2DModel
    python -m scripts.export --run=my_unet --form=improved_diffusion     # as openai/improved-diffusion's .pt
    python -m scripts.export --run=DiT-XL-2-256x256.pt --form=diffusers  # from one format to another

A .safetensors holds all that sampling needs. The other forms hold weights alone; the settings that belong to them are
printed.
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

run = ""  # tag or folder of a run, or an exported or published file; "" = the run that was written to last
checkpoint_step = -1  # >= -1: step of the checkpoint; -1 = the newest
ema = ""  # which weights: the rate of an average, or raw; "" = the first rate
lora = ""  # adapters of scripts/lora_train.py to merge into the weights: .safetensors files, comma-separated
lora_scale = "1"  # strength of the adapters: one number for all, or one each, comma-separated
form = "safetensors"  # safetensors|meta|diffusers|improved_diffusion: what to write
out = ""  # path of the file, or of the folder for diffusers; "" = exports/ in the run's folder
config = configure(globals())

# ---------------------------------------------------------------------------------------------------------------------
# The model, and whether the form can hold it

suffix = {"safetensors": ".safetensors", "diffusers": ""}.get(form, ".pt")
if out and not out.endswith(suffix):
    raise UserError(f"out={out!r} for form={form}; accepted: a path that ends in {suffix}")
loaded = load_run(run, torch.device("cpu"), checkpoint_step, ema)
apply_adapters(loaded, lora, lora_scale)
model_config = loaded.model.config
if isinstance(model_config, UNetConfig):
    arch = "unet"
else:
    arch = "dit_classic" if model_config.block == "classic" else "dit"
if form == "improved_diffusion" and arch != "unet":
    raise UserError(f"form={form} takes a unet; {loaded.source} is a {arch}")
plain = arch == "dit_classic" and model_config.num_classes and not model_config.low_res
if form in ("meta", "diffusers") and not plain:
    given = f"a {arch} with {model_config.num_classes or 'no'} classes, low_res={model_config.low_res}"
    raise UserError(f"form={form} takes a dit_classic with classes and no low_res; {loaded.source} is {given}")

# ---------------------------------------------------------------------------------------------------------------------
# Write

if loaded.run_dir:
    default = loaded.run_dir / "exports" / f"{loaded.run_dir.name}_{loaded.step:06d}_{loaded.weights}"
else:
    default = Path(Path(loaded.source).stem)  # here
if form != "safetensors":
    default = default.with_name(f"{default.name}_{form}")
path = Path(out or f"{default}{suffix}")
state_dict = loaded.model.state_dict()
try:
    if form == "safetensors":
        meta = dict(step=loaded.step, ema=loaded.weights, arch=arch, model_config=asdict(model_config))
        meta |= dict(config=loaded.config, data=loaded.data)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_safetensors(state_dict, path, {name: json.dumps(value) for name, value in meta.items()})
    elif form == "diffusers":
        diffusers_config, theirs = to_diffusers(state_dict, model_config)
        path.mkdir(parents=True, exist_ok=True)
        save_safetensors(theirs, path / "diffusion_pytorch_model.safetensors", {"format": "pt"})
        # the config last: without it the folder does not load
        write_atomic(path / "config.json", json.dumps(diffusers_config, indent=2).encode())
    else:
        theirs = (to_meta if form == "meta" else to_improved_diffusion)(state_dict, model_config)
        buffer = io.BytesIO()
        torch.save(theirs, buffer)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, buffer.getbuffer())
except OSError as e:
    raise UserError(f"out={out!r}: cannot write {path}: {e.strerror}") from e

num_params = sum(p.numel() for p in loaded.model.parameters())
print0(f"{num_params:,} parameters of {loaded.source} ({loaded.weights}): {path}")
if form == "safetensors":
    print0(f"to sample: python -m scripts.sample --run={path}")
else:
    names = ("objective", "noise_schedule", "num_timesteps", "variance", "rescale_timesteps")
    process = {name: loaded.config[name] for name in names if name in loaded.config}
    print0(f"not in the file: {json.dumps({'model': asdict(model_config), 'process': process})}")
if form == "diffusers":
    print0("diffusers embeds t with other frequencies than the published DiT; to get the model's own output:")
    print0("    for block in model.transformer_blocks: block.norm1.emb.time_proj.downscale_freq_shift = 0")
if form == "improved_diffusion" and model_config.num_classes and model_config.null_class:
    print0("the null class was left out, as that format has no row for it: no classifier-free guidance")
