"""Parts drawn by any rank, after any kill, become the file that numpy.savez would have written."""

import argparse
import json
import os
import resource
import signal

import numpy as np
import pytest
from processes import FORK, Started

from nanodiff.common import UserError
from nanodiff.formats import sample_store
from nanodiff.sampling.store import SampleStore

PROTOCOL = {"steps": 50, "guide": None, "cfg_interval": [0.0, 1.0]}
IMAGES = np.random.default_rng(0).integers(0, 256, (23, 4, 5, 3), np.uint8)
LABELS = np.arange(23) % 7


def make(tmp_path, protocol=PROTOCOL, num_images=23, size=4):
    return SampleStore(tmp_path / "a.npz", protocol, num_images, size)


def draw(store, parts=None):
    """Write parts, by default those that are missing; returns their numbers."""
    parts = list(store.missing() if parts is None else parts)
    for k in parts:
        store.write(k, IMAGES[store.ids(k)])
    return parts


def finish(store):
    store.write_npz(LABELS)
    store.close()
    return store.output.read_bytes()


@pytest.fixture
def expected(tmp_path_factory):
    """What numpy writes."""
    path = tmp_path_factory.mktemp("numpy") / "a.npz"
    np.savez(path, arr_0=IMAGES, labels=LABELS, protocol=json.dumps(PROTOCOL))
    return path.read_bytes()


@pytest.mark.parametrize("world", [1, 3, 9])
def test_any_number_of_ranks_makes_the_file_of_numpy(tmp_path, expected, world):
    store = make(tmp_path)
    assert store.open() is False and store.num_drawn() == 0
    shares = [store.missing(rank, world) for rank in range(world)]
    assert sorted(k for share in shares for k in share) == store.missing() == list(range(6))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    for share in reversed(shares):
        draw(store, share)
    assert store.missing() == [] and store.num_drawn() == 23
    assert all((np.stack(store.first(n)) == IMAGES[:n]).all() for n in (9, 100))
    assert finish(store) == expected
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]


