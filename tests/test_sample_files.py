"""Samples in a file or a folder are read in any pieces, with their classes."""

import json
import re

import numpy as np
import pytest
from conftest import refused
from PIL import Image

from nanodiff.metrics.sample_files import Samples

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (20, 6, 5, 3), np.uint8)


def assert_pieces(samples, images, labels):
    assert samples.num_images == 20
    assert samples.shape == (images.shape[3], 6, 5)
    for ids in (np.arange(4), np.arange(4, 20), np.arange(2, 3)):
        expected = images[ids].transpose(0, 3, 1, 2)
        assert (samples.images(ids) == expected).all()
        assert samples.labels(ids).tolist() == labels[ids].tolist()


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_file_is_read_in_any_pieces(tmp_path, save, channels):
    images = IMAGES[..., :channels]
    labels = np.arange(20) % 3
    drawn = {"steps": 7, "data": "shapes", "class_names": ["a", "b", "c"]}
    save(tmp_path / "s.npz", arr_0=images, labels=labels, protocol=json.dumps(drawn))
    file = Samples(str(tmp_path / "s.npz"))
    assert file.protocol["samples_protocol"] == drawn
    assert file.num_classes == 3
    assert file.data == "shapes"
    assert file.class_names == ["a", "b", "c"]
    assert_pieces(file, images, labels)


def test_what_makes_a_distance_wrong_is_said(tmp_path, capsys):
    """JPEG's loss; transparency, bits beyond 8; values that were scaled to 1. Other samples get no note."""
    for name, images, note in (
        ("a.PNG", IMAGES, "listing the files in .*\n  all 20 images: . 20"),
        ("a.JPG", IMAGES, "listing .*\n  all 20 images: . 20\nnote: .*a.JPG: the loss of JPEG counts .*"),
        ("t.png", np.dstack([IMAGES[0], IMAGES[1, ..., :1]])[None], "listing .*\n .*\nnote: transparency .*0.png"),
        ("16.png", IMAGES[:1, ..., 0].astype(np.uint16) * 257, "listing .*\n .*\nnote: 16 bits .*; first in .*0.png"),
        ("s.npz", IMAGES, ""),
        ("b.npz", IMAGES // 128, "note: .*b.npz begins with values of 0 and 1 alone; .*"),
    ):
        path = tmp_path / name
        if path.suffix == ".npz":
            np.savez(path, images)
        else:
            path.mkdir()
            for i, image in enumerate(images):
                Image.fromarray(image).save(path / f"{i}{path.suffix}")
        Samples(str(path))
        assert re.fullmatch(note, capsys.readouterr().out.strip())


def test_the_first_image_that_loses_something_is_named(tmp_path, capsys):
    for i, image in enumerate(IMAGES):  # the last three are partly transparent
        image = np.dstack([image, IMAGES[0, ..., :1]]) if i >= 17 else image
        Image.fromarray(image).save(tmp_path / f"{i:02d}.png")
    samples = Samples(str(tmp_path))
    assert "note" not in capsys.readouterr().out
    samples.images(range(20))
    (note,) = capsys.readouterr().out.strip().splitlines()
    assert re.fullmatch("note: transparency .*; first in .*17.png", note)


@pytest.mark.parametrize("classes", [1, 4])
def test_a_folder_is_read_in_any_pieces(tmp_path, classes):
    names = [f"class {k}" for k in range(4)] if classes > 1 else []
    for i, image in enumerate(IMAGES):
        folder = tmp_path / (names[i // 5] if names else "")
        folder.mkdir(exist_ok=True)
        Image.fromarray(image).save(folder / f"{i:03d}.png")
    (tmp_path / "notes.txt").write_text("no image")
    samples = Samples(str(tmp_path))
    assert samples.class_names == names
    assert samples.num_classes == len(names)
    assert_pieces(samples, IMAGES, np.arange(20) // 5 if names else np.zeros(20, int))
    Image.fromarray(IMAGES[0, :4]).save(folder / "zoo.png")
    refused("zoo.png is 5x4, .*000.png 5x6", Samples(str(tmp_path)).images, np.array([0, 20]))
