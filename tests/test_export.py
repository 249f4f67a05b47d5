"""An exported model is the model: its weights, read by the libraries that own each format, and its outputs."""

import argparse
import dataclasses
import json
import re
from pathlib import Path

import pytest
import test_load
import torch
from conftest import refused
from test_load import CLASSIC, CONFIG, UNET, UPSAMPLER, write_run
from tiny_runs import assert_identical, randomise

from nanodiff.formats.load import load_run
from nanodiff.formats.published import from_diffusers, to_meta
from nanodiff.models.dit import DiT, DiTConfig
from nanodiff.models.unet import UNet, UNetConfig
from nanodiff.safetensors import fingerprint, load_safetensors, save_safetensors


@pytest.fixture
def export(base, run_script):
    """export(run, *settings) -> path of what scripts/export.py wrote."""
    return lambda run, *args: run_script("export", f"--model={run}", *args)["path"]


@pytest.mark.parametrize("model_config", [UPSAMPLER, UNET])
def test_safetensors_hold_the_model_and_its_description(base, export, model_config, monkeypatch):
    safetensors = pytest.importorskip("safetensors.torch", reason="the official reader")
    checkpoint = write_run(base, "a", model_config)
    meta = json.loads((checkpoint / "meta.json").read_text())
    path = export("a")
    refused("is there already", export, "a")
    export("a", "--overwrite")
    monkeypatch.setenv("HOME", str(base / "home"))
    assert export("a", "--out=~/x.safetensors") == base / "home" / "x.safetensors"
    average, _ = load_safetensors(checkpoint / "ema_0.99.safetensors")
    assert_identical(safetensors.load_file(path), average)
    with safetensors.safe_open(path, framework="pt") as file:
        told = {key: json.loads(value) for key, value in file.metadata().items() if key != "format"}
    assert told.pop("ema") == "0.99"
    assert told.pop("sha256") == fingerprint(average)
    assert told == {key: meta[key] for key in ("step", "arch", "model_config", "config", "data")}


def meta_file(path, dtype=torch.float32, **sizes):
    """Random weights under the published names and shapes; returns them."""
    defaults = dict(
        image_size=8,
        in_channels=4,
        out_channels=8,
        patch_size=2,
        width=384,
        depth=2,
        heads=6,
        num_classes=5,
    )
    config = DiTConfig(**defaults | sizes, block="classic")
    theirs = to_meta(DiT(config).state_dict(), config)
    pos_embed = theirs.pop("pos_embed")
    theirs = {name: value.to(dtype) for name, value in randomise(theirs).items()}
    theirs["pos_embed"] = pos_embed
    torch.save(theirs, path)
    return theirs


@pytest.mark.parametrize("via", ["", ".safetensors"])
def test_metas_format_comes_back_unchanged(export, tmp_path, via):
    """Its settings and kind of data, too; of a training checkpoint the average. Latents are not clipped."""
    theirs = meta_file(tmp_path / "dit.pt", dtype=torch.float16)
    if via:
        other = {
            "model": randomise(theirs, seed=9),
            "ema": theirs,
            "args": argparse.Namespace(model="DiT-XL/2"),
        }
        torch.save(other, tmp_path / "dit.pt")
    run = tmp_path / "dit.pt"
    if via:
        run = export(run, f"--out={tmp_path / 'x'}{via}")
    told = load_run(str(run), "cpu")
    published = load_run(str(tmp_path / "dit.pt"), "cpu")
    assert not told.process.clip_denoised
    assert told.weights == "as published"
    assert told.data == published.data
    assert told.config == published.config
    again = export(run, "--form=meta", f"--out={tmp_path / 'again.pt'}")
    single = {name: value.float() for name, value in theirs.items()}
    assert_identical(torch.load(again, weights_only=True)["ema"], single)


