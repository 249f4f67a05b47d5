"""The same images and facts make the same set, however packed; what is not used is counted, what lacks is named."""

import csv
import io
import itertools
import json
import os
import tarfile
import tracemalloc
import zipfile

import numpy as np
import pytest
from conftest import refused
from image_helpers import archive, noise, prepare, report, write

from nanodiff.data.dataset import open_dataset, verify
from nanodiff.png import encode_png
from nanodiff.prepare.containers import open_folder, open_pattern
from nanodiff.prepare.sources import Options, open_source

pytestmark = pytest.mark.usefixtures("base")

NAMES = [f"{i:03d}" for i in range(60)]
LABELS = [str(i * 7 % 12) for i in range(60)]
CAPTIONS = [f"number {i} of größe {i % 5}" for i in range(60)]


def images(folder):
    for i, name in enumerate(NAMES):
        write(folder / f"{name}.png", encode_png(noise(8, 8, i)))
    return folder


def beside(folder):
    for name, label, caption in zip(NAMES, LABELS, CAPTIONS):
        write(folder / f"{name}.cls", label)
        write(folder / f"{name}.txt", caption + "\n")


def json_beside(folder):
    for name, label, caption in zip(NAMES, LABELS, CAPTIONS):
        facts = {"class": int(label), "caption": caption, "sha": 3}
        write(folder / f"{name}.json", json.dumps(facts))


def rows(*columns):
    files = [f"{name}.png" for name in NAMES]
    return [dict(zip(columns, row)) for row in zip(files, LABELS, CAPTIONS)]


def jsonl(folder):
    write(folder / "metadata.jsonl", "\n".join(map(json.dumps, rows("file_name", "label", "text"))))


def diffsynth(folder):
    write(folder / "metadata.json", json.dumps(rows("image", "label", "prompt")))


def table(folder):
    text = io.StringIO()
    writer = csv.DictWriter(text, ["size", "text", "file", "label"])
    writer.writeheader()
    writer.writerows(rows("file", "label", "text"))
    write(folder / "metadata.csv", text.getvalue())


def pack(folder, kind):
    """The folder itself, or a place that holds its files."""
    if kind == "folder":
        return folder
    if kind == "zip":
        return archive(folder, "zip", folder.parent / "all.zip")
    (folder.parent / "tars").mkdir()
    stems = sorted({file.stem for file in folder.iterdir()})
    suffix = kind[1:] if kind[:2] == "0." else ".tar"
    mode = suffix.lower().replace(".tar", "w").replace(".", ":")
    for k, some in enumerate(np.array_split(stems, 1 if kind[:1] == "0" else 3)):
        with tarfile.open(folder.parent / "tars" / f"{k}{suffix}", mode) as tar:
            for file in sorted(file for file in folder.iterdir() if file.stem in some):
                tar.add(file, file.name)
    return folder.parent / "tars" / kind


PACKED = [
    *itertools.product((beside, json_beside), ("folder", "0.tar", "zip", "", "*.tar")),
    *itertools.product((jsonl, diffsynth, table), ("folder", "0.tar", "0.tar.bz2", "0.TAR.XZ")),
]


def test_the_same_sixty_images_make_equal_bytes_however_they_are_packed(tmp_path):
    sets = []
    for number, (facts, kind) in enumerate(PACKED):
        folder = images(tmp_path / str(number) / "in")
        facts(folder)
        captions = tmp_path / f"{number}.tsv"
        out = report(pack(folder, kind), captions=captions, seed=3, resolution=8)
        assert "captions: 60 of 60" in out
        assert "ignored" not in out
        lines = captions.read_text().splitlines()
        assert lines == [f"{name}.png\t{caption}" for name, caption in zip(NAMES, CAPTIONS)]
        sets.append({file.name: file.read_bytes() for file in open_dataset("toy").path.iterdir()})
        assert sets[-1].pop("plan.json")
    for made in sets[1:]:
        assert made == sets[0]
    assert verify(open_dataset("toy"))[0] == 4
    drawn = [noise(8, 8, i).tobytes() for i in range(60)]
    for split, num in (
        ("train", 57),
        ("val", 3),
    ):
        data = open_dataset("toy", split)
        stored = data.images(range(num)).transpose(0, 2, 3, 1)
        numbers = [drawn.index(image.tobytes()) for image in stored]
        assert data.class_names == [str(i) for i in range(12)]
        assert data.labels(range(num)).tolist() == [int(LABELS[i]) for i in numbers]


