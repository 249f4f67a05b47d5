"""CIFAR-10, IDX and npz files come out as they went in; vectors stay with their images."""

import gzip
import hashlib

import numpy as np
import pytest
import torch
from conftest import refused
from image_helpers import RNG, everything, prepare, reference_crop, report, write, write_cifar, write_mnist
from numpy.testing import assert_allclose, assert_array_equal
from PIL import Image

from nanodiff.data.codec import load_codec, make_codec
from nanodiff.data.dataset import open_dataset
from nanodiff.data.pixels import from_stored
from nanodiff.prepare import sources

pytestmark = pytest.mark.usefixtures("base")


@pytest.mark.parametrize(
    ("pack", "suffix"),
    [
        (gzip.compress, ".gz"),
        (bytes, ""),
    ],
)
def test_idx_round_trip(tmp_path, pack, suffix):
    sets = write_mnist(tmp_path / "m", pack=pack, suffix=suffix)
    prepare(tmp_path / "m")
    for split, (images, labels) in sets.items():
        found, found_labels = everything(split=split)
        assert_array_equal(found, images[:, None])
        class_names = open_dataset("toy").class_names
        assert [int(class_names[label]) for label in found_labels] == labels.tolist()
    if suffix:  # torchvision leaves both forms
        packed = list((tmp_path / "m").iterdir())
        copies = [write(file.with_suffix(""), gzip.decompress(file.read_bytes())) for file in packed]
        assert "20 train + 6 val" in prepare(tmp_path / "m")
        for file in copies:
            file.unlink()
    for file in (tmp_path / "m").iterdir():
        name = file.name.replace("t10k", "test")
        file.rename(file.with_name(f"emnist-letters-{name}"))
    assert "20 train + 6 val" in prepare(tmp_path / "m")
    (tmp_path / "m" / "train-images-idx3-ubyte").mkdir()  # as in Kaggle's copy, beside the files
    assert "20 train + 6 val" in prepare(tmp_path / "m")
    (tmp_path / "m" / "train-images-idx3-ubyte").rmdir()
    write(tmp_path / "m" / "emnist-digits-train-images-idx3-ubyte", b"")
    refused("has the IDX files .*emnist-letters-train-.*, .emnist-digits-train", prepare, tmp_path / "m")
    (tmp_path / "m" / "emnist-digits-train-images-idx3-ubyte").unlink()
    next((tmp_path / "m").glob("*train-labels*")).unlink()
    refused("6. labels for .20, 6. images", prepare, tmp_path / "m")
    (file,) = (tmp_path / "m").glob("*train-images*")
    prepare(file, val_fraction=0)  # one file, without labels
    assert open_dataset("toy").num_classes == 0
    assert len(everything()[0]) == 20
    prepare(file, val_fraction=0, resolution=5)  # scaled like image files
    images, _ = sets["train"]
    expected = [reference_crop(Image.fromarray(image), 5) for image in images]
    found, _ = everything()
    assert_array_equal(found[:, 0], expected)


@pytest.mark.parametrize("key", ["arr_1", "labels", None])
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_round_trip(tmp_path, key, save):
    """Also behind 64 KB of another array. A number that no image has is no class."""
    images = RNG.integers(0, 256, (30, 8, 8, 3), np.uint8)
    labels = np.arange(30, dtype=np.int32) % 7
    arrays = {"protocol": "x" * 2**14, "arr_0": images, "y": labels}
    if key:
        arrays[key] = 3 * labels + 1
    save(tmp_path / "a.npz", **arrays)
    out = report(tmp_path / "a.npz", val_fraction=0)
    found, numbers = everything()
    assert_array_equal(found, images.transpose(0, 3, 1, 2))
    if key:
        assert numbers.tolist() == labels.tolist()
        assert open_dataset("toy").class_names == ["1", "4", "7", "10", "13", "16", "19"]
        assert "7 class numbers from 1 to 19 have images: others are no classes" in out
    else:
        assert numbers.tolist() == [0] * 30
        assert open_dataset("toy").class_names == []
        assert "class numbers" not in out
    assert "a.npz: y ignored" in out
    for others, said in (
        (labels, True),
        (arrays.get("labels", labels), key != "labels"),
    ):
        save(tmp_path / "a.npz", **{"labels": 3 * labels + 1, **arrays, "arr_1": others})
        assert ("arr_1 ignored" in report(tmp_path / "a.npz", val_fraction=0)) == said
    prepare(tmp_path / "a.npz", labels="none")
    assert open_dataset("toy").num_classes == 0


