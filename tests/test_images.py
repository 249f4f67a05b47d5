"""Images in folders and archives come out as they went in, or by the published crop; unreadable files are skipped."""

import io
import json
import os
import struct
import tarfile
import zipfile
from unittest import mock

import numpy as np
import pytest
from image_helpers import archive, chw, everything, make_folder, noise, prepare, reference_crop, report

from nanodiff.common import UserError
from nanodiff.data import decode as image_decode
from nanodiff.data.archives import Options, classify, val_mask
from nanodiff.data.dataset import open_dataset
from nanodiff.data.decode import decode
from nanodiff.data.sources import open_source
from nanodiff.png import encode_png

Image = pytest.importorskip("PIL.Image", reason="Pillow reads image files")


@pytest.fixture(autouse=True)
def base(tmp_path, monkeypatch):
    monkeypatch.setenv("NANODIFF_BASE_DIR", str(tmp_path / "base"))
    return tmp_path / "base"


@pytest.mark.parametrize("shape", [(16, 16), (40, 24), (33, 71), (10, 12), (64, 64), (16, 100), (150, 131)])
def test_crop_is_that_of_adm(shape):
    array = noise(*shape)
    found = decode(encode_png(array), [[16, 16]])[0].transpose(1, 2, 0)
    np.testing.assert_array_equal(found, reference_crop(Image.fromarray(array), 16))


def test_folder_of_classes_and_the_held_out_share(tmp_path):
    arrays = make_folder(tmp_path / "in", per_class=10)
    ordered = chw([arrays[k] for k in sorted(arrays)])
    line = prepare(tmp_path / "in", val_fraction=0)
    assert "20 train images, 3x8x8, 2 classes" in line and "--data=toy" in line
    assert str(open_dataset("toy").path) in line and open_dataset("toy").class_names == ["cat", "dog"]
    images, labels = everything()
    np.testing.assert_array_equal(images, ordered)
    assert labels.tolist() == [0] * 10 + [1] * 10
    with pytest.raises(UserError, match="no split 'val'"):
        open_dataset("toy", "val")
    prepare(tmp_path / "in", val_fraction=0.25, seed=4)
    mask = val_mask(20, Options(val_fraction=0.25, seed=4))
    assert mask.sum() == 5 and not np.array_equal(mask, val_mask(20, Options(val_fraction=0.25, seed=5)))
    np.testing.assert_array_equal(everything()[0], ordered[~mask])
    np.testing.assert_array_equal(everything(split="val")[0], ordered[mask])


@pytest.mark.parametrize("kind", ["tar.gz", "tar", "tar.xz", "zip"])
@pytest.mark.parametrize("prefix", ["", "./", "outer/"])
def test_archives_hold_the_same_as_their_folder(tmp_path, kind, prefix):
    for split in ("train", "test"):
        make_folder(tmp_path / "in" / split)
    (tmp_path / "in" / "README.md").write_text("not an image")
    (tmp_path / "in" / "train" / "cat" / "._0.png").write_text("what macOS leaves")
    prepare(tmp_path / "in", name="folder")
    prepare(archive(tmp_path / "in", kind, tmp_path / f"a.{kind}", prefix if kind != "zip" or prefix != "./" else ""))
    for split in ("train", "val"):
        pairs = [sorted((i.tobytes(), y) for i, y in zip(*everything(name, split))) for name in ("folder", "toy")]
        assert len(pairs[0]) == 8 and pairs[0] == pairs[1]


@pytest.mark.parametrize("resolution", [0, 5])
def test_output_does_not_depend_on_the_number_of_workers(tmp_path, resolution, monkeypatch):
    monkeypatch.setattr(image_decode, "CHUNK_BYTES", 16 * 3 * 128**2)  # several chunks
    make_folder(tmp_path / "in", per_class=40)
    (tmp_path / "in" / "cat" / "3.png").write_bytes(b"broken")
    shards = {}
    for workers in (1, 2, 3):
        prepare(tmp_path / "in", workers=workers, resolution=resolution)
        shards[workers] = open_dataset("toy").meta["splits"]  # with the hashes of all files
    assert shards[1] == shards[2] == shards[3]


