"""From a file to a model: what is valid loads, and what is torn or of another kind is refused in one line."""

import dataclasses
import hashlib
import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from conftest import refused
from tiny_runs import TINY, assert_identical, make_data, randomise

import nanodiff
from nanodiff.formats.load import find_run, load_run
from nanodiff.models.build import build_model
from nanodiff.models.dit import DiTConfig
from nanodiff.models.unet import UNetConfig
from nanodiff.safetensors import load_safetensors, save_safetensors
from nanodiff.training.checkpoint import save_checkpoint

DATA = dict(
    name="toy",
    kind="images",
    channels=3,
    resolution=8,
    num_classes=2,
    class_names=["a", "b"],
    given_channels=0,
    vector_dim=0,
    vector_len=0,
)
CONFIG = dict(
    objective="eps",
    noise_schedule="cosine",
    num_timesteps=10,
    variance="fixed_small",
    gaussian_loss="mse",
    rescale_timesteps=True,
    label_drop=0.1,
    low_res_size=0,
    sample_steps=10,
)
DIT = DiTConfig.from_depth(1, 8, in_channels=3, out_channels=3, num_classes=2, width=8, heads=1)
CLASSIC = dataclasses.replace(DIT, block="classic")
UNET = UNetConfig(8, 3, 3, 32, (1, 1), 1, num_res_blocks=1, attention_resolutions=(4,), num_classes=2)
UPSAMPLER = dataclasses.replace(DIT, low_res=4)


def write_run(base, tag, model_config=DIT, **config):
    """A checkpoint of that model with random weights, raw and averaged, and of these settings."""
    state = build_model(model_config, "cpu", 0).state_dict()
    tensors = {"model": randomise(state, 0), "ema_0.99": randomise(state, 1)}
    arch = {"modern": "dit", "classic": "dit_classic"}.get(getattr(model_config, "block", None), "unet")
    meta = dict(
        step=1,
        arch=arch,
        config=CONFIG | config,
        model_config=dataclasses.asdict(model_config),
        data=DATA,
        ema_rates=[0.99],
        loop={},
    )
    (base / "runs" / tag).mkdir(parents=True, exist_ok=True)
    return save_checkpoint(base / "runs" / tag, 1, tensors, meta)


def test_a_damaged_config_is_written_anew(base, run_script, capsys):
    make_data()
    run_dir = run_script("base_train", *TINY, "--num_iterations=1", "--model_tag=a")["run_dir"]
    path = run_dir / "config.json"
    path.write_text("")
    run_script("base_train", *TINY, "--num_iterations=2", "--resume=changed", "--model_tag=a")
    assert "config.json is damaged" in capsys.readouterr().out
    assert json.loads(path.read_text())["num_iterations"] == 2


def test_what_cannot_be_loaded_is_one_line(base, tmp_path):
    write_run(base, "a", objective="telepathy")
    refused(r"ema_0\.99.* describes no model of this version: .*telepathy", load_run, "a", "cpu")
    meta = json.loads((write_run(base, "b") / "meta.json").read_text())
    told = {key: json.dumps(meta[key]) for key in ("step", "arch", "config", "data")} | {"ema": '"raw"'}
    told["model_config"] = json.dumps(meta["model_config"] | {"magic": 1})
    save_safetensors({"w": torch.zeros(2)}, tmp_path / "a.safetensors", told)
    refused(r"a\.safetensors describes no model of this version: .*magic", load_run, f"{tmp_path}/a.safetensors", "cpu")
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "model.safetensors.index.json").write_text("{}")
    option = f"{tmp_path}/hub,heads=6"
    refused("heads=6 is no option of .*hub, a run; name the file of weights, if it is none", load_run, option, "cpu")
    wide = build_model(dataclasses.replace(DIT, width=16), "cpu", 0).state_dict()
    save_checkpoint(base / "runs" / "b", 2, {"model": wide, "ema_0.99": wide}, meta | {"step": 2})
    refused("step_000002/ema_0.99.safetensors does not fit this model: .*size mismatch", load_run, "b", "cpu")
    named = {name: torch.zeros(2) for name in "abcdefg"}
    unknown = {"x_embedder.proj.weight": 3}
    for content, has in (
        (named, ".*it has a, b, c, d, e$"),
        ([torch.zeros(2)], ""),
        (unknown, ""),
    ):
        torch.save(content, tmp_path / "a.pt")
        refused(rf"a\.pt holds no model or adapters of ours{has}", load_run, str(tmp_path / "a.pt"), "cpu")


