"""Mistakes get one line, and the output is whole or absent."""

import gzip
import os
import re
import runpy
import shlex
import signal
import sys
import time
from unittest import mock

import numpy as np
import pytest
from conftest import refused
from image_helpers import archive, chw, everything, idx, make_folder, prepare, report, write, write_cifar, write_mnist
from numpy.testing import assert_array_equal
from processes import FORK, Started

from nanodiff.data import dataset
from nanodiff.data.dataset import DatasetWriter, open_dataset, verify
from nanodiff.files import lock_file
from nanodiff.png import encode_png
from nanodiff.prepare.decode import Item
from nanodiff.prepare.parts import make_tasks
from nanodiff.prepare.sources import Source

pytestmark = pytest.mark.usefixtures("base")


def npz(tmp, **arrays):
    np.savez_compressed(tmp / "a.npz", **arrays)
    return tmp / "a.npz"


def bad_mnist(tmp, stem, data):
    write_mnist(tmp / "m")
    write(tmp / f"m/train-{stem}-ubyte.gz", gzip.compress(data))
    return tmp / "m"


def cifar(tmp, **options):
    write_cifar(tmp / "c.tar.gz", **options)
    return {"path": tmp / "c.tar.gz", "source": "cifar10"}


def cut(path, share=0.6):
    os.truncate(path, int(path.stat().st_size * share))
    return path


def sized(tmp, sizes):
    make_folder(tmp / "in", sizes=sizes)
    return tmp / "in"


def zipped(tmp, **tables):
    make_folder(tmp / "in")
    for name, text in tables.items():
        write(tmp / f"in/{name.replace('_', '.')}", text.encode())
    return archive(tmp / "in", "zip", tmp / "a.zip")


def middle(tmp):
    """A tar with a damaged header of the third of its files."""
    make_folder(tmp / "in")
    data = bytearray(archive(tmp / "in", "tar", tmp / "a.tar").read_bytes())
    headers = [i for i in range(0, len(data), 512) if data[i + 156 : i + 258 : 101] == b"0u"]
    third = headers[2]
    data[third + 124 : third + 126] = b"zz"
    return write(tmp / "a.tar", bytes(data))


def array(tmp, values, **settings):
    np.save(tmp / "a.npy", values)
    return {"path": tmp / "a.npy", **settings}


def vectors(tmp, **arrays):
    make_folder(tmp / "in")
    np.savez(tmp / "v.npz", **arrays)
    return {"path": tmp / "in", "vectors": tmp / "v.npz"}


