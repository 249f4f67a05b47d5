"""Autoencoders: the published implementations' figures, published sizes, key maps of every layout, file rules."""

import hashlib
import json
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from conftest import golden, refused
from figures import assert_figures, rule_weights, wave

from nanodiff.models.autoencoder import MAX_PIXELS, AutoencoderKL, TinyAutoencoder, open_autoencoder
from nanodiff.safetensors import save_safetensors

PUBLISHED_TAESD = Path(__file__).parents[2] / "shared" / "data" / "taef2_encoder.pth"
KL_SHAPE = dict(
    widths=(8, 16, 16),
    blocks=1,
    latent_channels=3,
    groups=4,
    quant_conv=True,
)


@pytest.fixture
def published_kl():
    return rule_weights(golden("autoencoder_kl.json")["parameters"])


def to_compvis(weights):
    """diffusers' weights -> CompVis' latent-diffusion, for 2 levels. Written from CompVis' model.py."""
    theirs = {}
    for name, w in weights.items():
        if ".attentions." in name and w.ndim == 2:  # 1x1 convolutions there, linear layers in diffusers
            w = w[:, :, None, None]
        name = re.sub(r"up_blocks\.(\d)", lambda m: f"up.{1 - int(m[1])}", name).replace("down_blocks.", "down.")
        name = name.replace("mid_block.attentions.0.", "mid.attn_1.").replace("to_out.0", "proj_out")
        name = re.sub(r"mid_block\.resnets\.(\d)", lambda m: f"mid.block_{int(m[1]) + 1}", name)
        name = name.replace(".resnets.", ".block.").replace("downsamplers.0", "downsample")
        name = name.replace("upsamplers.0", "upsample").replace("conv_shortcut", "nin_shortcut")
        name = name.replace("conv_norm_out", "norm_out").replace("group_norm", "norm")
        theirs[re.sub(r"to_([qkv])", r"\1", name)] = w
    return theirs


def assert_same_model(a, b):
    """The same modules, whose repr tells their sizes and groups, and the same weights."""
    assert str(a) == str(b)
    assert a.state_dict().keys() == b.state_dict().keys()
    for name, w in a.state_dict().items():
        assert torch.equal(w, b.state_dict()[name])