@pytest.mark.parametrize(
    "saved",
    [
        lambda theirs: {name: x.bfloat16() for name, x in theirs.items()},
        lambda theirs: {f"module._orig_mod.{name}": x for name, x in theirs.items()},
        lambda theirs: {"model": theirs, "args": argparse.Namespace(num_classes=1000)},  # not this table's
        lambda theirs: {"state_dict": {f"module.{name}": x.half() for name, x in theirs.items()}},
        lambda theirs: {"ema": {}, "model": theirs},
        *(
            lambda theirs, key=key: {"model": {name: x + 1 for name, x in theirs.items()}, key: theirs}
            for key in "ema ema_model model_ema ema_state_dict state_dict_ema ema_params ema_0.9999".split()
        ),
        lambda theirs: {"ema": 0.9999, "model": theirs},
        lambda theirs: {"ema": None, "state_dict": theirs},
        lambda theirs: {name.replace("blocks.0.", "blocks.0._orig_mod."): x for name, x in theirs.items()},
    ],
)
def test_metas_weights_open_however_they_were_saved(tmp_path, saved):
    theirs = meta_file(tmp_path / "dit.pt", depth=1)
    torch.save(saved(theirs), tmp_path / "other.pt")
    ours = load_run(str(tmp_path / "dit.pt"), "cpu").model.state_dict()
    other = load_run(str(tmp_path / "other.pt"), "cpu").model.state_dict()
    torch.testing.assert_close(other, ours, rtol=2e-2, atol=1e-3)


def test_quantised_weights_are_refused(tmp_path):
    theirs = meta_file(tmp_path / "dit.pt", depth=1)
    name = "blocks.0.attn.qkv.weight"
    torch.save(theirs | {name: (100 * theirs[name]).to(torch.int8)}, tmp_path / "dit.pt")
    refused(f"has {name} in torch.int8; accepted: floats", load_run, str(tmp_path / "dit.pt"), "cpu")


def test_of_lightnings_two_copies_the_average_is_read(tmp_path, capsys):
    theirs = meta_file(tmp_path / "dit.pt", depth=1)
    copies = {f"model.{name}": x + 1 for name, x in theirs.items()}
    copies |= {f"ema_model.{name}": x for name, x in theirs.items()}
    torch.save({"state_dict": copies | {"loss.lpips.w": torch.zeros(2)}}, tmp_path / "last.ckpt")
    ours = load_run(str(tmp_path / "dit.pt"), "cpu").model.state_dict()
    other = load_run(str(tmp_path / "last.ckpt"), "cpu").model.state_dict()
    assert_identical(other, ours)
    num = len(theirs)
    line = f"last.ckpt: {num} of its {2 * num + 1} tensors are read, ema_model.*\n"
    assert line in capsys.readouterr().out


def test_a_part_of_a_model_is_not_taken_for_another_kind(tmp_path):
    """One of several shards; a DiT with other layers."""
    theirs = meta_file(tmp_path / "dit.pt", depth=1)
    for dropped in ("final_layer.linear.weight", "blocks.0.mlp.fc1.weight"):
        rest = {name: x for name, x in theirs.items() if name != dropped}
        torch.save(rest, tmp_path / "dit.pt")
        refused("no published model, or not all of one", load_run, str(tmp_path / "dit.pt"), "cpu")


@pytest.mark.parametrize(
    "rows, told, args",
    [
        (6, ",label_drop=0", {}),
        (6, "", dict(num_classes=6)),
        (1, "", {}),
    ],
)
def test_a_class_table_without_a_null_class_keeps_its_last_class(export, tmp_path, rows, told, args):
    """class_dropout_prob=0 in Meta's code; training's args, if they are there, have the number of classes."""
    theirs = meta_file(tmp_path / "dit.pt", num_classes=6)
    table = theirs["y_embedder.embedding_table.weight"][:rows]
    theirs["y_embedder.embedding_table.weight"] = table
    torch.save({"ema": theirs, "args": argparse.Namespace(**args)}, tmp_path / "dit.pt")
    run = f"{tmp_path / 'dit.pt'}{told}"
    loaded = load_run(run, "cpu")
    assert loaded.num_classes == rows
    assert "no null condition" in loaded.why_unguided
    assert torch.equal(loaded.model.y_embed.weight[:rows], table)
    again = export(run, "--form=meta", f"--out={tmp_path / 'again.pt'}")
    assert_identical(torch.load(again, weights_only=True)["ema"], theirs)
    assert load_run(str(again), "cpu").num_classes == rows