FILES = [f"{name}/{i}.png" for name in ("cat", "dog") for i in range(4)]
IMAGES = np.zeros((4, 8, 8, 3), np.uint8)
ROW = '{"file": "a.png", "text": "c"}'
ZEROS = np.zeros((20, 8, 8), np.uint8)
MISTAKES = {  # what is prepared (a path, or settings), and what the line must say
    "unknown kind of file": (lambda t: write(t / "a.bin", b"abcdefgh"), "cannot tell"),
    "a shell's pattern": (lambda t: {"path": t / "{0..2}.tar"}, r"as 'web/\*.tar' for web/\{000..123\}.tar"),
    "range of a folder": (lambda t: {"path": sized(t, [(8, 8)]), "range": "0,1"}, "would hold no image"),
    "mixed sizes": (lambda t: sized(t, [(8, 8), (9, 9)]), r"cat/1\.png' is 9x9; .* one size, here 8x8"),
    "not square": (lambda t: sized(t, [(8, 9)]), "is 9x8; without prepare_data's --resolution"),
    "images in no class folder": (lambda t: write(sized(t, [(8, 8)]) / "loose.png", b"").parent, "class for 1 of 9"),
    "CIFAR-10 lacks a batch": (lambda t: cifar(t, leave_out=["data_batch_4.bin"]), r"lacks data_batch_4\.bin"),
    "tar.gz truncated": (lambda t: cut(archive(sized(t, [(8, 8)]), "tar.gz", t / "a.tar.gz")), "truncated"),
    "tar truncated": (lambda t: cut(archive(sized(t, [(8, 8)]), "tar", t / "a.tar")), "truncated"),
    "zip with odd labels": (lambda t: zipped(t, dataset_json='{"labels": [3]}'), "dataset.json is not a table"),
    "IDX magic": (lambda t: bad_mnist(t, "labels-idx1", bytes([0, 0, 13, 1] * 9)), "000008"),
    "IDX truncated": (lambda t: bad_mnist(t, "images-idx3", idx(ZEROS)[:-1]), "truncated"),
    "too few labels": (lambda t: bad_mnist(t, "labels-idx1", idx(ZEROS[:6, 0, 0])), r"6\] labels for \["),
    "two tables": (lambda t: zipped(t, metadata_csv="file,text\na.png,b", metadata_jsonl=ROW), "here and .* before"),
    "no images in an array": (lambda t: array(t, ZEROS[:0]), r"uint8 of shape \(0, 8, 8\)"),
    "npz without arr_0": (lambda t: npz(t, x=IMAGES), "has the arrays x; accepted: arr_0"),
    "labels of an unknown kind": (lambda t: {"path": sized(t, [(8, 8)]), "labels": "a.txt"}, "auto, folder, file"),
    "tar with a damaged header": (lambda t: middle(t), "damaged"),
    "labels=file of arrays": (lambda t: {"path": npz(t, arr_0=IMAGES), "labels": "file"}, "accepted: auto, none"),
    "NaN": (lambda t: array(t, np.full((4, 8, 8), np.nan)), "values from nan to nan"),
    "one value": (lambda t: array(t, np.ones((4, 8, 8))), "values from 1 to 1; accepted: finite ones"),
    "range upside down": (lambda t: array(t, np.ones((4, 8, 8)), range="1,0"), "accepted: two numbers LOW,HIGH"),
    "range of bytes": (lambda t: array(t, IMAGES, range="0,1"), "is for arrays and gray images beyond 8"),
    "range of nothing": (lambda t: array(t, np.eye(8)[None], range="5,9"), "from 0 to 1; accepted: .* LOW < HIGH"),
    "channels first": (lambda t: array(t, IMAGES.transpose(0, 3, 1, 2)), r"\(4, 3, 8, 8\); accepted: .*\(N, H, W, C\)"),
    "13 channels first": (lambda t: array(t, np.ones((8, 13, 16, 16))), "accepted: numbers of shape"),
    "images last": (lambda t: array(t, np.ones((8, 8, 3, 50), np.uint8)), r"\(8, 8, 3, 50\); accepted: numbers"),
    "no channels": (lambda t: array(t, np.ones((8, 16, 16, 0))), "accepted: numbers of shape"),
    "objects": (lambda t: array(t, np.full((2, 4, 4), "x", object)), "holds no numbers: .*objects"),
    "a volume": (lambda t: array(t, np.ones((9, 20, 32), np.uint8)), "'image 0' is 32x20; .* here 20x20"),
    "oblong arrays": (lambda t: array(t, np.eye(8, 6)[None]), "is 6x8; .* must be squares of one size"),
    "flat arrays": (lambda t: array(t, np.ones((4, 8))), r"accepted: numbers of shape \(N, H, W\)"),
    "a name missing": (lambda t: vectors(t, names=FILES[:1], vectors=np.ones((1, 2))), "none for 7 .* 'cat/1.png'"),
    "a name twice": (lambda t: vectors(t, names=["a"] * 2, vectors=np.ones((2, 2))), "1 different names for 2 vectors"),
    "integer vectors": (lambda t: vectors(t, names=["a"], vectors=np.ones((1, 2), int)), "int64 of shape"),
    "no vectors": (lambda t: vectors(t, names=["a"]), "vectors.*not a file in the archive"),
    "NaN in vectors": (lambda t: vectors(t, names=FILES, vectors=np.full((8, 2), np.nan)), "vectors hold NaN, inf"),
    "vectors of zeros": (lambda t: vectors(t, names=FILES, vectors=np.zeros((8, 2))), "nothing but zeros"),
    "vectors near 10,000": (lambda t: vectors(t, names=FILES, vectors=1e4 + np.eye(8)), "fp16 loses differences"),
    "names for an array": (lambda t: vectors(t, names=FILES, vectors=np.ones((8, 2))) | array(t, IMAGES), "8 names; "),
    "wide": (lambda t: np.save(t / "w.npy", IMAGES.repeat(3, 2)) or array(t, IMAGES, pairs=t / "w.npy"), "no image"),
    "labels of no image": (lambda t: npz(t, arr_0=IMAGES, labels=IMAGES[:0, 0, 0, 0]), "labels uint8 of shape"),
}  # fmt: skip


@pytest.mark.parametrize("what", MISTAKES)
def test_mistakes_are_one_line_and_leave_nothing(what, tmp_path, base):
    make, message = MISTAKES[what]
    made = make(tmp_path)
    settings = made if isinstance(made, dict) else {"path": made}
    refused(message, prepare, **settings)
    assert not (base / "data" / "toy").exists()
    keeps_parts = settings.keys() & {"vectors", "pairs", "range"} and what != "NaN in vectors"
    for p in base.glob("data/*"):
        assert p.suffix == ".lock" or keeps_parts


def test_a_missing_pillow_is_told_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    refused("pip install", prepare, tmp_path)


def test_arrays_are_cut_alike_with_and_without_a_resolution():
    items = [Item("", IMAGES[0], 0, False)] * 40_000
    for side in (0, 8):
        source = Source(40_000, [], iter(items))
        first = next(make_tasks(source, side))
        assert len(first) == 625  # 1/64


@pytest.mark.parametrize("name", ["two words", "a;b", "$(c)", "é"])
def test_an_odd_folder_gets_a_name_that_a_shell_takes(tmp_path, name):
    make_folder(tmp_path / name)
    line = prepare(tmp_path / name, name="")
    (made,) = [p.name for p in (tmp_path / "data").iterdir() if not p.name.startswith(".")]
    assert line.endswith(f" --data={made}")
    assert shlex.quote(made) == made


