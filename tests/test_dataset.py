"""A set is whole or absent, returns what was written, and a damaged one is refused in one line."""

import errno
import json
import os
from unittest.mock import Mock

import numpy as np
import pytest
from conftest import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_array_equal
from processes import on_ranks

from nanodiff.data import dataset, shapes
from nanodiff.data.dataset import DatasetWriter, match_labels, open_dataset, verify
from nanodiff.files import sha256_of

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (50, 3, 4, 4), np.uint8)
LABELS = RNG.integers(0, 5, 50)


@pytest.fixture(autouse=True)
def few_shapes(base, monkeypatch):
    monkeypatch.setattr(shapes, "NUM_IMAGES", {"train": 4000, "val": 1000})


def write(name="toy", class_names="abcde", **options):
    with DatasetWriter(name, class_names, **options) as writer:
        writer.append("train", IMAGES[:40], y=LABELS[:40])
        writer.append("val", IMAGES[40:], y=LABELS[40:])
    return writer.path


def leftovers(base):
    return [p.name for p in (base / "data").iterdir() if ".tmp" in p.name]


@given(st.lists(st.integers(0, 39), min_size=1, max_size=60), st.sampled_from([2**28, 128 + 48 * 9]))
@settings(max_examples=20, deadline=None)
def test_any_indices_in_any_order_over_any_shards(indices, max_shard_bytes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dataset, "MAX_SHARD_BYTES", max_shard_bytes)
        path = write(overwrite=True)
    for file in path.glob("*_images_*.npy"):
        assert file.stat().st_size <= max_shard_bytes
    assert len(list(path.glob("train_images_*.npy"))) == (1 if max_shard_bytes == 2**28 else 5)
    data = open_dataset("toy")
    images = data.images(indices)
    labels = data.labels(indices)
    assert_array_equal(images, IMAGES[:40][indices])
    assert_array_equal(labels, LABELS[:40][indices])
    assert images.dtype == np.uint8
    assert labels.dtype == np.int64
    with pytest.raises(IndexError):
        data.images([40])


def test_facts_and_both_ways_to_name_a_set(base):
    path = write()
    assert open_dataset("toy").spread(4).tolist() == [0, 10, 20, 30]  # of 40, which may be sorted by class
    for name in ("toy", path, str(path)):
        data = open_dataset(name, "val")
        assert len(data) == 10
        assert data.num_classes == 5
        assert data.channels == 3
        assert data.resolution == 4
        assert data.class_names == list("abcde")
        assert data.name == "toy"
        assert data.meta["kind"] == "images"
    assert_array_equal(np.load(path / "val_images_000.npy"), IMAGES[40:])  # plain .npy files
    path.rename(base / "elsewhere")
    name = open_dataset(base / "elsewhere").name
    assert len(open_dataset(name, "val")) == 10


def test_an_existing_set_is_replaced_only_when_asked_and_as_a_whole(base):
    with pytest.raises(ZeroDivisionError), DatasetWriter("toy", "ab") as writer:
        writer.append("train", IMAGES[:2], y=[0, 1])
        1 / 0  # noqa: B018
    assert not (base / "data" / "toy").exists()
    assert not leftovers(base)
    for name in (".toy.tmp-killed_1", ".toy2.tmp-other", ".toy.tmp-b.parts"):  # the last is of a set "toy.tmp-b"
        (base / "data" / name).mkdir()
    write()
    assert sorted(leftovers(base)) == [".toy.tmp-b.parts", ".toy2.tmp-other"]
    for name in leftovers(base):
        (base / "data" / name).rmdir()
    refused("toy exists already and is complete", write)
    write(class_names=[], overwrite=True)
    assert open_dataset("toy").num_classes == 0
    assert not leftovers(base)
    assert open_dataset("toy").labels([3, 2]).tolist() == [0, 0]
    (base / "data" / "mine").mkdir()
    (base / "data" / "mine" / "thesis.txt").write_text("precious")
    refused("mine exists already and is no data set", write, "mine", overwrite=True)
    assert (base / "data" / "mine" / "thesis.txt").exists()


def test_names_and_places_that_cannot_be(base):
    for name in ("", "a/b", ".hidden", "-x", "a b", "x" * 101):
        refused("name=", DatasetWriter, name)
    (base / "data").write_text("a file in the way")
    refused("cannot write", write)


DAMAGE = {
    "no JSON": lambda p: (p / "meta.json").write_text("{"),
    "later format": lambda p: (p / "meta.json").write_text('{"format": 99}'),
    "file missing": lambda p: (p / "train_labels.npy").unlink(),
    "truncated": lambda p: os.truncate(p / "train_images_000.npy", 1000),
    "edited": lambda p: replace(p / "meta.json", b'"channels"', b'"number"'),
    "a label that is no class": lambda p: replace(p / "train_labels.npy", bytes(7), bytes(6) + b"\1"),
    "a label fewer": lambda p: replace(p / "train_labels.npy", b"(40,)", b"(39,)"),
}


def replace(path, old, new):
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new, 1))


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_found_on_opening(what):
    path = write()
    DAMAGE[what](path)
    refused("toy", open_dataset, "toy")


