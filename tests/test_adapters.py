"""base_train with lora_rank: the base stays; the same adapters whatever the ranks, micro-batches and interruptions."""

import numpy as np
import pytest
import torch
from conftest import refused
from tiny_runs import PLAIN, assert_identical, assert_ranks_agree, assert_resumes, make_data, make_run
from torch.testing import assert_close

from nanodiff.data.shapes import CLASS_NAMES
from nanodiff.formats import load
from nanodiff.formats.adapters import identity
from nanodiff.formats.load import build, find, load_run, read
from nanodiff.formats.published import to_meta
from nanodiff.models.dit import DiT, DiTConfig
from nanodiff.safetensors import load_safetensors
from nanodiff.training.checkpoint import load_meta, save_checkpoint

# Small, and all that could go wrong in a resume: accumulation, flips, an epoch that ends within the run, a new class
TINY = "--init_from=flow --data=tuned --lora_rank=2 --total_batch_size=16 --num_iterations=6 --log_every=1 --flip"
TINY = [*TINY.split(), "--eval_every=3", "--eval_images=8", *PLAIN]


@pytest.fixture
def old(run_dir):
    """A base of random weights, and a set of 40 images of a class that it lacks and one that it knows."""
    make_data("tuned", class_names=["star", "bar"], train=40, val=8)
    return run_dir


def adapters(base, tag, step=6):
    """(tensors, metadata) of its file."""
    return load_safetensors(base / "runs" / tag / "adapters" / f"step_{step:06d}.safetensors")


def test_a_stopped_and_resumed_run_is_bit_identical(base, old, run_script):
    assert_resumes(base, run_script, *TINY, "--device_batch_size=8")
    assert_identical(adapters(base, "parts")[0], adapters(base, "whole")[0])


@pytest.mark.slow
def test_two_ranks_train_the_same_adapters_as_one(base, old, run_script):
    assert_ranks_agree(base, run_script, *TINY, "--weight_decay=0.1", "--lora_targets=qkv")
    one, _ = adapters(base, "one")
    two, _ = adapters(base, "two")
    assert_close(two, one, rtol=1e-2, atol=1e-4)


def test_the_base_stays_and_only_adapters_are_trained_and_kept(base, old, run_script):
    contents = lambda: {path: path.read_bytes() for path in old.rglob("*") if path.is_file()}
    before = contents()
    grid = ("--sample_every=0", "--sample_steps=2", "--timestep_shift=3")  # of a flow it can be changed
    done = run_script("base_train", *TINY, "--model_tag=a", "--lora_targets=qkv,fc2", *grid)
    assert done["process"].timestep_shift == 3
    assert load_run("a", "cpu").process.timestep_shift == 3
    assert contents() == before
    tuned = dict(done["raw_model"].named_parameters())
    plain = load_run("flow", "cpu").model.state_dict()
    for name, x in plain.items():
        if name != "y_embed.weight":
            assert torch.equal(x, tuned[name]), name
    assert torch.equal(tuned["y_embed.weight"][:8], plain["y_embed.weight"][:8])
    tensors, _ = adapters(base, "a")
    assert len(tensors) == 1 + 2 * 2  # rows of the class table, and both factors of each layer; names: test_lora.py
    for name, x in tensors.items():
        assert x.any(), name
    saved, _ = load_safetensors(done["run_dir"] / "checkpoints/step_000006/model.safetensors")
    count = lambda weights: sum(x.numel() for x in weights.values())
    assert count(tensors) == done["num_trained"]
    assert count(saved) == done["num_trained"]
    assert (done["run_dir"] / "samples" / "step_000006.png").stat().st_size > 1000