def test_the_same_command_says_that_a_set_is_complete(tmp_path, base, capsys):
    """And ends with 0; other settings, or files that changed since, are refused."""
    make_folder(tmp_path / "in")
    argv = ["prepare_data", f"--path={tmp_path / 'in'}", "--name=toy"]
    prepare(tmp_path / "in", workers=2)
    folder = base / "data" / "toy"
    before = {file.name: file.stat().st_mtime_ns for file in folder.iterdir()}

    def again(*more):
        with mock.patch("sys.argv", [*argv, *more]):
            runpy.run_module("scripts.prepare_data", run_name="__main__")

    with pytest.raises(SystemExit) as end:
        again()
    assert not end.value.code
    assert "data set 'toy' is complete: made by this command" in capsys.readouterr().out
    refused("exists already and is complete", again, "--val_fraction=0.5")
    (tmp_path / "in" / "cat" / "0.png").touch()
    refused("exists already and is complete", again)
    assert {file.name: file.stat().st_mtime_ns for file in folder.iterdir()} == before
    again("--overwrite")
    with pytest.raises(SystemExit):
        again()
    assert not [*(base / "data").glob(".toy.parts")]


@pytest.mark.slow
def test_a_killed_preparation_resumes_and_makes_the_same_set(tmp_path, base):
    make_folder(tmp_path / "in", classes=["a"], sizes=[(8, 8), (9, 8)], per_class=3)
    for i in range(3, 300):  # five parts, so that it is under way when the signal comes
        os.link(tmp_path / "in" / "a" / f"{i % 3}.png", tmp_path / "in" / "a" / f"{i}.png")
    args = f"--path={tmp_path / 'in'}", "--resolution=128"
    notes = lambda: list((base / "data").glob(".toy.parts/notes/0*"))
    first = Started("prepare_data", *args, "--name=toy", "--workers=2", context=FORK)
    while not notes() and first.codes() == [None]:
        time.sleep(0.002)
    first.kill()
    lock_file(base / "data" / ".toy.lock", "", wait=True).close()  # once the workers, which hold it too, are gone
    assert first.codes() == [-signal.SIGKILL]
    assert not (base / "data" / "toy").exists()
    assert 1 <= len(notes()) < 5, "it was not killed in time"
    refused("no data set 'toy'", open_dataset, "toy")
    prepare(tmp_path / "in", resolution=128, name="toy", overwrite=False)
    prepare(tmp_path / "in", resolution=128, name="whole", workers=3)
    files_of = lambda name: {file.name: file.read_bytes() for file in (base / "data" / name).glob("*.npy")}
    assert files_of("toy") == files_of("whole")
    assert open_dataset("toy").meta == open_dataset("whole").meta
    assert verify(open_dataset("toy"))
    for file in (base / "data").glob(".toy.*"):
        assert file.suffix == ".lock"


def test_parts_of_other_images_are_made_again(tmp_path, base, monkeypatch):
    arrays = make_folder(tmp_path / "in", per_class=70)

    def stop_at_the_end():
        with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
            patch.setattr(DatasetWriter, "_finish", lambda self: 1 / 0)
            patch.setattr(dataset, "print0", said.append)
            prepare(tmp_path / "in", val_fraction=0)

    said = []
    stop_at_the_end()
    assert re.search("finished parts are kept in .*toy.parts", said[-1])
    assert (base / "data" / ".toy.parts" / "notes" / "00002.json").is_file()
    parts = base / "data" / ".toy.parts"  # damaged ones are made again
    os.pwrite(os.open(parts / "train_images_00000_0.npy", os.O_WRONLY), b"~", 1000)
    (parts / "train_images_00001_0.npy").unlink()
    (parts / "notes" / "00002.json").write_text("{")
    prepare(tmp_path / "in", val_fraction=0)
    images, _ = everything()
    assert_array_equal(images, chw([arrays[k] for k in sorted(arrays)]))
    stop_at_the_end()
    changed = 255 - arrays["cat/0.png"]
    write(tmp_path / "in" / "cat" / "0.png", encode_png(changed))
    assert "other images or settings; starting again" in report(tmp_path / "in", val_fraction=0)
    images, _ = everything()
    assert (images[0] == changed.transpose(2, 0, 1)).all()


def test_some_classes_alone(tmp_path):
    """Their images in the order they had, numbered anew in the source's order, not that of the names given."""
    path = tmp_path / "in"
    make_folder(path, classes=["a", "b", "c"], per_class=6)
    prepare(path, labels="folder", name="whole", val_fraction=0.25)
    prepare(path, labels="folder", name="part", val_fraction=0.25, classes="c,a")
    assert open_dataset("part", "train").class_names == ["a", "c"]
    for split in ("train", "val"):
        images, labels = everything("whole", split)
        chosen, numbers = everything("part", split)
        assert_array_equal(chosen, images[labels != 1])
        assert_array_equal(2 * numbers, labels[labels != 1])
    settings = {"labels": "folder", "name": "none", "classes": "a,d"}
    refused("'d' is unknown; there are 3 classes; accepted: a, b, c", prepare, path, **settings)
    settings = {"labels": "folder", "name": "", "classes": "a"}
    refused("give this part of a set a --name of its own", prepare, path, **settings)