@pytest.mark.parametrize("kind", ["", "*.tar"])
@pytest.mark.parametrize(
    "shards",
    [
        ("in1k-train-0000", "in1k-train-0001", "in1k-validation-00"),
        ("train", "train.1", "val"),
        ("train/0", "train/1", "val/0"),
        ("train/train-0", "train/train-1", "val/val-0"),
    ],
)
def test_splits_in_the_names_of_shards_are_obeyed(tmp_path, kind, shards):
    images(tmp_path / "in")
    beside(tmp_path / "in")
    for k, shard in enumerate(shards):
        path = tmp_path / "tars" / f"{shard}.tar"
        path.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(path, "w") as tar:
            for name in NAMES[20 * k : 20 * k + 20]:
                for suffix in (".cls", ".png"):
                    tar.add(tmp_path / "in" / f"{name}{suffix}", f"{name}{suffix}")
    if kind and "/" in shards[0]:
        kind = "*/*.tar"
    report(tmp_path / "tars" / kind, resolution=8)
    for split, num in (("train", 40), ("val", 20)):
        assert len(open_dataset("toy", split)) == num


def test_names_in_a_zip_are_in_utf8_even_if_it_does_not_say_so(tmp_path):
    """As macOS writes them; others are in cp437."""
    for name in ("f\u00e9e".encode(), "f\u00e9e".encode("cp437")):
        stand_in = b"x" * len(name)
        with zipfile.ZipFile(tmp_path / "a.zip", "w") as file:
            file.writestr(f"{stand_in.decode()}/1.png", encode_png(noise(8, 8)))
        packed = (tmp_path / "a.zip").read_bytes()
        (tmp_path / "a.zip").write_bytes(packed.replace(stand_in, name))
        assert open_source("zip", str(tmp_path / "a.zip"), Options(labels="folder")).class_names == ["f\u00e9e"]


def test_what_macos_adds_beside_tars_is_no_tar(tmp_path):
    tarfile.open(tmp_path / "0.tar", "w").close()
    (tmp_path / "._0.tar").write_bytes(b"macOS")
    paths, _ = open_folder(tmp_path)
    assert paths == [str(tmp_path / "0.tar")]


def test_a_table_names_files_with_any_spaces(tmp_path):
    names = ("my  photo.png", "3.00\u202fPM.png")
    for name in names:
        write(tmp_path / name, encode_png(noise(8, 8)))
    write(tmp_path / "metadata.csv", "file_name,label\n" + "".join(f"{name},a  b\n" for name in names))
    source = open_source("folder", str(tmp_path), Options())
    assert source.class_names == ["a b"]
    assert source.num_images == 2


def test_a_tar_named_like_a_pattern_is_that_tar(tmp_path):
    for name in ("s[1].tar", "s1.tar"):
        tarfile.open(tmp_path / name, "w").close()
    paths, _ = open_pattern(tmp_path / "s[1].tar")
    assert paths == [str(tmp_path / "s[1].tar")]


@pytest.mark.parametrize("kind", ["folder", "0.tar", ""])
def test_what_lacks_is_named_and_what_is_not_used_counted(tmp_path, kind):
    folder = images(tmp_path / "a" / "in")
    beside(folder)
    (folder / "017.cls").unlink()
    (folder / "018.txt").unlink()
    for name in ("0.xml", "003.xml", "README", "005.npy", ".DS_Store", "._003.png"):  # macOS leaves the last two
        write(folder / name, "")
    path = pack(folder, kind)
    refused(r"no class for 1 of 60 images, such as '017\.png' .*takes second images\)", prepare, path)
    out = report(path, labels="none")
    assert "ignored: 59 .cls, 2 .xml, " in out
    for ignored in (".npy", ".DS_Store", "README"):
        assert f"1 {ignored}" in out
    assert "captions: 59 of 60 images have one" in out
    if kind == "0.tar":
        write(path.parent / "labels.csv", "")
        assert "ignored: 1 files beside the tars" in report(path.parent, labels="none")
    if kind == "folder":
        (path / "linked").symlink_to(path)
        assert "linked: it is read under another name" in report(path, labels="none")


def test_columns_by_name(tmp_path):
    folder = images(tmp_path / "train")
    lines = "".join(f"{n}.png,a{n[2]},w{n}\n" for n in NAMES)
    write(folder / "metadata.csv", "file_name,split,words\n" + lines)
    out = report(tmp_path)
    assert "metadata.csv: columns read: file_name; not used: split, words" in out
    assert "unlabelled, as the table has no classes" in out
    assert "captions:" not in out
    columns = {"label_column": "split", "caption_column": "words"}
    prepare(tmp_path, **columns, captions=tmp_path / "out.tsv")
    assert open_dataset("toy").class_names == [f"a{i}" for i in range(10)]
    assert (tmp_path / "out.tsv").read_text().startswith("train/000.png\tw000\ntrain/001.png\tw001\n")
    (tmp_path / "out.tsv").write_text("better")
    assert "is there already and stays as it is" in report(tmp_path, **columns, captions=tmp_path / "out.tsv")
    assert (tmp_path / "out.tsv").read_text() == "better"
    for setting in ("label_column", "caption_column"):
        refused(f"{setting}='labl': .* has none in a table or beside", prepare, tmp_path, **{setting: "labl"})
    (folder / "metadata.csv").unlink()
    lines = "".join(f"train/{n}.png\tb, {n[2]}\n" for n in NAMES)
    write(tmp_path / "a.tsv", "file\tlabel\n" + lines)
    assert "b, 9 6" in report(tmp_path, labels=tmp_path / "a.tsv")
    refused("captions='x.tsv': .* has none in a table or beside an image", prepare, tmp_path, captions="x.tsv")


