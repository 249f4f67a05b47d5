"""
Write a trained model to a file: for nanodiff, or in a published format.

    python -m scripts.export --run=shapes_dit_d4                         # then: scripts.sample --run=FILE.safetensors
    python -m scripts.export --run=my_dit --form=meta                    # as facebookresearch/DiT's .pt
    python -m scripts.export --run=my_dit --form=diffusers               # a folder for its DiTTransformer2DModel
    python -m scripts.export --run=my_unet --form=improved_diffusion     # as openai/improved-diffusion's .pt
    python -m scripts.export --run=DiT-XL-2-256x256.pt --form=diffusers  # from one format to another

A .safetensors holds all that sampling needs; other forms hold only weights, and settings are printed.
"""

import json
import shlex
from dataclasses import asdict
from pathlib import Path

import torch

from configurator import configure
from nanodiff.common import UserError, print0
from nanodiff.files import write_atomic, writing
from nanodiff.formats.adapters import apply_adapters
from nanodiff.formats.load import DIFFUSERS, load_run
from nanodiff.formats.published import to_diffusers, to_improved_diffusion, to_meta
from nanodiff.formats.start import shape_settings
from nanodiff.safetensors import save_safetensors

run = ""  # tag or folder of a run, or an exported or published file; "" = the run that was written to last
checkpoint_step = -1  # >= -1: step of the checkpoint; -1 = the newest
ema = ""  # which weights: the rate of an average, or raw; "" = the first rate
lora = ""  # adapters of lora_train to merge into the weights: .safetensors files, comma-separated
lora_scale = "1"  # their strength: one number for all, or one each, comma-separated
form = "safetensors"  # safetensors|meta|diffusers|improved_diffusion: what to write
out = ""  # path of the file, or of the folder for diffusers; "" = exports/ in the run's folder
config = configure(globals())

# ---------------------------------------------------------------------------------------------------------------------
# The model; can the form hold it?

suffix = {"safetensors": ".safetensors", "diffusers": ""}.get(form, ".pt")
if out and not out.endswith(suffix):
    raise UserError(f"out={out!r} for form={form}; accepted: a path that ends in {suffix}")
loaded = load_run(run, torch.device("cpu"), checkpoint_step, ema)
apply_adapters(loaded, lora, lora_scale)
model_config = loaded.model.config
arch = shape_settings(model_config, model_config.image_size)["arch"]
given = f"{loaded.source} is a {arch} with {model_config.num_classes or 'no'} classes, low_res={model_config.low_res}"
if form == "improved_diffusion" and arch != "unet":
    raise UserError(f"form={form} takes a unet; {given}")
plain = arch == "dit_classic" and model_config.num_classes and not model_config.low_res
if form in ("meta", "diffusers") and not plain:
    raise UserError(f"form={form} takes a dit_classic with classes and no low_res; {given}")
has = (loaded.config["objective"], loaded.config.get("variance", ""))
if form != "safetensors" and (has[0] != "eps" or has[1] == "learned"):  # else sampled wrongly
    raise UserError(f"form={form} is read as objective=eps, variance fixed or learned_range, not as {', '.join(has)}")

# ---------------------------------------------------------------------------------------------------------------------
# Write

default = Path(loaded.source).stem  # here
if loaded.run_dir:
    default = loaded.run_dir / "exports" / f"{loaded.run_dir.name}_{loaded.step:06d}_{loaded.weights}"
ending = "" if form == "safetensors" else f"_{form}"
path = Path(out or f"{default}{ending}{suffix}")
tensors = loaded.model.state_dict()
if form == "diffusers":
    diffusers_config, tensors = to_diffusers(tensors, model_config)
elif form != "safetensors":
    tensors = (to_meta if form == "meta" else to_improved_diffusion)(tensors, model_config)
try:
    (path if form == "diffusers" else path.parent).mkdir(parents=True, exist_ok=True)
    if form == "safetensors":
        meta = dict(step=loaded.step, ema=loaded.weights, arch=arch, model_config=asdict(model_config))
        meta |= dict(config=loaded.config, data=loaded.data)
        save_safetensors(tensors, path, {name: json.dumps(value) for name, value in meta.items()})
    elif form == "diffusers":
        save_safetensors(tensors, path / DIFFUSERS, {"format": "pt"})
        # the config last: without it the folder does not load
        write_atomic(path / "config.json", json.dumps(diffusers_config, indent=2).encode())
    else:
        with writing(path) as file:
            torch.save(tensors, file)
except OSError as e:
    raise UserError(f"out={out!r}: cannot write {path}: {e.strerror}") from e

num_params = sum(p.numel() for p in loaded.model.parameters())
print0(f"{num_params:,} parameters of {loaded.source} ({loaded.weights}): {path}")
if form == "safetensors":
    print0(f"to sample: python -m scripts.sample --run={shlex.quote(str(path))}")
else:
    names = ("objective", "noise_schedule", "num_timesteps", "variance", "rescale_timesteps")
    process = {name: loaded.config.get(name) for name in names}
    print0(f"not in the file: {json.dumps({'model': asdict(model_config), 'process': process})}")
if form == "diffusers":
    print0("diffusers embeds t with other frequencies than the published DiT; to get the model's own output:")
    print0("    for block in model.transformer_blocks: block.norm1.emb.time_proj.downscale_freq_shift = 0")
if form == "improved_diffusion" and model_config.num_classes and model_config.null_class:
    print0("the null class was left out, as that format has no row for it: no classifier-free guidance")
