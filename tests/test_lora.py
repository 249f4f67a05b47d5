"""Adapters change nothing until they have learned, have the rank they say, add up, and merge into the weights."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import refused, script_settings
from figures import CONFIGS, filled, inputs
from torch.testing import assert_close

from nanodiff.conditions import DataInfo
from nanodiff.data.dataset import DatasetWriter, open_dataset
from nanodiff.data.shapes import draw_shapes
from nanodiff.device import autocast_to
from nanodiff.diffusion.flow import FlowMatching
from nanodiff.formats.adapters import class_rows, fingerprint, identity, merge, save_adapters
from nanodiff.formats.load import Loaded, read_file
from nanodiff.formats.start import start_from
from nanodiff.models.build import build_model, empty_model, load_weights
from nanodiff.models.lora import add_lora, find_layers
from nanodiff.models.unet import UNetConfig
from nanodiff.safetensors import load_safetensors, save_safetensors

NAMES = ["circle", "ring", "bar"]
SHAPE = dict(image_size=8, num_classes=3)
UNET = replace(CONFIGS["unet"], **SHAPE, attention_resolutions=(4,))
KINDS = {kind: replace(CONFIGS[kind], **SHAPE) for kind in ("modern", "classic")}
KINDS |= {"unet": UNET, "published unet": replace(UNET, channel_mult=(1,), null_class=False)}


def make_loaded(kind="modern", seed=0):
    """A model with random weights everywhere, as load_run would give it."""
    data = DataInfo(
        kind="images",
        channels=3,
        resolution=8,
        num_classes=3,
        class_names=NAMES,
    )
    settings = dict(objective="flow", label_drop=0.1, low_res_size=0)
    path = Path("base.pt")
    model = filled(KINDS[kind], seed).eval()
    return Loaded(model, FlowMatching(), settings, data, 0, str(path), "as published", path)


def train(loaded, path, rank=2, alpha=3.0, targets="all", rows=(), seed=0):
    """Give the adapters random values instead of learned ones, and write them; the model with its adapters."""
    classes = [loaded.data.class_names[i] for i in rows]
    lora = identity(loaded) | dict(rank=rank, alpha=alpha, classes=classes)
    add_lora(loaded.model, rank, alpha, targets, list(rows), seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in filter(lambda p: p.requires_grad, loaded.model.parameters()):
            p.add_(0.1 * torch.randn(p.shape, generator=generator))
    write(path, lora, loaded)
    return loaded.model


def meta_of(loaded):
    arch = "unet" if isinstance(loaded.model.config, UNetConfig) else "dit"
    meta = dict(
        step=0,
        arch=arch,
        config=loaded.config,
        model_config=loaded.model.config,
        data=loaded.data,
        source=loaded.source,
    )
    return meta


def merged_into(loaded, path, scale=1.0):
    """(meta, model) of the adapters in a file, merged into a model."""
    adapters = read_file(path, {})
    meta, tensors = merge(meta_of(loaded), loaded.model.state_dict(), *adapters, scale)
    model = empty_model(meta["model_config"])
    load_weights(model, tensors, path, assign=True)
    return meta, model


def write(path, lora, loaded):
    """The adapters in a model, as a run saves them."""
    meta = meta_of(loaded) | {"lora": lora, "ema_rates": []}
    save_adapters(path.parent, meta, {"model": loaded.model.state_dict()})
    (path.parent / "adapters" / "step_000000.safetensors").rename(path)


@pytest.mark.parametrize(
    "kind, dtype",
    [
        ("modern", torch.bfloat16),
        ("unet", torch.float32),
    ],
)
def test_new_adapters_leave_every_bit_of_the_output_as_it_was(kind, dtype):
    model = make_loaded(kind).model
    with autocast_to(torch.device("cpu"), dtype):
        before = model(*inputs(4, size=8))
        add_lora(model, 4, 8.0, "all", [0, 2], seed=3)
        assert torch.equal(model(*inputs(4, size=8)), before)


@pytest.mark.parametrize("kind", KINDS)
def test_merged_weights_give_the_outputs_of_the_adapters(kind, tmp_path):
    adapted = train(make_loaded(kind), tmp_path / "a.safetensors", rows=[0, 2])
    x, t, y = inputs(3, size=8)
    base = make_loaded(kind).model(x, t, y)
    _, merged = merged_into(make_loaded(kind), tmp_path / "a.safetensors")
    assert [*merged.state_dict()] == [*make_loaded(kind).model.state_dict()]  # a plain model again
    assert_close(merged(x, t, y), adapted(x, t, y), rtol=1e-4, atol=1e-5)
    assert (merged(x, t, y) - base).abs().max() > 1e-2


def test_the_change_is_linear_in_the_scale_and_of_the_rank_that_was_asked_for(tmp_path):
    path = tmp_path / "a.safetensors"
    train(make_loaded(), path, rank=3, rows=[0, 1], seed=1)
    base = make_loaded().model.state_dict()

    def change(scale):
        _, merged = merged_into(make_loaded(), path, scale)
        return {name: x - base[name] for name, x in merged.state_dict().items()}

    for x in change(0.0).values():
        assert not x.any()
    once = change(1.0)
    back = change(-0.5)
    for name, x in once.items():
        assert_close(back[name], -0.5 * x, rtol=0, atol=2e-6)
        if x.ndim == 2 and name != "y_embed.weight":
            singular = torch.linalg.svdvals(x.double())
            assert singular[2] > 1e-3, name
            assert singular[3:].max() < 1e-5, name
    assert once["y_embed.weight"].abs().amax(1).gt(0).tolist() == [True, True, False, False]


def test_targets_are_the_ends_of_names_as_with_peft():
    modern = make_loaded().model
    unet = make_loaded("unet").model
    layers = ["blocks.0.qkv", "blocks.0.proj", "blocks.1.qkv", "blocks.1.proj"]
    assert find_layers(modern, "qkv, proj") == layers
    assert find_layers(modern, "blocks.1.ada,patch_embed") == ["patch_embed", "blocks.1.ada"]
    assert len(find_layers(modern, "all")) == 1 + 2 + 2 * 5 + 2
    ends = {name.split(".")[-1] for name in find_layers(unet, "qkv,proj_out")}
    assert ends == {"qkv", "proj_out"}
    accepted = "all, 0, 2, ada, fc1, fc2, linear, patch_embed, proj, qkv"
    refused(f"named 'k_proj'; accepted: {accepted}", find_layers, modern, "qkv,k_proj")


def test_the_file_has_the_names_of_peft(tmp_path):
    """As its documentation of the checkpoint format has it: base_model.model, the module, lora_A or lora_B."""
    train(make_loaded(), tmp_path / "a.safetensors", targets="blocks.1.qkv", rows=[1])
    tensors, info = load_safetensors(tmp_path / "a.safetensors")
    assert {name: tuple(x.shape) for name, x in tensors.items()} == {
        "base_model.model.blocks.1.qkv.lora_A.weight": (2, 64),
        "base_model.model.blocks.1.qkv.lora_B.weight": (192, 2),
        "base_model.model.y_embed.token_adapter.trainable_tokens_delta": (1, 64),
    }
    assert json.loads(info["lora"])["sha256"] == fingerprint(make_loaded().model.state_dict())


def test_a_set_is_seen_with_the_classes_of_a_model(base, capsys):
    """By name, or in order, with a note, if they are numbers there; new ones follow, and no label is the null class."""
    for known, classes, names, labels in (
        (NAMES, ["dots", "bar"], [*NAMES, "dots"], [3, 2]),
        (["0", "1", "2"], ["cross", "dots", "bar"], ["0", "1", "2"], [0, 1, 2]),
        (NAMES, [], NAMES, [3]),
        ([], ["bar", "dots"], ["bar", "dots"], [0, 1]),
    ):
        stored = f"set{len(classes)}{labels[0]}"
        with DatasetWriter(stored, classes) as writer:  # two images of each class, or two unlabelled ones
            n = max(len(classes), 1)
            images, _ = draw_shapes(2 * n, 0, 8)
            writer.append("train", images, y=[*range(n)] * 2)
        stored = open_dataset(stored, "train")
        seen = stored.seen_by(known)
        assert ("note: classes match by order: cross = 0, ..." in capsys.readouterr().out) == (known == ["0", "1", "2"])
        assert seen.class_names == names
        assert seen.data.class_names == names
        assert seen.num_classes == len(names)
        assert seen.labels(range(2 * len(labels))).tolist() == labels * 2
        assert len(seen) == len(stored)


def test_without_a_null_class_a_new_one_starts_as_the_mean():
    table = torch.randn(3, 8)
    expected = torch.stack([table[2], table.mean(0)])
    assert torch.equal(class_rows(table, NAMES, ["bar", "dots"], 2), expected)


def test_a_published_unet_that_loses_its_classes_goes_on_as_their_mean(capsys):
    base = make_loaded("published unet")
    model = build_model(replace(base.model.config, num_classes=0), "cpu", 0)
    start_from(model, base, script_settings("base_train", "--arch=unet"), [])
    assert "its classes are dropped" in capsys.readouterr().out
    x, t, y = inputs(size=8)
    with torch.no_grad():
        table = base.model.label_emb.weight
        table[:] = table.mean(0)
        assert_close(model.eval()(x, t), base.model(x, t, y))


def test_adapters_bring_their_classes_along(base, tmp_path):
    """A class that the base lacks is inserted before the null class."""
    loaded = make_loaded()
    lora = identity(loaded) | dict(rank=2, alpha=2.0, classes=["bar", "cross"])
    rows = class_rows(loaded.model.y_embed.weight, NAMES, [*NAMES, "cross"], 5)
    loaded.model.y_embed = torch.nn.Embedding.from_pretrained(rows)
    add_lora(loaded.model, 2, 2.0, "qkv", [2, 3])
    with torch.no_grad():
        dict(loaded.model.named_parameters())["y_embed.token_adapter.trainable_tokens_delta"].add_(0.25)
    write(tmp_path / "b.safetensors", lora, loaded)
    original = make_loaded().model.y_embed.weight
    meta, merged = merged_into(make_loaded(), tmp_path / "b.safetensors", 2.0)
    assert meta["data"].class_names == [*NAMES, "cross"]
    assert meta["data"].num_classes == 4
    assert merged.config.num_classes == 4
    change = merged.y_embed.weight - original[[0, 1, 2, 3, 3]]
    expected = torch.tensor([0, 0, 0.5, 0.5, 0])[:, None].expand_as(change)
    assert_close(change, expected, rtol=0, atol=1e-6)


def test_corrupt_and_foreign_files_are_refused(tmp_path):
    good = tmp_path / "good.safetensors"
    train(make_loaded(), good, targets="qkv", rows=[1])
    train(make_loaded(seed=5), tmp_path / "other.safetensors")
    data = good.read_bytes()
    (tmp_path / "flipped.safetensors").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    save_safetensors(load_safetensors(good)[0], tmp_path / "plain.safetensors")
    for name, fault in {
        "flipped": "flipped.safetensors is corrupt: its tensors do not match the SHA-256 in its metadata",
        "plain": "plain.safetensors holds no model or adapters of ours",
        "other": r"other.safetensors has adapters for other weights: .*/base.pt as it was, not base.pt",
    }.items():
        refused(fault, merged_into, make_loaded(), tmp_path / f"{name}.safetensors")
