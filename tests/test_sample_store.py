"""Parts drawn by any rank, after any kill, become the file that numpy.savez would have written."""

import json
import os
import signal

import numpy as np
import pytest
from conftest import refused
from processes import FORK, Started

from nanodiff.common import in_batches
from nanodiff.sampling.store import SampleStore

PROTOCOL = {"steps": 50, "guide": None, "cfg_interval": [0.0, 1.0]}
RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (23, 4, 5, 3), np.uint8)
LABELS = np.arange(23) % 7
PARTS = in_batches(np.arange(23), 4)


def make(tmp_path, protocol=PROTOCOL):
    return SampleStore(tmp_path / "a.npz", protocol, PARTS)


def draw(store, parts=None):
    """Write parts, by default those that are missing; returns their numbers."""
    parts = list(store.missing() if parts is None else parts)
    for k in parts:
        store.write(k, IMAGES[store.parts[k]])
    return parts


def finish(store):
    store.write_npz(LABELS)
    store.close()
    return store.output.read_bytes()


@pytest.fixture
def expected(tmp_path_factory):
    path = tmp_path_factory.mktemp("numpy") / "a.npz"
    np.savez(
        path,
        arr_0=IMAGES,
        arr_1=LABELS,
        labels=LABELS,
        protocol=json.dumps(PROTOCOL),
    )
    return path.read_bytes()


def test_images_of_another_protocol_are_never_mixed_nor_replaced(tmp_path, expected):
    other = make(tmp_path, PROTOCOL | {"steps": 25})
    other.open()
    draw(other)
    store = make(tmp_path)
    assert store.open() is False
    assert store.missing() == list(range(6))
    draw(store)
    assert finish(store) == expected
    assert other.missing() == []
    assert make(tmp_path).open() is True
    other = make(tmp_path, PROTOCOL | {"steps": 51})
    refused(r"a\.npz holds images of another protocol: choose another out, or remove it", other.open)
    (tmp_path / "a.npz").write_bytes(expected[:-9])
    refused(r"a\.npz is damaged", make(tmp_path).open)


def test_a_damaged_part_does_not_get_into_the_file(tmp_path):
    store = make(tmp_path)
    store.open()
    draw(store)
    part = store.path(1)
    data = part.read_bytes()
    image = IMAGES[store.parts[1]].tobytes()
    part.write_bytes(data.replace(image, image[:-1] + bytes([image[-1] ^ 1])))
    refused("000001.npz is damaged; remove it", store.write_npz, LABELS)
    assert not store.output.exists()
    part.unlink()
    assert draw(store) == [1]


def test_one_process_at_a_time(tmp_path):
    store = make(tmp_path)
    store.open()
    refused("another process is drawing the same images in ", make(tmp_path).open)
    (tmp_path / "file").touch()
    below = SampleStore(tmp_path / "file" / "a.npz", PROTOCOL, PARTS)
    refused("cannot write to .*file.*Not a directory; see out", below.open)


@pytest.mark.parametrize("moment", ["file", "rename", "end"])
def test_kill_9(tmp_path, expected, moment):
    """While the .npz is being written, before the rename, after it. Between parts: tests/test_sample.py."""

    def until_killed():
        store = make(tmp_path)
        kill = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)
        store.open()
        draw(store)
        if moment == "file":
            np.savez = kill
        elif moment == "rename":
            os.replace = kill
        else:
            store.close = kill
        finish(store)

    assert Started(until_killed, context=FORK).wait().returncode == -signal.SIGKILL
    assert (tmp_path / "a.npz").exists() == (moment == "end")
    store = make(tmp_path)
    assert store.open() == (moment == "end")
    if moment != "end":
        assert draw(store) == []
        finish(store)
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]
    assert store.output.read_bytes() == expected