def test_corrupt_parts_are_drawn_again(tmp_path, expected):
    store = make(tmp_path)
    store.open()
    draw(store)
    whole = store.path(0).read_bytes()
    for k, data in enumerate((b"", whole[: len(whole) // 2], whole[:-1], whole[:100], b"garbage" * 9)):
        store.path(k).write_bytes(data)
    store.path(5).write_bytes(whole)  # a whole part, but of four images instead of three
    store.lock.close()
    store = make(tmp_path)
    store.open()
    with pytest.raises(UserError, match=r"000000\.npy is missing.*same file system"):
        store.write_npz(LABELS)
    assert draw(store) == [0, 1, 2, 3, 4, 5]
    assert finish(store) == expected


def test_another_protocol(tmp_path, capsys, expected):
    other = PROTOCOL | {"steps": 25, "seed": 1}
    store = make(tmp_path, other)
    store.open()
    draw(store)
    store.lock.close()
    # a grid's worth is dropped, and said
    store = make(tmp_path)
    assert store.open() is False and store.missing() == list(range(6))
    assert "23 images of another protocol (steps=25, now 50, seed=1, now None)" in capsys.readouterr().out
    assert draw(store) and finish(store) == expected
    os.unlink(tmp_path / "a.npz")
    # more is refused and kept
    many = np.zeros((200, 1, 1, 1), np.uint8)
    store = make(tmp_path, other, num_images=500, size=200)
    store.open()
    for k in range(2):
        store.write(k, many)
    store.lock.close()
    with pytest.raises(UserError, match=r"holds 400 images of another protocol \(steps=25, now 50, seed"):
        make(tmp_path).open()
    assert store.missing() == [2]
    (tmp_path / "a.npz").write_bytes(expected)  # finding this protocol's file is no reason to touch another's parts
    assert make(tmp_path).open() is True
    assert store.missing() == [2]


def test_what_is_there_already(tmp_path, expected):
    store = make(tmp_path)
    store.open()
    draw(store)
    store.write_npz(LABELS)
    store.lock.close()  # killed before it could clear away
    store = make(tmp_path)
    assert store.open() is True
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]
    with pytest.raises(UserError, match=r"a\.npz holds images of another protocol: choose another out"):
        make(tmp_path, PROTOCOL | {"steps": 51}).open()  # and finished work is not replaced
    assert (tmp_path / "a.npz").read_bytes() == expected
    for data in (b"", b"PK", expected[:-9], b"text"):  # whatever lay there is no reason to fail
        (tmp_path / "a.npz").write_bytes(data)
        store = make(tmp_path)
        assert store.open() is False
        store.lock.close()


def test_images_that_the_disk_has_no_room_for_are_refused_at_the_start(tmp_path, monkeypatch, capsys):
    """Parts and file exist together for a moment: 2 x 23 images of 1 MB, less those that are there."""
    monkeypatch.setattr(sample_store.shutil, "disk_usage", lambda path: argparse.Namespace(free=45e6))
    with pytest.raises(UserError, match="23 images need 46.0 MB of disk .*45.0 MB are free in .*: see num_images"):
        make(tmp_path).open(10**6)
    assert not list(tmp_path.iterdir())
    make(tmp_path).open(10**6 - 10**5)
    assert "23 images need 41.4 MB" in capsys.readouterr().out


def test_one_process_at_a_time(tmp_path):
    store = make(tmp_path)
    store.open()
    with pytest.raises(UserError, match="another process is sampling in .*; stop it or choose another out"):
        make(tmp_path, PROTOCOL | {"steps": 1}).open()
    draw(store)
    store.close()
    assert make(tmp_path).open() is False
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot write to .*file.*Not a directory; see out"):
        SampleStore(tmp_path / "file" / "a.npz", PROTOCOL, 1, 1).open()


@pytest.mark.parametrize("moment", ["part", "between", "file", "rename", "end"])
def test_kill_9(tmp_path, expected, moment):
    """While a part or the .npz is being written, between two parts, before the rename, after it."""

    def until_killed():
        store, kill = make(tmp_path), lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)
        store.open()
        if moment == "part":
            draw(store, range(2))
            os.fsync = kill
            draw(store, [2])
        draw(store, range(3))
        if moment == "between":
            kill()
        draw(store)
        if moment == "file":
            sample_store.np.lib.format.write_array = kill  # after arr_0
        elif moment == "rename":
            os.replace = kill
        else:
            store.close = kill
        finish(store)

    assert Started(until_killed, context=FORK).wait().returncode == -signal.SIGKILL
    assert (tmp_path / "a.npz").exists() == (moment == "end")
    assert bool(list(tmp_path.rglob(".000002.npy.*"))) == (moment == "part")  # half-written, and harmless
    store = make(tmp_path)
    assert store.open() == (moment == "end")
    if moment == "end":
        assert store.output.read_bytes() == expected
    else:
        assert draw(store) == {"part": [2, 3, 4, 5], "between": [3, 4, 5]}.get(moment, [])
        assert finish(store) == expected
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]


@pytest.mark.parametrize("limit, parts", [(200, 2), (800, 6)])  # bytes per file: too few for a part, for the .npz
def test_no_room_on_the_disk(tmp_path, limit, parts):
    (tmp_path / "a.npz").write_bytes(b"older")

    def without_room():
        store = make(tmp_path)
        store.open()
        draw(store, range(2))
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        with pytest.raises(OSError, match="File too large"):  # which common's excepthook reports in one line
            draw(store)
            finish(store)

    assert Started(without_room, context=FORK).wait().returncode == 0
    left = sorted(p.name for p in (tmp_path / ".a.npz.parts").iterdir())
    assert left == [".lock", *(f"{k:06d}.npy" for k in range(parts)), "protocol.json"]
    assert (tmp_path / "a.npz").read_bytes() == b"older"