def test_one_flipped_bit_or_another_set_is_found_by_verify(monkeypatch):
    path = write()
    last = IMAGES[-1].tobytes()
    assert verify(open_dataset("toy"))[0] == 4
    replace(path / "val_images_000.npy", last, last[:-1] + bytes([last[-1] ^ 1]))
    refused(r"val_images_000\.npy is damaged", verify, open_dataset("toy"))
    monkeypatch.setattr(dataset, "from_first_rank", lambda splits, what: {"train": {}})
    refused("rank 0 of 1: its set 'toy'", dataset.start_verifying, open_dataset("toy"))


def test_a_set_that_is_a_link_is_replaced_and_its_target_stays(base):
    moved = write().rename(base / "elsewhere")
    (base / "data" / "toy").symlink_to(moved)
    path = write(overwrite=True)
    assert not path.is_symlink()
    assert verify(open_dataset("toy"))
    assert (moved / "meta.json").exists()


def test_a_shard_is_checked_when_it_is_first_used(base):
    replace(write() / "train_images_000.npy", b"(40, 3", b"(39, 3")
    data = open_dataset("toy")
    refused(r"train_images_000\.npy is damaged: its shape is \(39, 3, 4, 4\), meta.json says \(40,", data.images, [0])
    write(overwrite=True)
    data = open_dataset("toy")
    write(overwrite=True)
    refused("train_images_000.npy was changed while it was in use", data.images, [0])


def test_what_describes_a_set_has_its_own_hash(base):
    """In sets of earlier versions it has none."""
    path = write() / "meta.json"
    facts = json.loads(path.read_text())
    for edit in (
        {"class_names": facts["class_names"][::-1]},
        {"splits": facts["splits"] | {"val": {}}},
    ):
        path.write_text(json.dumps(facts | edit))
        refused("meta.json is damaged or was edited", open_dataset, "toy")
    del facts["sha256"]
    path.write_text(json.dumps(facts))
    assert verify(open_dataset("toy"))[0] == 4


@pytest.mark.parametrize("change", ["written", "truncated", "replaced", "removed"])
def test_a_shard_that_changes_during_a_run_is_noticed(base, change):
    """At each save: see base_train."""
    file = write() / "train_images_000.npy"
    data = open_dataset("toy")
    data.images([0])
    dataset.check_unchanged(data, None)
    content = file.read_bytes()
    if change in ("replaced", "removed"):
        file.unlink()
    if change != "removed":
        file.write_bytes(content[:-1] if change == "truncated" else content)
    refused("train_images_000.npy(: | was changed)|no such file", dataset.check_unchanged, data)


def test_a_file_is_hashed_once_until_it_changes(base, monkeypatch):
    hashed = []
    path = write()
    monkeypatch.setattr(dataset, "sha256_of", lambda path: hashed.append(path.name) or sha256_of(path))
    verify(open_dataset("toy"), ["val"])
    assert hashed == ["val_images_000.npy", "val_labels.npy"]
    verify(open_dataset("toy"))
    assert len(hashed) == 4
    os.utime(path / "val_labels.npy", ns=(0, 0))
    verify(open_dataset("toy"))
    assert len(hashed) == 5


def test_more_shards_than_are_mapped_at_a_time(base, monkeypatch):
    monkeypatch.setattr(dataset, "MAX_SHARD_BYTES", 128 + 48)
    monkeypatch.setattr(dataset, "MAX_MAPPED", 3)
    images = RNG.integers(0, 256, (20, 3, 4, 4), np.uint8)
    with DatasetWriter("many") as writer:
        writer.append("train", images)
    assert len(list(writer.path.glob("*.npy"))) == 20
    order = RNG.permutation(20)
    data = open_dataset("many")
    for _ in range(2):
        assert_array_equal(data.images(order), images[order])


def test_unknown_name_and_split_tell_what_there_is(base):
    write("birds")
    refused(r"no data set 'bird'; nearest in [^:]*: birds; .*prepare_data", open_dataset, "bird")
    refused(r"no split 'test', only train, val", open_dataset, "birds", "test")


def test_shapes_are_drawn_once_though_several_ask_at_once(base):
    seen = on_ranks(lambda rank: open_dataset("shapes").images([0, 2999]).tobytes(), ranks=3)
    assert len(set(seen)) == 1
    assert not leftovers(base)
    verify(open_dataset("shapes", "val"))


def test_a_file_system_without_locks_is_no_hindrance(base, monkeypatch):
    monkeypatch.setattr("nanodiff.files.fcntl.flock", Mock(side_effect=OSError(errno.ENOTSUP, "no locks")))
    with DatasetWriter("toy", "abcde") as slow:
        slow.append("train", IMAGES, y=LABELS)
        write()  # another process is faster; the last to end leaves its set
    assert len(open_dataset("toy")) == 50
    assert not leftovers(base)


def test_classes_are_matched_by_name_or_numbers_by_order():
    assert match_labels(["b", "a"], ["a", "b", "c"], "x") == [1, 0]
    assert match_labels(["n01", "n02", "n03"], ["0", "1", "2"], "x") == [0, 1, 2]  # folders against a published model
    assert match_labels(["0", "1"], ["cat", "dog"], "x") == [0, 1]
    for names, known in (
        (["cat", "dog"], ["dog", "fox"]),
        (["n01", "n02"], ["0", "1", "2"]),
    ):
        refused("accepted: classes called", match_labels, names, known, "x")
