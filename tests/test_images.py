"""Images in folders and archives come out as they went in, or by the published crop; unreadable files are skipped."""

import errno
import gzip
import io
import json
import os
import resource
import tracemalloc
import zipfile

import numpy as np
import pytest
from conftest import refused
from image_helpers import archive, chw, everything, make_folder, noise, prepare, reference_crop, report, write
from numpy.testing import assert_array_equal
from PIL import Image, ImageOps
from processes import FORK, run_process

from nanodiff.data.dataset import open_dataset
from nanodiff.png import encode_png
from nanodiff.prepare import decode as decoding
from nanodiff.prepare.decode import aspect_ratio, decode
from nanodiff.prepare.labels import Place, classify, val_mask

pytestmark = pytest.mark.usefixtures("base")


@pytest.mark.parametrize(
    "shape",
    [
        (16, 16),
        (33, 71),
        (10, 12),
        (64, 64),
        (150, 131),
    ],
)
def test_crop_is_that_of_adm(shape):
    array = noise(*shape)
    found = decode(encode_png(array), [[16, 16]])[0]
    expected = reference_crop(Image.fromarray(array), 16)
    assert_array_equal(found.transpose(1, 2, 0), expected)


def test_folder_of_classes_and_the_held_out_share(tmp_path):
    arrays = make_folder(tmp_path / "in", per_class=10)
    ordered = chw([arrays[k] for k in sorted(arrays)])
    prepare(tmp_path / "in", val_fraction=0)
    images, labels = everything()
    assert_array_equal(images, ordered)
    assert labels.tolist() == [0] * 10 + [1] * 10
    assert open_dataset("toy").class_names == ["cat", "dog"]
    refused("no split 'val'", open_dataset, "toy", "val")
    prepare(tmp_path / "in", val_fraction=0.25, seed=4)
    mask = val_mask(labels, 0.25, seed=4)
    assert mask.sum() == 5
    assert not np.array_equal(mask, val_mask(labels, 0.25, seed=5))
    assert_array_equal(everything()[0], ordered[~mask])
    assert_array_equal(everything(split="val")[0], ordered[mask])
    for share in (0.1, 0.5, 0.9):  # never the last image of a class
        classes = np.array([0, 1, 1, 2] + 9 * [3])
        training = classes[~val_mask(classes, share, seed=4)]
        assert {*training} == {0, 1, 2, 3}


def test_colours_of_all_kinds_become_rgb(tmp_path):
    gray = noise(8, 8)[..., :1]
    rgb = noise(8, 8, 1)
    bright = gray > 99
    palette = Image.fromarray(rgb).quantize(200)
    alpha = 255 * bright.astype(np.uint8)
    pictures = {  # name: what is saved, what it is
        "a.png": (gray[..., 0], gray),
        "b.png": (gray[..., 0].astype(np.uint16) * 257, gray),
        "c.tif": (Image.fromarray(rgb).convert("CMYK"), rgb),
        "d.gif": (palette, np.asarray(palette.convert("RGB"))),
        "e.png": (np.dstack([rgb, alpha]), np.where(bright, rgb, 255)),
        "f.png": (bright[..., 0], 255 * bright),
    }
    (tmp_path / "in").mkdir()
    expected = []
    for name, (picture, array) in pictures.items():
        if isinstance(picture, np.ndarray):
            picture = Image.fromarray(picture)
        picture.save(tmp_path / "in" / name)
        expected.append(np.broadcast_to(array, (8, 8, 3)))
    first = Image.fromarray(gray[..., 0])
    second = Image.fromarray(255 - gray[..., 0])
    first.save(tmp_path / "in" / "g.gif", save_all=True, append_images=[second])
    expected.append(np.broadcast_to(gray, (8, 8, 3)))
    prepare(tmp_path / "in", val_fraction=0)
    images, _ = everything()
    assert_array_equal(images, chw(expected))
    assert open_dataset("toy").num_classes == 0


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(orientation, kind):
    image = Image.fromarray(noise(8, 16))
    exif = image.getexif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    image.save(file, kind, exif=exif)
    data = file.getvalue()
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    found = decode(data, [])[0]
    assert_array_equal(found.transpose(1, 2, 0), expected)
    assert aspect_ratio(data) == expected.shape[1] / expected.shape[0]