@pytest.mark.parametrize("kind", ["folder", "zip", "tar"])
def test_names_as_windows_macos_and_webdataset_write_them(tmp_path, kind):
    png = encode_png(noise(8, 8))
    folder = tmp_path / "in"
    for name in ("caf\u00e9\\a.x.png", "cafe\u0301\\b.png", "cat\\c.png", "cat\\c.seg.png"):
        write(folder / name, png)
    write(folder / "caf\u00e9\\a.text.txt", "words")
    path = folder if kind == "folder" else archive(folder, kind, tmp_path / f"a.{kind}")
    os.mkfifo(folder / "pipe.png")  # reading it would wait for ever
    out = report(path, captions=tmp_path / "out.tsv", val_fraction=0)
    assert open_dataset("toy").class_names == ["caf\u00e9", "cat"]
    assert "keys" not in out
    assert "caf\u00e9/a.x.png\twords\n" in (tmp_path / "out.tsv").read_text()
    assert ("1 .png (a link or no file, over 64 MB, or packed" in out) == (kind == "folder")


@pytest.mark.parametrize("kind", ["folder", "zip", "tar"])
def test_files_of_one_name_and_names_in_other_codes_are_said(tmp_path, kind):
    png = encode_png(noise(8, 8))
    folder = tmp_path / "in"
    for name in ("a/caf\u00e9.png", "a/cafe\u0301.png", "a/x.png", "caf\udce9/y.png"):
        write(folder / name, png)
    path = folder
    if kind == "zip":  # which holds no such names
        with zipfile.ZipFile(tmp_path / "a.zip", "w") as z:
            for name in ("a/1.png", "a\\1.png", "a/2.png", "caf?/y.png"):
                z.writestr(zipfile.ZipInfo(name), png)
        path = tmp_path / "a.zip"
    elif kind == "tar":
        path = archive(folder, kind, tmp_path / "a.tar")
    out = report(path, val_fraction=0)
    assert "ignored: 1 under a name that is there twice\n" in out
    assert "  all 3 images: a 2, caf? 1\n" in out
    assert open_dataset("toy").class_names == ["a", "caf?"]


def test_what_a_table_leaves_open_is_refused(tmp_path):
    folder = images(tmp_path / "in")
    for second, line in (
        ({"conditioning_image": "001.png"}, "no class for 60 of 60 images, such as '001.png' .*--pairs"),
        ({"text": ["x", "y"]}, r"text of an image is .\['x', 'y'\].; accepted: one text or number"),
        ({"label": [1.0, 0.0]}, r"label of an image is '\[1.0, 0.0\]'"),
    ):
        write(folder / "metadata.jsonl", json.dumps({"file_name": "000.png", "text": "a"} | second))
        refused(line, prepare, folder)
    write(folder / "metadata.json", json.dumps({f"{n}.png": {"caption": "kohya's"} for n in NAMES}))
    (folder / "metadata.jsonl").unlink()
    assert "captions: 60 of 60" in report(folder)


@pytest.mark.parametrize("code", ["utf-16", "utf-16-le", "latin-1"])
def test_tables_in_codes_other_than_utf8_are_refused_and_captions_skipped(tmp_path, code):
    folder = images(tmp_path / "in")
    write(tmp_path / "a.csv", "file,label\n003.png,größe\n".encode(code))
    refused(r"a\.csv is in .*accepted: UTF-8", prepare, folder, labels=tmp_path / "a.csv")
    write(folder / "003.txt", "größe".encode(code))
    assert "skipped 1 unreadable files (see skipped.txt): '003.txt': 003.txt is in" in report(folder)


def peak_mb(tmp_path, num):
    """Of memory that Python holds while the members of a tar are listed and read."""
    file = tmp_path / f"{num}.tar"
    with tarfile.open(file, "w") as shard:
        for i in range(num):
            for suffix, content in (
                (".cls", b"%d" % (i % 10)),
                (".png", bytes(200)),
                (".txt", b"a caption"),
            ):
                info = tarfile.TarInfo(f"{i:08d}{suffix}")
                info.size = len(content)
                shard.addfile(info, io.BytesIO(content))
            shard.members.clear()
    tracemalloc.start()
    assert sum(1 for _ in open_source("tar", str(file), Options()).items) == num
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak / 1e6


def test_many_small_members_take_no_more_memory(tmp_path):
    few = peak_mb(tmp_path, 200)
    many = peak_mb(tmp_path, 1000)
    assert many < few + 0.024  # 30 bytes an image; names alone would take twice that