def test_colours_of_all_kinds_become_rgb(tmp_path):
    gray3, rgb = noise(8, 8)[..., :1], noise(8, 8, 1)
    gray = gray3[..., 0]
    deep = gray.astype(np.uint16) * 257
    folder = tmp_path / "in"
    folder.mkdir()
    Image.fromarray(gray).save(folder / "a.png")
    Image.fromarray(deep).save(folder / "b.png")  # 16 bit
    Image.fromarray(rgb).convert("CMYK").save(folder / "c.tif")
    palette = Image.fromarray(rgb).quantize(200)
    palette.save(folder / "d.gif")
    Image.fromarray(np.dstack([rgb, (255 * (gray3 > 99)).astype(np.uint8)])).save(folder / "e.png")  # laid on white
    Image.fromarray(gray > 99).save(folder / "f.png")  # 1 bit
    frames = [Image.fromarray(gray), Image.fromarray(255 - gray)]
    frames[0].save(folder / "g.gif", save_all=True, append_images=frames[1:])  # the first frame
    prepare(folder, val_fraction=0)
    images, _ = everything()
    on_white = np.where(gray3 > 99, rgb, 255)
    expected = [gray3, gray3, rgb, palette.convert("RGB"), on_white, 255 * (gray3 > 99), gray3]
    expected = [np.broadcast_to(np.asarray(e), (8, 8, 3)) for e in expected]
    np.testing.assert_array_equal(images, chw(expected))
    assert open_dataset("toy").num_classes == 0


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(orientation):
    from PIL import ImageOps

    image = Image.fromarray(noise(8, 16))
    exif = image.getexif()
    exif[0x0112] = orientation
    image.save(file := io.BytesIO(), "PNG", exif=exif)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(file.getvalue()))))
    np.testing.assert_array_equal(decode(file.getvalue(), [])[0].transpose(1, 2, 0), expected)


def encode(image, format):
    image.save(file := io.BytesIO(), format)
    return file.getvalue()