def test_unreadable_files_are_skipped_and_named(tmp_path):
    """Also in an archive, whose files have no path; a program in PostScript is text to us, whatever it is called. Of a
    damaged PNG, Pillow shows the part before the damage to whom asks twice."""
    arrays = make_folder(tmp_path / "in")
    png = encode_png(noise(8, 8))
    large = bytearray(encode_png(noise(128, 128)))
    large[len(large) // 2] ^= 0x55
    files = {
        "empty.jpg": b"",
        "text.jpg": b"<html>404</html>",
        "cut.png": png[: len(png) // 2],
        "flipped.png": bytes(large),
    }
    files["eps.jpg"] = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n"
    for name, data in files.items():
        (tmp_path / "in" / "cat" / name).write_bytes(data)
    Image.fromarray(np.full((8, 8), 0.5, np.float32)).save(tmp_path / "in" / "cat" / "float.tif")
    for path in (tmp_path / "in", archive(tmp_path / "in", "tar.gz", tmp_path / "a.tar.gz")):
        out = report(path, resolution=16, val_fraction=0)
        assert len(everything()[0]) == len(arrays)
        skipped = (open_dataset("toy").path / "skipped.txt").read_text().splitlines()
        reasons = dict(line.replace("'", "").removeprefix("cat/").split(": ", 1) for line in skipped)
        assert reasons.keys() == {*files, "float.tif"}
        assert "PNG" in reasons["text.jpg"]
        assert "unknown" in reasons["float.tif"]
        assert reasons["eps.jpg"] == reasons["text.jpg"]
        assert "  all 14 images: cat 10, dog 4\n" in out
        assert "skipped 6 unreadable" in out
        assert "enlarged, as smaller than the resolution: 8 images" in out


FAULTS = [
    MemoryError(),
    OSError(errno.EIO, "no luck"),
    OSError(errno.ESTALE, "no luck"),
    OSError(errno.EMFILE, "no luck"),
    OSError(errno.EACCES, "no luck"),
]


@pytest.mark.parametrize("buckets", [False, True])
@pytest.mark.parametrize("fault", FAULTS, ids=repr)
def test_a_fault_of_the_machine_ends_the_preparation(tmp_path, monkeypatch, fault, buckets):
    """It names the file, if the archive's member is known; rerun, the same command takes all images."""
    arrays = make_folder(tmp_path / "in")
    open_image = decoding.open_image

    def failing(payload):
        if str(payload).endswith("dog/2.png"):
            raise fault
        return open_image(payload)

    settings = {"resolution": 16, "val_fraction": 0, "aspect_buckets": buckets}
    culprit = "an image" if buckets else "dog/2.png"
    with monkeypatch.context() as patch, pytest.raises(OSError, match=culprit) as error:
        patch.setattr(decoding, "open_image", failing)
        prepare(tmp_path / "in", **settings)
    assert error.value.errno == getattr(fault, "errno", errno.ENOMEM)
    prepare(tmp_path / "in", **settings)
    assert len(everything()[0]) == len(arrays)


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="a file that no read succeeds on: Linux only")
def test_a_disk_that_fails_is_no_damaged_image(tmp_path):
    make_folder(tmp_path / "in")
    (tmp_path / "in" / "zz.png").symlink_to("/proc/self/mem")
    with pytest.raises(OSError, match=r"zz\.png") as error:
        prepare(tmp_path / "in", labels="none", resolution=16)
    assert error.value.errno == errno.EIO


def test_what_images_lose_is_counted(tmp_path):
    """Bits beyond 8, frames after the first, transparency; an image that loses nothing is in no count."""
    deep = (np.arange(64, dtype=np.uint16) * 1000).reshape(8, 8)
    frames = [Image.fromarray(noise(8, 8, i)) for i in range(3)]
    clear = Image.fromarray(noise(8, 8)).convert("RGBA")
    clear.putpixel((0, 0), (9, 9, 9, 0))
    (tmp_path / "in").mkdir()
    frames[0].save(tmp_path / "in" / "plain.png")
    for name in ("deep.png", "deep.tif", "deep.pgm"):
        Image.fromarray(deep).save(tmp_path / "in" / name)
    write(tmp_path / "in" / "deep.ppm", b"P6 8 8 65535\n" + noise(8, 16).tobytes())
    for name in ("frames.gif", "frames.webp", "frames.tif"):
        frames[0].save(tmp_path / "in" / name, save_all=True, append_images=frames[1:])
    for name in ("clear.png", "clear.webp"):
        clear.save(tmp_path / "in" / name, lossless=True)
    for background, value in (
        ("white", 255),
        ("black", 0),
    ):
        out = report(tmp_path / "in", val_fraction=0, background=background)
        assert "16 bits cut to the upper 8 (--range=0,65535 keeps those of gray images): 4 images\n" in out
        assert "first of several frames: 3 images\n" in out
        assert f"transparency became {background}: 2 images\n" in out
        images, _ = everything()
        assert (images[:2, :, 0, 0] == value).all()


def test_sprites_scaled_by_nearest_keep_their_pixels(tmp_path):
    """Each pixel becomes 3 x 3 equal ones, in colours of the palette; in the archive alike."""
    sprite = Image.fromarray(noise(8, 8)).quantize(5)
    (tmp_path / "in").mkdir()
    sprite.save(tmp_path / "in" / "a.png")
    report(tmp_path / "in", resolution=24, scaling="nearest", val_fraction=0)
    expected = np.asarray(sprite.convert("RGB")).repeat(3, 0).repeat(3, 1)
    assert_array_equal(everything()[0], chw([expected]))


def test_values_that_fill_little_of_their_range_are_named(tmp_path):
    deep = np.linspace(0, 4095, 64).astype(np.uint16).reshape(8, 8)
    (tmp_path / "in").mkdir()
    for factor in (1, 16):
        Image.fromarray(factor * deep).save(tmp_path / "in" / "a.png")
        out = report(tmp_path / "in", val_fraction=0)
        assert ("nearly black, no value above 63 of 255" in out) == (factor == 1)


SPLITS = ["train/a/1.png", "train/b/x/2.png", "Val/a/3.png", "test/a/4.png"]
FLAT = ["cat_2.png", "dog_1.png", "dog_3_x.png"]


@pytest.mark.parametrize(
    "names, labels, class_names, numbers, splits",
    [
        (SPLITS, "folder:1", ["a", "b"], [0, 1, 0], ["train", "train", "val", None]),  # val/ goes before test/
        (["set/train/a/1.png", "set/test/a/2.png"], "auto", ["a"], [0, 0], ["train", "val"]),
        (["set/train/a/1.png", "set/test/a/2.png", "set/3.png"], "auto", ["a"], [0, 0], ["train", "val", None]),
        (["set/10/1.png", "set/9/2.png"], "auto", ["9", "10"], [1, 0], ["", ""]),  # numbers in their order
        (["only/1.png", "only/2.png"], "auto", ["only"], [0, 0], ["", ""]),  # one class is fine
        (["train/a/1.png"], "auto", ["a"], [0], [""]),  # no held-out folder
        (
            ["cat/train/1.png", "cat/test/2.png", "dog/train/3.png"],
            "auto",
            ["cat", "dog"],
            [0, 0, 1],
            ["train", "val", "train"],
        ),
        (FLAT, "auto", [], [0, 0, 0], [""] * 3),
        (FLAT, "file", ["cat", "dog"], [0, 1, 1], [""] * 3),
    ],
)
def test_classify(names, labels, class_names, numbers, splits):
    places = []
    for name in names:
        folders = os.path.dirname(name).split("/")
        label = name.split("_")[0] if labels == "file" else ""
        places.append(Place(("", *folders), label, name))
    assert classify(places, labels) == class_names
    assert [place.split for place in places] == splits
    assert [place.number for place in places if place.split is not None] == numbers


def test_edm_zip(tmp_path):
    arrays = {f"00000/img{i:08d}.png": noise(8, 8, i) for i in range(4)}
    for table, classes, numbers in (
        ([[k, i % 3] for i, k in enumerate(arrays)], 3, [0, 1, 2, 0]),
        (None, 0, [0, 0, 0, 0]),
    ):
        with zipfile.ZipFile(tmp_path / "edm.zip", "w") as z:
            for k, a in arrays.items():
                z.writestr(k, encode_png(a))
            z.writestr("dataset.json", json.dumps({"labels": table}))
        prepare(tmp_path / "edm.zip", val_fraction=0)
        images, labels = everything()
        assert_array_equal(images, chw(arrays.values()))
        assert open_dataset("toy").num_classes == classes
        assert labels.tolist() == numbers


CSV = {
    "plain": "0.png,owl\nx/1.png,bat\n./2.png,owl\n",
    "twice the same": "0.png,owl\nx/1.png,bat\n2.png,owl\n2.png,owl\n",
    "header": "file,label\n0.png,owl\nx/1.png,bat\n2.png,owl\nabsent.png,eel\n",
    "columns by name": "width,label,file\n8,owl,0.png\n8,bat,x/1.png\n8,owl,2.png\n",
}
WRONG_CSV = {
    "0.png,owl\n2.png,bat\n0.png,bat": r"a\.csv, line 3: '0\.png' has \('bat', .* here and \('owl', .* before",
    "0.png,owl\n2.png, ": r"no class for 2 of 3 images, such as 'x/1\.png'",
    "0.png,owl\n2.png, \nx/1.png,": r"no class for 2 of 3 images, such as '2\.png'",
    "file,label\n0.png,owl, brown": "line 2: found '0.png,owl,brown'",
    "0.png|owl": r"no class for 3 of 3 images, .*a row of the table: '0\.png\|owl'",
    "owl,0.png": "no class for 3 of 3 images, .*a row of the table: 'owl'",
    ",owl": "line 1: found ',owl'; accepted: rows of file,class",
    "file,label,label\n0.png,owl,bat": "line 1: found 'file,label,label'",
    "in/0.PNG,owl\n2.png,owl": r"for 2 of 3 images, such as '0\.png' .* a row of the table: 'in/0\.PNG'",
}


def test_labels_from_a_table(tmp_path):
    three = tmp_path / "in"
    file = tmp_path / "a.csv"
    for i, name in enumerate(("0.png", "2.png", "x/1.png")):  # sorted by name
        write(three / name, encode_png(noise(8, 8, i)))
    for what, text in CSV.items():
        file.write_text(text)
        out = report(three, labels=str(file), val_fraction=0)
        assert ("has no file for 1 of the table's rows" in out) == (what == "header")
        assert open_dataset("toy").class_names == ["bat", "owl"]
        assert everything()[1].tolist() == [1, 1, 0]
    for text, line in WRONG_CSV.items():
        file.write_text(text)
        refused(line, prepare, three, labels=str(file))


def peak_mb(path):
    """Of the memory of a process that prepares this at 256 pixels."""

    def work():
        prepare(path, resolution=256, val_fraction=0)
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)

    return int(run_process(work, context=FORK).stdout.split()[-1])