def test_a_run_of_adapters_is_a_run_like_any_other(base, old, run_script, draw):
    """By its tag, or as base and file: the same model, with the class that it has learned."""
    run_script("base_train", *TINY, "--model_tag=a", "--num_iterations=2")
    file = base / "runs/a/adapters/step_000002.safetensors"
    run = load_run("a", "cpu")
    by_hand = build(*read(*find("flow"), str(file)), "cpu")
    for other in (by_hand, load_run(str(file), "cpu")):
        assert_identical(run.model.state_dict(), other.model.state_dict())
    assert run.data.class_names == [*CLASS_NAMES, "star"]
    assert by_hand.data.class_names == [*CLASS_NAMES, "star"]
    assert run.num_classes == 9
    assert run.step == 2
    assert run.data.name == "tuned"
    asked = ("--num_images=9", "--classes=0,1,2,3,4,5,6,7,star")
    images, labels, _ = draw("--model=a", *asked)
    assert labels.tolist() == [*range(9)]
    by_file = ("--model=flow", f"--lora={file}", *asked)
    same, _, _ = draw(*by_file)
    by_tag, _, _ = draw("--model=flow", "--lora=a", *asked)
    assert np.array_equal(images, by_tag)
    other, _, _ = draw(*by_file, "--lora_scale=0")
    assert np.array_equal(images, same)
    assert not np.array_equal(images, other)
    refused("lora_scale=0.5 without out", run_script, "export", "--model=a", "--lora_scale=0.5")
    # and one can be fine-tuned again
    again = [arg for arg in TINY if "--init_from" not in arg]
    done = run_script("base_train", *again, "--init_from=a", "--model_tag=b", "--num_iterations=1")
    assert done["lora"]["classes"] == []
    assert done["class_names"] == [*CLASS_NAMES, "star"]
    assert load_run("b", "cpu").step == 1


def test_epochs_and_saved_adapters(base, old, run_script):
    """40 images in steps of 16: one and a half epochs are four steps."""
    args = [arg for arg in TINY if "iterations" not in arg]
    done = run_script("base_train", *args, "--num_epochs=1.5", "--save_every=3", "--model_tag=a")
    assert done["num_iterations"] == 4
    saved = [path.stem for path in (done["run_dir"] / "adapters").iterdir()]
    assert sorted(saved) == ["step_000003", "step_000004"]


@pytest.mark.slow
def test_every_kind_of_base_can_be_tuned_and_loaded(base, run_script, tmp_path):
    make_data()
    make_data("plain", class_names=(), val=0)
    end = [arg for arg in TINY if not arg.startswith(("--init_from", "--data"))]
    end += ["--num_iterations=1", "--eval_every=-1"]
    kinds = {
        "unet": ("--arch=unet", "--num_res_blocks=1", "--dropout=0.1"),
        "eps": ("--objective=eps", "--variance=learned_range", "--num_timesteps=50", "--arch=dit_classic"),
        "small": ("--low_res_size=4", "--class_cond=False"),
        "openai": ("--arch=unet", "--num_res_blocks=1", "--objective=eps", "--num_timesteps=50"),
    }
    for tag, settings in kinds.items():
        make_run(run_script, tag, *settings)
        more = ("--sample_every=0", "--sample_steps=1", "--checkpointing", "--t_range=0,0.5")
        source = tag
        if tag == "openai":  # without a null class
            file = run_script("export", f"--model={tag}", "--form=openai")["path"]
            source = f"{file},heads=1,num_timesteps=50"
            more += ("--label_drop=0",)
        more += (f"--init_from={source}", f"--model_tag={tag}_lora")
        if tag != "small":  # samples would show the base's classes
            unlabelled = (*end, *more, "--data=plain")
            refused("'plain' has no classes, .*accepted: one sub-folder", run_script, "base_train", *unlabelled)
        done = run_script("base_train", *end, *more, f"--data={'plain' if tag == 'small' else 'tiny'}")
        assert done["lora"]["classes"] == []
        assert load_run(f"{tag}_lora", "cpu").num_classes == (0 if tag == "small" else 8)
    for name, channels in (
        ("pixels", 3),
        ("latents", 4),
    ):
        config = DiTConfig(16, channels, 2 * channels, 4, 64, 1, 1, num_classes=5, block="classic")
        model = DiT(config)
        model.init_weights(torch.Generator())
        torch.save(to_meta(model.state_dict(), config), tmp_path / f"{name}.pt")
    published = lambda name: ("base_train", *end, f"--init_from={tmp_path / name}.pt,heads=1", "--data=tiny")
    run_script(*published("pixels"), "--model_tag=pixels_lora")
    assert load_run("pixels_lora", "cpu").data.class_names == [*"01234", *CLASS_NAMES]
    refused("which autoencoder made these latents", run_script, *published("latents"))