@pytest.mark.slow  # to import it takes seconds
@pytest.mark.parametrize(
    "sizes",
    [
        {},
        dict(in_channels=3, out_channels=3, patch_size=4, num_attention_heads=4, num_layers=1),
    ],
)
def test_diffusers_own_folder_loads_and_predicts_the_same(tmp_path, capsys, sizes):
    """From the model's folder and from its pipeline's. diffusers embeds t with other frequencies, which is said."""
    diffusers = pytest.importorskip("diffusers", reason="the library that owns the format")
    defaults = dict(
        sample_size=8,
        in_channels=4,
        out_channels=8,
        patch_size=2,
        num_attention_heads=2,
        num_layers=2,
        num_embeds_ada_norm=5,
    )
    sizes = defaults | sizes
    sizes["attention_head_dim"] = 128 // sizes["num_attention_heads"]
    theirs = diffusers.DiTTransformer2DModel(**sizes, norm_eps=1e-6).eval()
    state = randomise(theirs.state_dict())
    for name in state:  # each block holds a copy of the embeddings
        if ".emb." in name:
            state[name] = state["transformer_blocks.0" + name[name.index(".norm1") :]]
    state["pos_embed.pos_embed"] = theirs.state_dict().get("pos_embed.pos_embed")
    theirs.load_state_dict({name: x for name, x in state.items() if x is not None}, strict=False)
    theirs.save_pretrained(tmp_path / "pipeline" / "transformer")
    for folder in (tmp_path / "pipeline", tmp_path / "pipeline" / "transformer"):
        ours = load_run(str(folder), "cpu").model
        assert "its predictions differ from these" in capsys.readouterr().out
    x = torch.randn(4, sizes["in_channels"], 8, 8)
    y = torch.tensor([0, 1, 4, 5])  # 5 is the null class

    def difference(t):
        with torch.no_grad():
            a = theirs(x, timestep=t, class_labels=y).sample
            b = ours(x, t, y)
        return float((a - b).abs().max() / b.abs().max())

    assert difference(torch.zeros(4)) < 1e-5  # where the frequencies do not matter
    for block in theirs.transformer_blocks:
        block.norm1.emb.time_proj.downscale_freq_shift = 0
    assert difference(torch.tensor([999.0, 500.0, 3.0, 40.0])) < 1e-5