def test_small_files_of_many_pixels_or_bytes_take_little_memory(tmp_path):
    """A line of 75 bytes; zeros that a zip packs into little."""
    write(tmp_path / "in" / "a.png", encode_png(noise(8, 8)))
    plain = peak_mb(tmp_path / "in")
    Image.new("1", (10_000, 1)).save(tmp_path / "in" / "line.png", optimize=True)
    assert peak_mb(tmp_path / "in") < plain + 200
    skipped = (open_dataset("toy").path / "skipped.txt").read_text()
    assert "10000x1 pixels, too thin for 256x256" in skipped
    packed = archive(tmp_path / "in", "zip", tmp_path / "a.zip")
    with zipfile.ZipFile(packed, "a", zipfile.ZIP_DEFLATED) as z:
        z.writestr("bomb.png", bytes(300 * 2**20))
    assert peak_mb(tmp_path / "a.zip") < plain + 200


def test_what_archives_decompress_is_limited_whatever_they_claim(tmp_path):
    """200 MB of zeros that claim to be 1,000 bytes; packed by a method that zipfile has no limit for; behind an IDX
    file's images."""
    zeros = bytes(200 * 2**20)
    for method in (zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2):
        with zipfile.ZipFile(tmp_path / f"{method}.zip", "w", method, compresslevel=1) as z:
            z.writestr("a.png", encode_png(noise(8, 8)), zipfile.ZIP_STORED)
            z.writestr("bomb.png", zeros)
            z.getinfo("bomb.png").file_size = 1000
    idx_header = bytes([0, 0, 8, 3, *(0, 0, 0, 8) * 3])
    write(tmp_path / "idx.gz", gzip.compress(idx_header + zeros, 1))
    (tmp_path / "12.npz").write_bytes((tmp_path / "12.zip").read_bytes())
    tracemalloc.start()
    refused("8.zip is damaged .*CRC", prepare, tmp_path / "8.zip")
    assert "1 .png (a link or no file, over 64 MB, or packed by bzip2" in report(tmp_path / "12.zip")
    refused("idx.gz is damaged", prepare, tmp_path / "idx.gz")
    refused("12.npz is packed by bzip2 or LZMA", prepare, tmp_path / "12.npz")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**26