def test_cifar10_round_trip_and_its_download_which_is_checked_and_kept(tmp_path, monkeypatch, base):
    file = tmp_path / "cifar-10-binary.tar.gz"
    batches = write_cifar(file)
    prepare(file)
    train = np.concatenate([batches[f"data_batch_{i}.bin"] for i in range(1, 6)])
    for split, records in (
        ("train", train),
        ("val", batches["test_batch.bin"]),
    ):
        images, labels = everything(split=split)
        found = np.column_stack([labels, images.reshape(len(images), -1)])
        assert_array_equal(found, records)
    assert open_dataset("toy").class_names[3] == "cat"
    monkeypatch.setattr(sources, "CIFAR10_URL", file.as_uri())
    monkeypatch.setattr(sources, "CIFAR10_BYTES", file.stat().st_size)
    refused("SHA-256", prepare, source="cifar10")
    assert not list((base / "downloads").iterdir())
    monkeypatch.setattr(sources, "CIFAR10_SHA256", hashlib.sha256(file.read_bytes()).hexdigest())
    prepare(source="cifar10")
    file.unlink()
    prepare(source="cifar10")  # from the copy that was kept
    (base / "downloads" / file.name).unlink()
    refused(r"could not download.*--path", prepare, source="cifar10")


ARRAYS = {
    "12 bits": RNG.integers(0, 4096, (30, 8, 8), np.uint16),
    "signed, in Fortran's order": np.asfortranarray(RNG.integers(-1000, 3000, (30, 8, 8, 1), np.int16)),
    "five bands": RNG.normal(size=(30, 8, 8, 5)).astype(np.float32),
    "bytes in four bands": RNG.integers(0, 256, (30, 8, 8, 4), np.uint8),
}


@pytest.mark.parametrize("array", ARRAYS.values(), ids=ARRAYS)
@pytest.mark.parametrize("suffix", ["npy", "npz"])
def test_arrays_come_back_in_their_range(tmp_path, array, suffix):
    """To fp16's 11 bits of the range; bytes exactly."""
    file = tmp_path / f"a.{suffix}"
    if suffix == "npy":
        np.save(file, array)
    else:
        np.savez(file, arr_0=array)
    line = report(file, val_fraction=0)
    data = open_dataset("toy")
    codec = make_codec(data, torch.device("cpu"))
    x0 = codec.to_x0(torch.from_numpy(data.images(range(30))))
    assert x0.dtype == torch.float32
    assert -1 <= x0.min() < -0.99
    assert 0.99 < x0.max() <= 1
    found = codec.to_output(x0)
    expected = array.reshape(30, 8, 8, -1).transpose(0, 3, 1, 2).astype(float)
    span = float(array.max()) - float(array.min())
    assert found.dtype == array.dtype
    is_bytes = array.dtype == np.uint8
    assert_allclose(found, expected, atol=0 if is_bytes else span / 2**11)
    assert ("become -1 to 1" in line) == (not is_bytes)


def test_a_given_range_is_that_of_every_set(tmp_path):
    """Sets of one range can be compared; values beyond it are clipped, and counted."""
    values = np.array([0, 50, 100, 150] * 16, np.float32)
    np.save(tmp_path / "a.npy", values.reshape(4, 4, 4))
    assert "values clipped to the range: 4 images" in report(tmp_path / "a.npy", val_fraction=0, range="0,100")
    images, _ = everything()
    assert np.unique(images).tolist() == [-1, 0, 1]
    codec = make_codec(open_dataset("toy"), torch.device("cpu"))
    np.save(tmp_path / "b.npy", np.arange(64, dtype=np.uint16).reshape(4, 4, 4))
    prepare(tmp_path / "b.npy", val_fraction=0, range="0,65536")
    whole = make_codec(open_dataset("toy"), torch.device("cpu"))
    assert whole.to_output(torch.ones(1, 1, 4, 4)).min() == 65535  # does not wrap around to 0
    prepare(tmp_path / "a.npy", val_fraction=0)
    of_model = load_codec(codec.data, torch.device("cpu"))
    refused(r"has range \[0.0, 150.0\], the model wants", of_model.accept, open_dataset("toy"))