def test_exports_verify_their_tensors(base, run_script):
    """One bit anywhere is noticed; files without a hash, as earlier versions wrote them, load as before."""
    write_run(base, "a", objective="flow")
    path = run_script("export", "--model=a")["path"]
    before = load_run(str(path), "cpu").model.state_dict()
    tensors, metadata = load_safetensors(path)
    data = path.read_bytes()
    for place in (1, len(data) // 3, len(data) // 2):
        damaged = bytearray(data)
        damaged[-place] ^= 64
        path.write_bytes(damaged)
        refused("is corrupt: its tensors do not match the SHA-256", load_run, str(path), "cpu")
    assert metadata.pop("sha256")
    save_safetensors(tensors, path, metadata)
    assert_identical(load_run(str(path), "cpu").model.state_dict(), before)


def test_a_file_of_a_checkpoint_is_verified_by_its_manifest(base):
    path = write_run(base, "a", objective="flow") / "model.safetensors"
    load_run(str(path), "cpu")
    data = bytearray(path.read_bytes())
    data[-1] ^= 64
    path.write_bytes(data)
    refused("is corrupt: model.safetensors does not match its SHA-256", load_run, str(path), "cpu")
    path.with_name("ema_0.99.safetensors").unlink()  # another file's fault is not this one's
    data[-1] ^= 64
    path.write_bytes(data)
    load_run(str(path), "cpu")


def test_names_may_be_paths_and_what_they_get_wrong_is_named(base, monkeypatch):
    checkpoint = write_run(base, "a", objective="flow")
    assert nanodiff.load(base / "runs" / "a").weights == "0.99"
    assert nanodiff.load("a", ema=0.99).weights == "0.99"
    file = nanodiff.load(checkpoint / "ema_0.99.safetensors").path
    told = f"{file},heads=2,attention_resolutions=8"
    line = "attention_resolutions=8' is no folder, .*; options behind a name: step, "
    refused(line, load_run, told, "cpu")
    refused("'a,hads=2' is no folder, file or tag; nearest tags: a, .*heads", load_run, "a,hads=2,heads=2", "cpu")
    (base / "runs" / "failed" / "checkpoints").mkdir(parents=True)  # as after a full disk
    assert find_run("") == base / "runs" / "a"
    (base / "here" / "a").mkdir(parents=True)  # such as a folder of images
    monkeypatch.chdir(base / "here")
    assert find_run("a") == base / "runs" / "a"
    assert find_run("./a") == Path("a")
    for folder in (checkpoint, base / "models"):
        folder.mkdir(exist_ok=True)
        (folder / "model.safetensors").touch()
        line = "no run with a checkpoint; to load .* name the file; it has .*model.safetensors"
        refused(line, load_run, str(folder), "cpu")


def test_python_chooses_the_dtype_of_the_products(base, monkeypatch):
    """As scripts.sample does."""
    write_run(base, "a", objective="flow")
    loaded = nanodiff.load("a")
    seen = []
    autocast_to = lambda device, dtype: seen.append(dtype) or nullcontext()
    monkeypatch.setattr("nanodiff.sampling.loaded.autocast_to", autocast_to)
    for dtype in ("float32", "bfloat16"):
        loaded.sample(num_images=1, steps=1, dtype=dtype)
    assert seen == [torch.float32, torch.bfloat16]
    refused("dtype='half' is not accepted; accepted: .*bfloat16", loaded.sample, dtype="half")


@pytest.mark.parametrize(
    "name, steps",
    [
        ("cifar10", 13),
        ("cifar10_map", 4),
    ],
)
def test_the_shipped_weights_are_those_that_their_figures_tell_of(base, name, steps):
    loaded = nanodiff.load(name)
    tensors, metadata = load_safetensors(loaded.path)
    content = b"".join(key.encode() + tensors[key].numpy().tobytes() for key in sorted(tensors))
    release = json.loads(metadata["release"])
    assert hashlib.sha256(content).hexdigest() == release["sha256_of_tensors"]
    ships = loaded.sample(classes=["ship"], num_images=2, steps=steps // 4 or 1)
    assert ships.shape == (2, 32, 32, 3)
    assert ships.std() > 20
