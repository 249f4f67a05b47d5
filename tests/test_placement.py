"""No operation of a training step or of a sampler mixes devices: seen without a GPU, on a stand-in for one.

The stand-in's tensors have shapes and a device but no data (torch's FakeTensorMode); as on a GPU, to combine them with
tensors of the CPU raises. It is registered in a process of its own, since it stays registered.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import script_settings
from processes import run_process
from tiny_runs import make_optimizer
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.utils import backend_registration

from nanodiff import common, conditions
from nanodiff.data import latents as codecs
from nanodiff.diffusion import guidance
from nanodiff.diffusion import process as processes
from nanodiff.diffusion.timesteps import make_timesteps
from nanodiff.models import autoencoder, build, lora
from nanodiff.sampling.draw import SampleSettings
from nanodiff.training.ema import EMA
from nanodiff.training.log import quartile_sums

register = getattr(backend_registration, "_setup_privateuseone_for_python_backend", None)

CASES = {
    "flow": {"samplers": 9},
    "flow of x0, AdamW": {"objective": "flow_x0", "optimizer": "adamw"},
    "eps": {"samplers": 9, "objective": "eps", "variance": "learned_range"},
    "x0": {"objective": "x0", "gaussian_loss": "kl"},
    "v without classes": {"objective": "v", "class_cond": False},
    "published DiT": {"arch": "dit_classic"},
    "UNet": {"arch": "unet", "num_res_blocks": 1, "objective": "eps", "optimizer": "adamw"},
    "adapters, checkpointing": {"rank": 4, "checkpointing": True},
    "super-resolution": {"low_res_size": 8},
    "cached latents": {"latents": "cached"},
    "encoded latents": {"latents": "encoded"},
    "a mistake": {"mistake": True},
}


def train_and_sample(device, rank=0, latents="", mistake=False, samplers=1, **changes):
    def moved(module):  # what module.to(device) does, which this torch cannot do to fake tensors
        for part in module.modules():
            part._buffers |= {name: b.to(device) for name, b in part._buffers.items()}
            present = {name: p for name, p in part._parameters.items() if p is not None}
            part._parameters |= {name: torch.nn.Parameter(p.to(device)) for name, p in present.items()}
        return module

    config = script_settings("base_train", "--depth=1") | changes
    config["time_input"] = "62.5t"
    data = conditions.DataInfo(
        kind="images",
        channels=3,
        resolution=16,
        num_classes=4,
        class_names=list("abcd"),
    )
    stored = torch.zeros(2, 3, 16, 16, dtype=torch.uint8, device=device)
    pixels = codecs.Pixels(data)
    if latents:
        autoencoder.MAX_PIXELS[device.type] = 2**16
        if latents == "encoded":
            vae = moved(autoencoder.TinyAutoencoder(4, False))
        else:
            vae = moved(autoencoder.AutoencoderKL((8, 8), 1, 4, 4, True))
        info = codecs.describe_latents(vae, "") | {"copies": 2}
        data = replace(
            data,
            kind="latents",
            channels=4,
            resolution=16 // vae.downsample,
            latents=info,
        )
        pixels = codecs.Latents(data, device)
        pixels.autoencoder = vae
        if latents == "cached":
            stored = torch.zeros(2, 2 * vae.parts * 4, *pixels.shape[1:], dtype=torch.float16, device=device)

    process = processes.make_process(config, data)
    model_config = build.make_model_config(config, data, process)
    backbone = build.UNet if config["arch"] == "unet" else build.DiT
    model = moved(backbone(model_config))
    model.init_weights(torch.Generator().manual_seed(0))
    num_classes = model_config.num_classes
    if rank:
        lora.add_lora(model, rank, rank, "all", [0])
    optimizer = make_optimizer(model, config["optimizer"])
    ema = EMA(model, optimizer)

    u = torch.rand(2, device=device)
    y = torch.zeros(2, dtype=torch.int64, device="cpu" if mistake else device)
    with unset_fake_temporarily():  # it reads numbers, on the CPU
        timesteps = make_timesteps("auto", process)
    t, weight = timesteps.sample(u)
    noise = torch.randn(2, *pixels.shape, device=device)
    x0 = pixels.to_x0(stored, u < 0.5, lambda _: noise)
    y = torch.where(u < 0.1, num_classes, y)
    cond = conditions.conditioning(model_config, {"y": y}, x0)
    terms = process.losses(model, x0, t, noise, cond)
    (terms["loss"] * weight).mean().backward()
    quartile_sums(t, terms["loss"], weight, process)
    for buffer in optimizer.buffers:  # sync_grads compares addresses, which fake tensors lack
        buffer.grad = torch.zeros_like(buffer.flat)
        for view, p in zip(buffer.views(buffer.grad), buffer.params):
            if p.grad is not None:
                view.copy_(p.grad)
    optimizer.finite = torch.ones((), dtype=torch.bool, device=device)
    optimizer.step()
    ema.update(1)
    optimizer.load_state_dict(optimizer.state_dict())
    with ema.applied(model):
        for sampler in list(process.samplers)[:samplers]:
            settings = SampleSettings(cfg_scale=2.0 if num_classes else 1.0)
            denoiser = guidance.make_denoiser(model, cond, settings)
            generator = common.StackedGenerator(range(2))
            start = generator.randn(noise.shape, device)
            sample = process.sample(denoiser, start, 3, sampler, generator)
            assert pixels.to_pixels(sample).device.type == "cpu"


def print_errors():
    register("stand_in")
    torch.stand_in.get_amp_supported_dtype = lambda: [torch.bfloat16]
    torch.linspace = np.linspace  # a sampler reads its times, which must be numbers
    real = torch.tensor  # knows no fake devices
    torch.tensor = lambda data, device="cpu": torch.zeros(np.shape(data), dtype=real(data).dtype, device=device)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for name, settings in CASES.items():
            try:
                train_and_sample(torch.device("stand_in:0"), **settings)
                print(json.dumps([name, ""]))
            except Exception as e:
                print(json.dumps([name, f"{type(e).__name__}: {e}"]))


@pytest.mark.slow
@pytest.mark.skipif(not register, reason="this torch has no stand-in for a device")
def test_all_is_on_one_device():
    done = run_process(print_errors)
    errors = dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))
    assert errors.keys() == CASES.keys()
    assert "found at least two devices" in errors.pop("a mistake")
    assert {case: error for case, error in errors.items() if error} == {}