@pytest.mark.parametrize("file", ["png", "tif", "pgm", "int32.tif", "float32.tif", "npy"])
@pytest.mark.parametrize("side", [8, 4])
def test_gray_images_beyond_8_bits_are_kept_as_arrays_are(tmp_path, file, side):
    """In the given range, to fp16's 11 bits; scaled by area to the means of 2 x 2 pixels. Others are skipped."""
    levels = np.random.default_rng(0).integers(30_000, 30_400, (4, 8, 8), np.uint16)
    levels[:, 0, 0] = 40_000  # beyond the range
    (tmp_path / "in").mkdir()
    place = tmp_path / "in"
    if file == "npy":
        place = place / "a.npy"
        np.save(place, levels)
    else:
        Image.fromarray(levels[0].astype(np.uint8)).save(tmp_path / "in" / "shallow.png")
        dtype = file.removesuffix(".tif") if "32" in file else "uint16"
        for i, image in enumerate(levels):
            Image.fromarray(image.astype(dtype)).save(place / f"{i}.{file}")
    out = report(place, val_fraction=0, range="30000,30400", resolution=side, scaling="area")
    assert "values 30000 to 30400 become -1 to 1, in fp16\n" in out
    assert "values clipped to the range: 4 images" in out
    assert ("skipped 1 unreadable files (see skipped.txt): 'shallow.png': its mode is L;" in out) == (file != "npy")
    data = open_dataset("toy")
    codec = make_codec(data, torch.device("cpu"))
    found = codec.to_output(codec.to_x0(torch.from_numpy(data.images(range(4)))))
    k = 8 // side
    expected = levels.clip(30_000, 30_400).reshape(4, 1, side, k, side, k).mean((3, 5))
    rounding = 0.5 if file == "npy" else 0
    assert_allclose(found[..., 1:, :], expected[..., 1:, :], atol=400 / 2**11 + rounding)
    assert found.dtype == (np.uint16 if rounding else np.float32)


def told(ids):
    """The set's vectors as models take them."""
    toy = open_dataset("toy")
    return from_stored(toy.cond(ids), toy.data)["vectors"].numpy()


@pytest.mark.parametrize(
    "shape",
    [
        (30, 5),
        (30, 4, 5),
    ],
)
def test_permuting_images_and_vectors_together_changes_nothing(tmp_path, shape):
    images = RNG.integers(0, 256, (30, 8, 8, 3), np.uint8)
    vectors = RNG.normal(3, 2, shape).astype(np.float32)
    if len(shape) == 3:
        vectors[:, 2:] *= RNG.integers(0, 2, (30, 1, 1))  # zeros behind the end
    found = []
    for order in (np.arange(30), RNG.permutation(30)):
        np.savez(tmp_path / "a.npz", arr_0=images[order])
        np.save(tmp_path / "v.npy", vectors[order])
        prepare(tmp_path / "a.npz", vectors=str(tmp_path / "v.npy"), val_fraction=0)
        data = open_dataset("toy")
        stored = np.load(data.path / "train_vectors.npy")
        assert stored.dtype == np.float16
        pairs = zip(data.images(range(30)), stored)
        found.append({image.tobytes(): vector.tobytes() for image, vector in pairs})
    assert found[0] == found[1]
    normal = told(np.arange(30))
    assert normal.dtype == np.float32
    is_word = normal.any(-1)
    assert_array_equal(is_word, vectors[order].any(-1))  # what is behind the end stays zero
    assert_allclose(normal[is_word].mean(0), 0, atol=1e-5)
    assert_allclose(normal[is_word].std(0), 1, atol=1e-5)


def test_constant_dimensions_are_zero_and_each_image_has_a_vector(tmp_path):
    np.savez(tmp_path / "a.npz", arr_0=np.zeros((30, 8, 8, 3), np.uint8))
    constant = np.full(30, 0.1)
    np.save(tmp_path / "v.npy", np.stack([constant, np.arange(30.0)], 1))
    prepare(tmp_path / "a.npz", vectors=str(tmp_path / "v.npy"))
    assert (told([0, 7])[:, 0] == 0).all()
    np.save(tmp_path / "v.npy", np.ones((9, 2)))
    refused("9 vectors, 0 names; accepted: 30", prepare, tmp_path / "a.npz", vectors=str(tmp_path / "v.npy"))