def diffusers_model():
    """The modules of diffusers.DiTTransformer2DModel, written down from its source, and its config.json."""
    block = {f"attn1.{name}": (64, 64) for name in ("to_q", "to_k", "to_v", "to_out.0")}
    block |= {
        "norm1.emb.timestep_embedder.linear_1": (64, 256),
        "norm1.emb.timestep_embedder.linear_2": (64, 64),
        "norm1.linear": (6 * 64, 64),
        "ff.net.0.proj": (256, 64),
        "ff.net.2": (64, 256),
    }
    shapes = {
        "proj_out_1": (128, 64),
        "proj_out_2": (2 * 2 * 8, 64),
        "pos_embed.proj": (64, 4, 2, 2),
    }
    shapes |= {f"transformer_blocks.{i}.{name}": shape for i in range(2) for name, shape in block.items()}
    theirs = {f"{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}
    theirs |= {f"{name}.bias": torch.zeros(shape[:1]) for name, shape in shapes.items()}
    classes = "norm1.emb.class_embedder.embedding_table.weight"
    theirs |= {f"transformer_blocks.{i}.{classes}": torch.ones(6, 64) for i in range(2)}
    return theirs, dict(sample_size=8, patch_size=2, num_attention_heads=2)


def test_diffusers_names_by_hand():
    """Each module becomes ours of that shape."""
    theirs, sizes = diffusers_model()
    config, ours = from_diffusers(theirs, **sizes)
    DiT(config).load_state_dict(ours)
    assert config.image_size == 8
    assert config.depth == 2
    assert config.heads == 2
    assert config.num_classes == 5
    theirs["transformer_blocks.1.norm1.emb.class_embedder.embedding_table.weight"] = torch.zeros(6, 64)
    with pytest.raises(ValueError, match="differs between blocks"):
        from_diffusers(theirs, **sizes)


MODEL = dict(_class_name="Transformer2DModel", activation_fn="gelu-approximate", norm_type="ada_norm_zero")
SCHEDULER = dict(
    _class_name="DDIMScheduler",
    prediction_type="epsilon",
    num_train_timesteps=1000,
    trained_betas=None,
    beta_schedule="linear",
    beta_start=1e-4,
    beta_end=0.02,
)


@pytest.fixture
def pipeline(tmp_path):
    """pipeline("scheduler", beta_end=1) -> folder of diffusers' pipeline, with that field changed in that config."""
    theirs, sizes = diffusers_model()
    for name in ("transformer", "scheduler"):
        (tmp_path / name).mkdir()
    save_safetensors(theirs, tmp_path / "transformer" / "diffusion_pytorch_model.safetensors")

    def write(part="", **changed):
        configs = {"transformer/config.json": sizes | MODEL, "scheduler/scheduler_config.json": SCHEDULER}
        for name, fields in configs.items():
            changes = changed if name.startswith(part) else {}
            (tmp_path / name).write_text(json.dumps(fields | changes))
        return str(tmp_path)

    return write


def test_a_diffusers_pipeline_is_read_with_its_scheduler(pipeline, capsys):
    for schedule, ours in (
        ("linear", "linear"),
        ("squaredcos_cap_v2", "cosine"),
    ):
        config = load_run(pipeline("scheduler", beta_schedule=schedule), "cpu").config
        assert config["noise_schedule"] == ours
        assert config["num_timesteps"] == 1000
        assert "does not hold rescale_timesteps=False, variance=learned_range: taken" in capsys.readouterr().out


@pytest.mark.parametrize(
    "part, field, value",
    [
        ("transformer", "_class_name", "PixArtTransformer2DModel"),
        ("transformer", "activation_fn", "gelu"),
        ("transformer", "norm_eps", 1e-2),
        ("scheduler", "prediction_type", "v_prediction"),
        ("scheduler", "num_train_timesteps", 500),
        ("scheduler", "beta_schedule", "scaled_linear"),
        ("scheduler", "beta_end", 0.012),
        ("scheduler", "rescale_betas_zero_snr", True),
    ],
)
def test_what_a_diffusers_folder_says_otherwise_is_refused_by_name(pipeline, part, field, value):
    folder = pipeline(part, **{field: value})
    refused(f"comes with {field}={value}; accepted: {field}=", load_run, folder, "cpu")


def test_a_scheduler_of_another_process_is_refused(pipeline):
    folder = Path(pipeline())
    flow = dict(_class_name="FlowMatchEulerDiscreteScheduler", num_train_timesteps=1000, shift=1.0)
    (folder / "scheduler" / "scheduler_config.json").write_text(json.dumps(flow))
    refused("comes with beta_schedule=none; accepted: beta_schedule=linear", load_run, str(folder), "cpu")


@pytest.mark.parametrize("suffix", ["fp16.safetensors", "bin", "fp16.bin"])
def test_diffusers_other_files_are_read(pipeline, suffix):
    folder = Path(pipeline(), "transformer")
    before = load_run(str(folder), "cpu").model.state_dict()
    (folder / "diffusion_pytorch_model.safetensors").unlink()
    theirs, _ = diffusers_model()
    if "fp16" in suffix:
        theirs = {name: x.half() for name, x in theirs.items()}
    write = save_safetensors if "safetensors" in suffix else torch.save
    write(theirs, folder / f"diffusion_pytorch_model.{suffix}")
    assert_identical(load_run(str(folder.parent), "cpu").model.state_dict(), before)


def unet_file(path, **settings):
    """What openai/improved-diffusion saves of such a UNet (attention's matrices are its Conv1d's), random weights."""
    defaults = dict(image_size=16, in_channels=3, out_channels=3, model_channels=32, channel_mult=(1, 2, 2, 2))
    defaults |= dict(num_heads=4, num_res_blocks=1, null_class=False)
    model = UNet(UNetConfig(**defaults | settings))
    model.load_state_dict(randomise(model.state_dict()))
    theirs = model.state_dict()
    for name, x in theirs.items():
        if name.endswith(("qkv.weight", "proj_out.weight")):
            theirs[name] = x[..., None]
    with open(path, "wb") as file:
        torch.save(dict(theirs), file)
    return model.eval()


@pytest.mark.parametrize(
    "settings",
    [
        dict(out_channels=6),
        dict(num_classes=3, low_res=4),
    ],
)
def test_improved_diffusions_file_is_its_model(export, tmp_path, capsys, settings):
    model = unet_file(tmp_path / "ema.pt", channel_mult=(1, 2), attention_resolutions=(16,), **settings)
    loaded = load_run(str(tmp_path / "ema.pt"), "cpu")
    assert "does not hold heads=4" in capsys.readouterr().out
    assert loaded.model.config == model.config
    assert "no null condition" in loaded.why_unguided
    assert_identical(loaded.model.state_dict(), model.state_dict())
    again = export(tmp_path / "ema.pt", "--form=openai", f"--out={tmp_path / 'again.pt'}")
    assert again.read_bytes() == (tmp_path / "ema.pt").read_bytes()


def test_a_unet_trained_here_in_openais_form(base, export, capsys):
    """The line that it prints names all that the file lacks; the null class, which the form lacks, is gone."""
    write_run(base, "a", UNET)
    path = export("a", "--form=openai")
    out = capsys.readouterr().out
    assert "null class is dropped" in out
    loaded = load_run(re.search(f"--model=({path}.*)", out)[1], "cpu")
    assert capsys.readouterr().out == ""  # nothing is taken as published
    assert loaded.config["noise_schedule"] == CONFIG["noise_schedule"]
    assert loaded.config["num_timesteps"] == CONFIG["num_timesteps"]
    assert loaded.class_names == ["0", "1"]
    assert "no null condition" in loaded.why_unguided
    ours = load_run("a", "cpu").model.state_dict()
    ours["label_emb.weight"] = ours["label_emb.weight"][:-1]
    assert_identical(loaded.model.state_dict(), ours)


@pytest.mark.parametrize(
    "model_config, objective, form, named",
    [
        (dataclasses.replace(CLASSIC, num_classes=0), "eps", "meta", "with classes"),
        (dataclasses.replace(UNET, low_res=4), "eps", "openai", "low_res=4.* read as .*low_res=2"),
        (CLASSIC, "flow", "meta", "read as objective=eps.* not flow"),
    ],
)
def test_what_a_form_cannot_hold_is_refused(base, export, model_config, objective, form, named):
    write_run(base, "a", model_config, objective=objective)
    refused(named, export, "a", f"--form={form}")


def test_a_form_of_8_bit_images_does_not_take_arrays(base, export, monkeypatch):
    monkeypatch.setattr(test_load, "DATA", test_load.DATA | {"kind": "arrays", "dtype": "float32", "range": [0, 5]})
    write_run(base, "a", CLASSIC, objective="eps")
    refused("holds no range of arrays", export, "a", "--form=meta")