def test_unreadable_files_are_skipped_and_counted(tmp_path, monkeypatch):
    """Also headers of billions of pixels, and PostScript, for which Pillow would start Ghostscript."""
    from PIL import EpsImagePlugin

    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *args, **kwargs: pytest.fail("a program was started"))
    small, png = Image.new("L", (8, 8)), encode_png(noise(8, 8))
    jpeg, gif = bytearray(encode(small, "JPEG")), bytearray(encode(small, "GIF"))
    at = jpeg.index(b"\xff\xc0") + 5
    jpeg[at : at + 4] = struct.pack(">HH", 60_000, 60_000)
    gif[6:10] = struct.pack("<HH", 60_000, 60_000)
    files = {"bomb.jpg": jpeg, "bomb.gif": gif, "bomb.png": png[:16] + struct.pack(">II", 60_000, 60_000) + png[24:]}
    files |= {"empty.jpg": b"", "text.jpg": b"<html>404</html>", "cut.png": png[: len(png) // 2]}
    files |= {"strip.png": encode_png(noise(1, 60_000)), "eps.png": encode(small, "EPS")}
    arrays = make_folder(tmp_path / "in")
    for name, data in files.items():
        (tmp_path / "in" / "cat" / name).write_bytes(data)
    (tmp_path / "in" / "cat" / "link.png").symlink_to("nowhere")
    os.mkfifo(tmp_path / "in" / "cat" / "pipe.png")
    source = open_source("folder", str(tmp_path / "in"), Options(64))
    assert sum(len(block[0]) for block in source.blocks) == len(arrays)
    assert {line.split("'")[1].split("/")[1] for line in source.skipped} == {*files, "link.png", "pipe.png"}
    with pytest.raises(UserError, match="a pipe or a device"):
        open_source("auto", str(tmp_path / "in" / "cat" / "pipe.png"), Options())


def test_a_tar_that_leads_elsewhere(tmp_path):
    """Names with .. and from the root are classes like others, and nothing is written there; links are no images."""
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for i, name in enumerate(["../../evil/0.png", "/etc/evil/1.png", "a/../../b/2.png", "good/3.png"]):
            info = tarfile.TarInfo(name)
            info.size = len(data := encode_png(np.full((8, 8, 3), i, np.uint8)))
            tar.addfile(info, io.BytesIO(data))
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE):
            info = tarfile.TarInfo("good/link.png")
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
    before = sorted(tmp_path.iterdir())
    prepare(tmp_path / "a.tar", val_fraction=0)
    images, labels = everything()
    names = open_dataset("toy").class_names
    assert {int(image[0, 0, 0]): names[label] for image, label in zip(images, labels)}[3] == "good"
    assert sorted(tmp_path.iterdir()) == sorted([*before, tmp_path / "base"])
    assert sorted(p.name for p in (tmp_path / "base").rglob("*")) == sorted(
        ["data", ".toy.lock", "toy", "meta.json", "train_images_000.npy", "train_labels.npy"]
    )


SPLITS = ["train/a/1.png", "train/b/x/2.png", "val/a/3.png", "test/a/4.png"]
FLAT = ["cat_2.png", "dog_1.png", "dog_3_x.png"]


@pytest.mark.parametrize(
    "names, labels, strip, class_names, numbers, is_val",
    [
        (SPLITS, "auto", False, ["a", "b"], [0, 1, 0], [False, False, True]),  # val/ goes before test/
        (SPLITS, "none", False, [], [0, 0, 0], [False, False, True]),
        (["set/train/a/1.png", "set/test/a/2.png"], "auto", True, ["a"], [0, 0], [False, True]),
        (["only/1.png", "only/2.png"], "auto", True, ["only"], [0, 0], None),  # one class is fine
        (["train/a/1.png"], "auto", False, ["a"], [0], None),  # no held-out folder
        (["a\x1b[2J/1.png"], "auto", False, ["a?[2J"], [0], None),
        (FLAT, "auto", False, [], [0, 0, 0], None),
        (FLAT, "file", False, ["cat", "dog"], [0, 1, 1], None),
        (FLAT[:2], {"cat_2.png": "10", "dog_1.png": "9"}, False, ["9", "10"], [1, 0], None),  # numbers in their order
        (["Training/a/1.png", "Testing/a/2.png"], "auto", False, ["a"], [0, 0], [False, True]),
        (["images/1.png", "images/2.png"], "auto", False, [], [0, 0], None),
        (["images/train/a/1.png", "images/Val/b/2.png"], "auto", False, ["a", "b"], [0, 1], [False, True]),
    ],
)
def test_classify(names, labels, strip, class_names, numbers, is_val):
    kept, *found = classify(names, labels, strip)
    assert kept == names[: len(numbers)]
    assert [x if x is None else list(x) for x in found] == [class_names, numbers, is_val]


def test_a_split_alone_is_no_class():
    with pytest.raises(UserError, match="is no class"):
        classify(["cat/1.png", "Test/2.png"], "auto", strip=False)


def test_edm_zip(tmp_path):
    arrays = {f"00000/img{i:08d}.png": noise(8, 8, i) for i in range(4)}
    for table, classes in (([[k, i % 3] for i, k in enumerate(arrays)], 3), (None, 0)):
        with zipfile.ZipFile(tmp_path / "edm.zip", "w") as z:
            for k, a in arrays.items():
                z.writestr(k, encode_png(a))
            z.writestr("dataset.json", json.dumps({"labels": table}))
        prepare(tmp_path / "edm.zip", val_fraction=0)
        np.testing.assert_array_equal(everything()[0], chw(arrays.values()))
        assert open_dataset("toy").num_classes == classes
        assert everything()[1].tolist() == ([0, 1, 2, 0] if classes else [0] * 4)


LABELS = {"0.png": "owl", "x/1.png": "bat", "2.png": "owl"}
TABLES = {  # the same in each form
    "a.csv": "file,label\n0.png,owl\nx/1.png,bat\n./2.png,owl\nabsent.png,eel\n",
    "a.jsonl": "".join(json.dumps({"file": file, "label": label}) + "\n" for file, label in LABELS.items()),
    "a.json": json.dumps(LABELS),
    "b.json": json.dumps({"labels": list(LABELS.items())}),
}


@pytest.mark.parametrize("name", TABLES)
def test_labels_from_a_table(tmp_path, name):
    (tmp_path / "in" / "x").mkdir(parents=True)
    for i, file in enumerate(("0.png", "2.png", "x/1.png")):  # sorted by name
        (tmp_path / "in" / file).write_bytes(encode_png(noise(8, 8, i)))
    (tmp_path / name).write_text(TABLES[name])
    out = report(tmp_path / "in", labels=str(tmp_path / name), val_fraction=0)
    assert ("1 labels have no file" in out) == (name == "a.csv")
    assert open_dataset("toy").class_names == ["bat", "owl"] and everything()[1].tolist() == [1, 1, 0]
    (tmp_path / "in" / "3.png").write_bytes(encode_png(noise(8, 8)))
    with pytest.raises(UserError, match=r"lacks 1 of 4 images, such as '3\.png'"):
        prepare(tmp_path / "in", labels=str(tmp_path / name))
    for wrong in ("0.png\n[1", "[" * 9999):
        (tmp_path / name).write_text(wrong)
        with pytest.raises(UserError, match="not of the form"):
            prepare(tmp_path / "in", labels=str(tmp_path / name))


@pytest.mark.parametrize(("low", "high"), [(0, 255), (0, 65535), (-1000, 3000), (0, 10**9)])
def test_integers_are_scaled_by_their_range(low, high):
    array = np.linspace(low, high, 64).astype(np.int32).reshape(8, 8)
    Image.fromarray(array).save(file := io.BytesIO(), "TIFF")
    found = decode(file.getvalue(), [])[0][0]
    np.testing.assert_allclose(found, np.linspace(0, 255, 64).reshape(8, 8), atol=1)


def test_an_unreadable_pick_does_not_cost_the_validation_split(tmp_path):
    make_folder(tmp_path / "in", classes=["a"], per_class=10)
    pick = np.flatnonzero(val_mask(10, Options()))[0]
    (tmp_path / "in" / "a" / f"{pick}.png").write_bytes(b"broken")
    prepare(tmp_path / "in")
    assert len(open_dataset("toy", "train")) == 8 and len(open_dataset("toy", "val")) == 1


def test_what_was_understood_is_printed(tmp_path):
    make_folder(tmp_path / "in", sizes=[(8, 8), (20, 20)])
    (tmp_path / "in" / "cat" / "bad.png").write_bytes(b"broken")
    out = report(tmp_path / "in", resolution=16)
    assert "classes: cat 4, dog 4\n" in out and "enlarged 4 images" in out and "skipped 'cat/bad.png'" in out
    assert "cat/bad.png" in (open_dataset("toy").path / "skipped.txt").read_text()


def test_tasks_are_bounded_by_bytes(tmp_path, monkeypatch):
    """One large image per task, however many follow, and none is decoded that does not fit the first."""
    make_folder(tmp_path / "in", sizes=[(100, 100)], classes=["a"])
    monkeypatch.setattr(image_decode, "CHUNK_BYTES", 3 * 100**2)
    found = []
    run = lambda function, tasks, workers: (found.append(len(task[1])) or function(task) for _, task in tasks)
    with mock.patch.object(image_decode, "ordered_map", run):
        assert sum(len(block[0]) for block in open_source("folder", str(tmp_path / "in"), Options()).blocks) == 4
    assert found == [1] * 4
    monkeypatch.setattr(image_decode, "MAX_SIDE", 99)
    with pytest.raises(UserError, match="above 99 pixels"):
        list(open_source("folder", str(tmp_path / "in"), Options()).blocks)
