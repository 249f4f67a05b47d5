"""
Write a trained model to a file: for nanodiff, or in the published format of Meta's DiT or OpenAI's UNet.

    python3 -m scripts.export --model=shapes_dit_d4              # then: scripts.sample --model=FILE.safetensors
    python3 -m scripts.export --model=my_dit --form=meta         # as facebookresearch/DiT's .pt
    python3 -m scripts.export --model=my_unet --form=openai      # as openai/improved-diffusion's .pt

A .safetensors holds all that sampling needs. Meta's form holds the weights as "ema", as Meta's training checkpoints do,
and also the heads, schedule and T that nanodiff needs. OpenAI's form is a state dict: it holds neither these nor a null
class. What a form does not hold is printed.
"""

import shlex

import torch

from configurator import configure
from nanodiff.common import UserError, at, print0
from nanodiff.files import writing
from nanodiff.formats.load import build, find, read, with_options
from nanodiff.formats.published import to_published
from nanodiff.safetensors import described, fingerprint, save_safetensors

model = ""  # tag or folder of a run, or an exported or published file; "" = the run written to last
checkpoint_step = "newest"  # newest or >= 0: step of the run's checkpoint
ema = ""  # which weights: the rate of an average, or raw; "" = the first rate
lora = ""  # adapters of base_train (lora_rank) to merge into the weights: a .safetensors file
lora_scale = 1.0  # strength of the adapters
form = "safetensors"  # safetensors|meta|openai: what to write
out = ""  # path of the file; "" = exports/ in the run's folder
overwrite = False  # replace a file of that name
config = configure(globals())

# ---------------------------------------------------------------------------------------------------------------------
# The model; can the form hold it?

suffix = ".safetensors" if form == "safetensors" else ".pt"
if out and not out.endswith(suffix):
    raise UserError(f"out={out!r} for form={form}; accepted: a path that ends in {suffix}")
if (lora or lora_scale != 1) and not out:
    raise UserError(f"lora={lora!r}, lora_scale={lora_scale} without out, whose default is the name of the model alone")
meta, tensors = read(*find(model, step=checkpoint_step, ema=ema), lora, lora_scale)
source = build(meta, tensors, "cpu")
options = {}
if form != "safetensors":
    tensors, options = to_published(form, source, tensors)

# ---------------------------------------------------------------------------------------------------------------------
# Write

default = source.path.stem  # here
if source.run_dir:
    default = source.run_dir / "exports" / f"{source.run_dir.name}_{source.step:06d}_{source.weights}"
path = at(out or f"{default}{suffix}")
if path.exists() and not overwrite:
    raise UserError(f"out={out!r}: {path} is there already; accepted: another path, or --overwrite")
path.parent.mkdir(parents=True, exist_ok=True)
if form == "safetensors":
    meta.pop("lora", None)  # merged
    save_safetensors(tensors, path, described(meta | {"sha256": fingerprint(tensors)}))
else:
    state = tensors if form == "openai" else {"ema": tensors, "nanodiff": options}
    with writing(path) as file:
        torch.save(state, file)

num_params = sum(p.numel() for p in source.model.parameters())
print0(f"{num_params:,} parameters of {source.source} ({source.weights}): {path}")
print0(f"to sample: python3 -m scripts.sample --model={shlex.quote(with_options(path, options))}")
if form != "safetensors":
    print0("other loaders need the same settings; the file holds no class names")
