"""CIFAR-10, IDX and npz files come out as they went in."""

import gzip
import hashlib

import numpy as np
import pytest
from image_helpers import RNG, everything, prepare, reference_crop, write_cifar, write_mnist

from nanodiff.common import UserError
from nanodiff.data import sources
from nanodiff.data.dataset import open_dataset


@pytest.fixture(autouse=True)
def base(tmp_path, monkeypatch):
    monkeypatch.setenv("NANODIFF_BASE_DIR", str(tmp_path / "base"))
    return tmp_path / "base"


@pytest.mark.parametrize(("pack", "suffix"), [(gzip.compress, ".gz"), (bytes, "")])
def test_idx_round_trip(tmp_path, pack, suffix):
    sets = write_mnist(tmp_path / "m", pack=pack, suffix=suffix)
    prepare(tmp_path / "m", source="mnist")
    for split, (images, labels) in sets.items():
        found, found_labels = everything(split=split)
        np.testing.assert_array_equal(found, images[:, None])
        np.testing.assert_array_equal(found_labels, labels)
    next((tmp_path / "m").glob("train-labels*")).unlink()
    prepare(next((tmp_path / "m").glob("train-images*")), val_fraction=0)  # one file, without labels
    assert open_dataset("toy").num_classes == 0 and len(everything()[0]) == 20


def test_arrays_are_scaled_like_image_files(tmp_path):
    Image = pytest.importorskip("PIL.Image", reason="Pillow scales images")
    sets = write_mnist(tmp_path / "m")
    prepare(tmp_path / "m", resolution=5)
    expected = [reference_crop(Image.fromarray(image), 5) for image in sets["train"][0]]
    np.testing.assert_array_equal(everything()[0][:, 0], expected)


@pytest.mark.parametrize("key", ["arr_1", "labels", None])
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_round_trip(tmp_path, key, save):
    images, labels = RNG.integers(0, 256, (30, 8, 8, 3), np.uint8), RNG.integers(0, 7, 30).astype(np.int32)
    save(tmp_path / "a.npz", arr_0=images, **({key: labels} if key else {}))
    prepare(tmp_path / "a.npz", val_fraction=0)
    np.testing.assert_array_equal(everything()[0], images.transpose(0, 3, 1, 2))
    assert everything()[1].tolist() == (labels.tolist() if key else [0] * 30)
    prepare(tmp_path / "a.npz", labels="none")
    assert open_dataset("toy").num_classes == 0


def test_cifar10_round_trip(tmp_path):
    file = tmp_path / "cifar-10-binary.tar.gz"
    batches = write_cifar(file)
    prepare(file, sha256=hashlib.sha256(file.read_bytes()).hexdigest())
    train = np.concatenate([batches[f"data_batch_{i}.bin"] for i in range(1, 6)])
    for split, records in (("train", train), ("val", batches["test_batch.bin"])):
        images, labels = everything(split=split)
        np.testing.assert_array_equal(images.reshape(len(images), -1), records[:, 1:])
        np.testing.assert_array_equal(labels, records[:, 0])
    assert open_dataset("toy").class_names[3] == "cat"


def test_cifar10_download_is_checked_and_kept(tmp_path, monkeypatch, base):
    file = tmp_path / "cifar-10-binary.tar.gz"
    write_cifar(file)
    monkeypatch.setattr(sources, "CIFAR10_URL", file.as_uri())
    monkeypatch.setattr(sources, "CIFAR10_BYTES", file.stat().st_size)
    with pytest.raises(UserError, match="SHA-256"):
        prepare(source="cifar10")
    assert not list((base / "downloads").iterdir())
    monkeypatch.setattr(sources, "CIFAR10_SHA256", hashlib.sha256(file.read_bytes()).hexdigest())
    prepare(source="cifar10")
    file.unlink()
    prepare(source="cifar10")  # from the copy that was kept
    (base / "downloads" / file.name).unlink()
    with pytest.raises(UserError, match=r"could not download.*--path"):
        prepare(source="cifar10")