def test_autoencoder_kl_equals_diffusers(published_kl, tmp_path):
    figures = golden("autoencoder_kl.json")
    assert list(figures["config"]["block_out_channels"]) == [32, 64]
    save_safetensors(published_kl, tmp_path / "diffusion_pytorch_model.safetensors")
    config = {"_class_name": "AutoencoderKL", **figures["config"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    ae = open_autoencoder(tmp_path)
    assert ae.downsample == 2
    assert ae.latent_channels == 4
    assert ae.scale == 0.18215
    assert ae.shift == 0.0
    mean, std = ae.encode(wave((2, 3, 32, 32)))
    assert_figures(mean, figures["mean"])
    assert_figures(std, figures["std"])
    assert_figures(ae.decode(mean), figures["decode_of_mean"])


def test_tiny_autoencoder_equals_taesd():
    figures = golden("taef2.json")
    if not PUBLISHED_TAESD.is_file():
        pytest.skip("taef2_encoder.pth: the published weights are not on this machine")
    ae = open_autoencoder(PUBLISHED_TAESD)
    assert ae.name == "taef2"
    assert ae.downsample == 8
    assert ae.latent_channels == 32
    assert ae.scale == 1.0
    assert ae.shift == 0.0
    mean, std = ae.encode(wave((1, 3, 64, 64)))  # TAESD's own range is [0, 1], where this is 0.5 + 0.5 * wave
    assert_figures(mean, figures["latent"])
    assert std.shape == mean.shape
    assert not std.any()
    assert_figures(ae.decode(mean) * 0.5 + 0.5, figures["decoded"])


def test_published_sizes():
    count = lambda module: sum(p.numel() for p in module.parameters())
    with torch.device("meta"):
        vae = AutoencoderKL((128, 256, 512, 512), 2, 4, 32, True)
        tiny = TinyAutoencoder(4, False)
    assert count(vae) == 83_653_863
    assert count(tiny.encoder) == 1_222_532
    assert count(tiny.decoder) == 1_222_531
    assert vae.downsample == 8
    assert vae.latent_channels == 4
    assert vae.scale == 0.18215
    assert vae.shift == 0.0


OLD = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
old_name = lambda name: re.sub(r"(?<=\.attentions\.0\.)(to_[qkv]|to_out\.0)", lambda m: OLD[m[0]], name)
LAYOUTS = {
    "diffusers before 0.18": lambda weights: {old_name(name): w for name, w in weights.items()},
    "CompVis": to_compvis,
    "a whole SD checkpoint": lambda weights: {
        **{f"first_stage_model.{name}": w for name, w in to_compvis(weights).items()},
        "model.diffusion_model.out.0.weight": torch.ones(3),
        "first_stage_model.loss.logvar": torch.zeros(()),
        "model_ema.num_updates": torch.tensor(7),
    },
}


@pytest.mark.parametrize("layout, suffix", list(zip(LAYOUTS, [".safetensors", ".ckpt", ".pt"])))
def test_layouts_give_one_model(published_kl, tmp_path, layout, suffix):
    weights = LAYOUTS[layout](published_kl)
    path = tmp_path / f"vae{suffix}"
    (tmp_path / "config.json").write_text(json.dumps(golden("autoencoder_kl.json")["config"]))
    save_safetensors(published_kl, tmp_path / "diffusers.safetensors")
    if suffix == ".safetensors":
        save_safetensors(weights, path)
    elif suffix == ".ckpt":
        torch.save({"state_dict": weights, "global_step": 3}, path)
    else:
        torch.save(weights, path)
    ae = open_autoencoder(path)
    assert_same_model(ae, open_autoencoder(tmp_path / "diffusers.safetensors"))
    assert ae.name == "vae"
    assert ae.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_without_quant_convs_and_in_half_precision(tmp_path):
    ae = AutoencoderKL(**KL_SHAPE | {"quant_conv": False}).bfloat16()
    path = tmp_path / "vae.safetensors"
    save_safetensors(ae.state_dict(), path)
    config = {
        "_class_name": "AutoencoderKL",
        "norm_num_groups": 4,
        "scaling_factor": 0.3611,
        "shift_factor": 0.1159,
        "use_quant_conv": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    opened = open_autoencoder(path)
    with open(path, "r+b") as f:  # overwritten in place: the opened model is a copy
        f.write(bytes(100_000))
    assert_same_model(opened, ae.float())
    assert opened.scale == 0.3611
    assert opened.shift == 0.1159


@pytest.mark.parametrize(
    "latent_channels, mid_norm",
    [
        (4, False),
        (32, True),
    ],
)
def test_tiny_layouts_give_one_model(tmp_path, latent_channels, mid_norm):
    torch.manual_seed(0)
    ae = TinyAutoencoder(latent_channels, mid_norm)
    encoder = tmp_path / "taex_encoder.pth"
    decoder = tmp_path / "taex_decoder.pth"
    torch.save(ae.encoder.state_dict(), encoder)
    one_up = lambda name: re.sub(r"^\d+", lambda m: str(int(m[0]) + 1), name)  # 0 clamps z
    weights = {one_up(name): w for name, w in ae.decoder.state_dict().items()}
    torch.save(weights, decoder)
    both = encoder.read_bytes() + decoder.read_bytes()
    for path in (encoder, decoder):
        opened = open_autoencoder(path)
        assert_same_model(opened, ae)
        assert opened.sha256 == hashlib.sha256(both).hexdigest()

    # diffusers' AutoencoderTiny: one file
    their_name = lambda name: re.sub(r"^(..coder)", r"\1.layers", name)
    weights = {their_name(name): w for name, w in ae.state_dict().items()}
    folder = tmp_path / "taex-diffusers"
    folder.mkdir()
    save_safetensors(weights, folder / "diffusion_pytorch_model.safetensors")
    (folder / "diffusion_pytorch_model.bin").write_bytes(b"the .safetensors is preferred")
    assert_same_model(open_autoencoder(folder), ae)


def test_files_that_are_refused(tmp_path):
    refused("holds no diffusion_pytorch_model", open_autoencoder, tmp_path)
    vae = tmp_path / "vae.safetensors"
    taesd = tmp_path / "taesd_encoder.pth"
    save_safetensors(AutoencoderKL(**KL_SHAPE).state_dict(), vae)
    refused("groups|num_channels", open_autoencoder, vae)  # 32 without config.json, which 8 channels do not allow
    save_safetensors(AutoencoderKL((32,), 1, 16, 32, True).state_dict(), vae)
    refused("what is its scale", open_autoencoder, vae)
    torch.save({"0.weight": torch.ones(64, 3, 3, 3)}, taesd)
    refused("neither an SD VAE nor both halves of a TAESD", open_autoencoder, taesd)


@pytest.mark.parametrize(
    "ae",
    [
        AutoencoderKL(**KL_SHAPE),
        TinyAutoencoder(4, False),
    ],
    ids=["kl", "tiny"],
)
def test_shapes_and_slices(ae, monkeypatch):
    x = wave((5, 3, 16, 24))
    with torch.autocast("cpu", torch.bfloat16):
        mean, std = ae.encode(x)
        assert mean.dtype == torch.float32
        assert std.dtype == torch.float32
        assert ae.decode(mean).dtype == torch.float32
    mean, std = ae.encode(x)
    decoded = ae.decode(mean)
    assert mean.shape == (5, ae.latent_channels, 16 // ae.downsample, 24 // ae.downsample)
    assert std.shape == mean.shape
    assert (std >= 0).all()
    assert decoded.shape == x.shape
    monkeypatch.setitem(MAX_PIXELS, "cpu", 2 * 16 * 24)  # slices of 2, 2 and 1 images
    assert_close = partial(torch.testing.assert_close, atol=1e-5, rtol=1e-5)
    assert_close(ae.encode(x), (mean, std))
    assert_close(ae.decode(mean), decoded)


def test_tiny_decoder_clamps_latents():  # to 3 tanh(z / 3), in fp32 the same of 30 and of 300
    ae = TinyAutoencoder(4, False)
    z = wave((1, 4, 2, 2)).sign()
    assert torch.equal(ae.decode(30 * z), ae.decode(300 * z))
