"""Vectors beside the images as a condition: what they mean, and that they go wherever labels go."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import refused
from figures import CONFIGS, filled, inputs
from test_base_train import TINY
from tiny_runs import TIMELESS, assert_identical, make_data, make_run, weights
from torch.testing import assert_close

from nanodiff.data.dataloader import shuffled
from nanodiff.data.shapes import CLASS_NAMES, draw_shapes
from nanodiff.diffusion.guidance import make_denoiser
from nanodiff.formats.load import load_run
from nanodiff.sampling.draw import SampleSettings
from scripts.sample_web import describe_run


def one_hot(labels):
    return np.eye(len(CLASS_NAMES), dtype=np.float32)[labels]


def words(labels):
    """A sequence of up to three one-hot words: the class, and a second word for every other class."""
    sequence = np.zeros((len(labels), 3, 10), np.float32)
    sequence[np.arange(len(labels)), 0, labels] = 1
    sequence[labels % 2 == 1, 1, 9] = 1
    return sequence


@torch.no_grad()
def test_one_hot_vectors_are_labels():
    """A linear map of a one-hot vector is a row of a table; NaN, the null vector, is the null class."""
    config = CONFIGS["modern"]
    labelled = filled(config)
    model = filled(replace(config, num_classes=0, vector_dim=5))
    state = labelled.state_dict()
    table = state.pop("y_embed.weight")
    state["vector_embed.weight"] = table[:5].T.contiguous()
    state["vector_null"] = table[5]
    model.load_state_dict(state)
    x_t, t, y = inputs(6)
    null = torch.full((1, 5), torch.nan)
    vectors = torch.cat([torch.eye(5), null])
    assert_close(model(x_t, t, vectors=vectors), labelled(x_t, t, y))
    # and so they are guided alike
    settings = SampleSettings(cfg_scale=3.0, cfg_interval=(0.0, 1.0))
    t = torch.full((6,), 500.0)
    by_vector = make_denoiser(model, {"vectors": vectors}, settings)
    by_label = make_denoiser(labelled, {"y": y}, settings)
    assert_close(by_vector(x_t, t), by_label(x_t, t))


def test_a_run_learns_from_vectors(base, run_script):
    make_data(vectors_of=words, train=72)
    run_script("base_train", *TINY, "--model_tag=whole")
    assert weights(base, "whole")["model.safetensors"]["vector_embed.weight"].abs().max() > 0
    unet = [arg for arg in TINY if "patch_size" not in arg] + ["--arch=unet", "--model_tag=unet"]
    refused("arch=unet takes one vector", run_script, "base_train", *unet)


@pytest.fixture
def here(base, run_script):
    """A base folder with a set of one-hot vectors without labels, and a run of random weights on it."""
    make_data(class_names=(), vectors_of=one_hot, train=72)
    make_run(run_script, "a")
    return base


def test_rows_of_a_file_have_no_classes_which_is_said(base, draw, run_script, tmp_path, capsys):
    make_data(vectors_of=one_hot)
    make_run(run_script, "a")
    np.save(tmp_path / "rows.npy", np.eye(8, dtype=np.float32))
    some = ("--model=a", "--num_images=8", f"--vectors={tmp_path / 'rows.npy'}")
    _, labels, _ = draw(*some)
    assert labels.tolist() == [*range(8)]
    assert "rows.npy': samples take all in turn" in capsys.readouterr().out
    draw(*some, "--classes=bar")
    assert "samples take all in turn" not in capsys.readouterr().out


def test_samples_take_rows_and_those_of_the_validation_images_by_default(here, draw, run_script, tmp_path):
    _, labels = draw_shapes(24, seed=24)
    raw = one_hot(labels)
    some = ("--model=a", "--num_images=24")
    offered = describe_run(here / "runs" / "a")  # on the page they are guided, too
    assert offered["is_guided"]
    assert offered["cfg_scale"] == 2.5
    assert offered["classes"] == []
    raw = raw[shuffled(np.arange(24), 24, (0,))]  # the order in which samples take them
    np.save(tmp_path / "rows.npy", raw)
    np.savez(tmp_path / "rows.npz", vectors=raw)  # as prepare_data takes it
    np.save(tmp_path / "other.npy", np.roll(raw, 1, axis=1))
    by_default, _, _ = draw(*some)
    by_npz, _, _ = draw(*some, f"--vectors={tmp_path / 'rows.npz'}")
    other, _, _ = draw(*some, f"--vectors={tmp_path / 'other.npy'}")
    by_file, _, _ = draw(*some, f"--vectors={tmp_path / 'rows.npy'}")
    assert (by_default == by_file).all()
    assert (by_npz == by_file).all()
    assert (other != by_file).any()
    np.save(tmp_path / "rows.npy", raw[::-1])  # new content under a name that was used
    again = (*some, *TIMELESS, "--npz", "--steps=3", f"--vectors={tmp_path}/rows.npy", f"--out={tmp_path}/drawn")
    refused("another protocol", run_script, "sample", *again)
    seven = np.zeros((3, 7), np.float32)
    nan = np.full((3, 8), np.nan, np.float32)
    for array, said in (
        (seven, r"accepted: \('n', 8\)"),
        (nan, "NaN"),
        (np.array(["a"]), "accepted: floats"),
    ):
        np.save(tmp_path / "bad.npy", array)
        refused(said, draw, *some, f"--vectors={tmp_path / 'bad.npy'}")


@pytest.mark.parametrize("vectors_of", [words, None])
def test_a_set_remade_with_other_vectors_is_refused(here, draw, vectors_of):
    shutil.rmtree(here / "data" / "tiny")
    make_data(class_names=(), vectors_of=vectors_of, train=72)
    refused("the model wants", draw, "--model=a", "--num_images=8")


def test_fine_tuning_and_export_keep_the_vectors(here, run_script, tmp_path):
    args = [arg for arg in TINY if not arg.startswith(("--depth", "--patch_size"))]
    assert run_script("base_train", *args, "--init_from=a", "--lora_rank=2", "--model_tag=lora")["step"] == 6
    run_script("export", "--model=a", "--form=safetensors", f"--out={tmp_path / 'a.safetensors'}")
    again = load_run(str(tmp_path / "a.safetensors"), "cpu")
    first = load_run("a", "cpu")
    assert_identical(again.model.state_dict(), first.model.state_dict())
    images = again.sample(num_images=2, steps=2)
    np.testing.assert_array_equal(images, first.sample(num_images=2, steps=2))