def test_what_makes_the_adapters_cannot_change_within_a_run(base, old, run_script):
    run_script("base_train", *TINY, "--model_tag=a", "--num_iterations=1")
    more = ("--num_iterations=2", "--lr=0.1", "--resume=changed")
    assert run_script("base_train", *TINY, "--model_tag=a", *more)["step"] == 2
    other = ("--model_tag=a", "--t_range=0.1,1", *more)
    refused(r"t_range='0.1,1' \(was '0,1'\); use another", run_script, "base_train", *TINY, *other)
    # Their base is pinned to its step: it may train on, but not change
    file = old / "checkpoints" / "step_000001" / "ema_0.999.safetensors"
    changed = {name: x + 1 for name, x in load_safetensors(file)[0].items()}
    meta = load_meta(file.parent)
    save_checkpoint(old, 2, {"model": changed, "ema_0.999": changed}, meta | {"step": 2})
    assert run_script("base_train", *TINY, "--model_tag=a", "--num_iterations=3", "--resume=changed")["step"] == 3
    save_checkpoint(old, 1, {"model": changed, "ema_0.999": changed}, meta)
    refused("adapters for other weights: flow,step=1,ema=0.999", load_run, "a", "cpu")
    refused("has other weights than when this run began", run_script, "base_train", *TINY, "--model_tag=a", *more)


def test_a_run_goes_on_from_a_base_that_moved(base, old, run_script):
    run_script("base_train", *TINY, "--model_tag=a", "--num_iterations=1")
    old.rename(base / "runs" / "moved")
    moved = [arg.replace("init_from=flow", "init_from=moved") for arg in TINY] + ["--model_tag=a", "--resume=changed"]
    done = run_script("base_train", *moved, "--num_iterations=2")
    assert done["start_step"] == 1
    assert done["lora"]["base"].startswith("moved,")
    other = [arg.replace("init_from=moved", "init_from=eps") for arg in moved]
    refused("eps.*has other weights than when this run began", run_script, "base_train", *other, "--num_iterations=3")


def test_what_a_base_that_moved_needs_is_said(base, old, run_script, draw):
    run_script("base_train", *TINY, "--model_tag=a", "--num_iterations=1")
    file = base / "runs/a/adapters/step_000001.safetensors"
    before = load_run("a", "cpu").model.state_dict()
    old.rename(old.with_name("moved"))
    refused("adapts flow,step=1,ema=0.999, which is missing; if it moved: --model=BASE --lora=", load_run, "a", "cpu")
    assert_identical(load_run("moved", "cpu", lora=str(file)).model.state_dict(), before)


def test_a_base_has_its_tag_however_it_is_named(base, old, tmp_path):
    """Else its checkpoint would not be kept."""
    (tmp_path / "link").symlink_to(base / "runs")
    tag = identity(load_run("flow", "cpu"))["base"]
    assert tag == "flow,step=1,ema=0.999"
    for name in (tmp_path / "link" / "flow", base / "runs" / ".." / "runs" / "flow"):
        assert identity(load_run(str(name), "cpu"))["base"] == tag


def test_weights_that_come_with_the_code_are_found_wherever_it_is(base, monkeypatch, tmp_path):
    """Adapters name them by their path in the clone that trained them."""
    monkeypatch.setattr(load, "WEIGHTS", tmp_path)
    (tmp_path / "small.safetensors").touch()
    assert load.find_run("/a/clone/runs/weights/small.safetensors") == tmp_path / "small.safetensors"
    refused("is no folder, file or tag", load.find_run, "/a/clone/runs/weights/large.safetensors")
    refused("is no folder, file or tag", load.find_run, "/a/clone/small.safetensors")


def test_new_adapters_go_on_top_of_a_file_of_adapters(base, old, run_script):
    """At step 0 the model is the one that the file gives."""
    run_script("base_train", *TINY, "--model_tag=first", "--num_iterations=2")
    file = base / "runs" / "first" / "adapters" / "step_000002.safetensors"
    run_script("base_train", *TINY, f"--init_from={file}", "--num_iterations=0", "--lora_rank=3", "--model_tag=second")
    first = load_run("first", "cpu").model.state_dict()
    second = load_run("second", "cpu").model.state_dict()
    assert_identical(first, second)
