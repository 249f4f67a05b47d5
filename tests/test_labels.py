"""Classes, splits and captions are those that a person would read from the layout, or a line asks; never others."""

import json
import tarfile
from collections import Counter

import numpy as np
import pytest
from conftest import refused
from image_helpers import archive, make_folder, noise, prepare, report, write

from nanodiff.data.dataset import open_dataset
from nanodiff.png import encode_png
from nanodiff.prepare.labels import split_of
from nanodiff.prepare.sources import Options, open_source

pytestmark = pytest.mark.usefixtures("base")

KINDS = ["folder", "zip", "tar"]


def spread(*folders, count=3):
    return [f"{folder}/{i}.jpg" for folder in folders for i in range(count)]


def read(path, kind="folder", **settings):
    """(class or "", is for validation) -> number of images."""
    source = open_source(kind, str(path), Options(**settings))
    names = source.class_names or [""]
    return dict(Counter((names[item.label], item.is_val) for item in source.items))


def pack(root, names, kind):
    for name in names:
        write(root / "in" / name, b"")
    return root / "in" if kind == "folder" else archive(root / "in", kind, root / f"a.{kind}")


def two(first, second, train=3, val=3):
    counts = {
        (first, False): train,
        (second, False): train,
        (first, True): val,
        (second, True): val,
    }
    return {key: count for key, count in counts.items() if count}


CAT_DOG = two("cat", "dog")
ALONE = two("cat", "dog", val=0)
LAYOUTS = {  # files, and what they are
    "plain": (spread("cat", "dog"), ALONE),
    "one class": (spread("cat"), {("cat", False): 3}),
    "Brain MRI": (spread("Training/cat", "Training/dog", "Testing/cat", "Testing/dog"), CAT_DOG),
    "Intel scenes": (
        spread(*(f"seg_{s}/seg_{s}/{c}" for s in ("train", "test") for c in ("cat", "dog")), "seg_pred/seg_pred"),
        CAT_DOG,
    ),
    "Fruits-360": (
        spread(*(f"f/fruits-360/{s}/{c}" for s in ("Training", "Test") for c in ("cat", "dog")), "f/fruits-360/test-x"),
        CAT_DOG,
    ),
    "Tiny-ImageNet": (spread("t/train/cat/images", "t/train/dog/images", "t/val/images", "t/test/images"), ALONE),
    "ImageNet": (spread(*(f"ILSVRC/Data/CLS-LOC/{s}" for s in ("train/cat", "train/dog", "val", "test"))), ALONE),
    "YOLO": (spread("train/images", "valid/images"), {("", False): 3, ("", True): 3}),
    "COCO": (spread("coco/train2017", "coco/val2017"), {("", False): 3, ("", True): 3}),
    "cats and dogs": (
        spread(*(f"{s}_set/{s}_set/{c}" for s in ("training", "test") for c in ("cat", "dog"))),
        CAT_DOG,
    ),
    "Cassava": (spread("train_images", "test_images"), {("", False): 3, ("", True): 3}),
    "classes above splits": (spread(*(f"{c}/{s}" for c in ("cat", "dog") for s in ("train", "valid"))), CAT_DOG),
    "wrappers": (spread("two/a/b/cat", "two/a/b/dog"), ALONE),
    "a level between": (spread("cat/scan/raw", "dog/scan/raw"), ALONE),
    "an unlabelled test": (spread("train/cat", "train/dog", "test"), ALONE),
    "three splits": (
        spread(*(f"{s}/{c}" for s in ("train", "dev", "test", "val") for c in ("cat", "dog"))),
        CAT_DOG,
    ),
    "classes called training shoes": (
        spread("training shoes", "test tubes"),
        two("test tubes", "training shoes", val=0),
    ),
    "train alone": (spread("train/cat", "train/dog"), ALONE),
    "a class called train": (
        spread(*(f"{s}/{c}" for s in ("train", "test") for c in ("bus", "train"))),
        two("bus", "train"),
    ),
    "a class called like the folder around all": (
        spread(*(f"face/{s}/{c}" for s in ("train", "test") for c in ("face", "none"))),
        two("face", "none"),
    ),
    "train twice, no classes": (spread("train/train", "test/test"), {("", False): 3, ("", True): 3}),
    "a class called test": (
        spread(*(f"in/{s}/{c}" for s in ("train", "test") for c in ("bus", "test"))),
        two("bus", "test"),
    ),
}
ASKED = {  # files, and what the line names
    "patients": (
        spread("p0/benign", "p0/malignant", "p1/benign"),
        r"--labels=folder:1 \(p0, p1\), --labels=folder:2 \(benign, malignant\), --labels=none",
    ),
    "sites in splits": (
        spread(*(f"{s}/{p}/ill" for s in ("train", "val") for p in "ab"), "train/a/well"),
        r"folder:2 \(ill, well\)",
    ),
    "a folder packed into itself": (spread("x/cat", "x/dog", "x/x/cat", "x/x/dog"), r"folder:2 \(, cat, dog\)"),
    "kinds of classes": (spread("pet/cat", "farm/cow"), r"folder:1 \(farm, pet\), --labels=folder:2 \(cat, cow\)"),
    "some folders in folders": (spread("cat", "cat/old", "dog"), r"folder:1 \(cat, dog\), --labels=folder:2 \(, old\)"),
    "ADE20K": (spread(*(f"{k}/{s}" for k in ("images", "annotations") for s in ("training", "validation"))), "--pairs"),
    "images and masks": (spread("data/images", "data/masks"), r"folder:1 \(images, masks\), .*--pairs"),
    "images of classes and masks": (
        spread("images/cat", "images/dog", "masks/cat", "masks/dog"),
        "--pairs has second images",
    ),
    "CycleGAN": (spread("trainA", "trainB", "testA", "testB"), "--pairs"),
    "VOC": (spread("VOC2012/JPEGImages", "VOC2012/SegmentationClass"), "--pairs"),
    "MVTec": (spread("bottle/train/good", "cable/train/x", "cable/test/x", "bottle/test/bad"), "folder:2"),
    "a loose image": ([*spread("set/cat", "set/dog"), "set/0.jpg"], "no class for 1 of 7 images, such as 'set/0.jpg'"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_classes_are_those_of_the_layout(tmp_path, capsys, layout, kind):
    """Or fewer, where validation images have no class; all images are counted in what is printed."""
    names, expected = LAYOUTS[layout]
    path = pack(tmp_path, names, kind)
    assert read(path, kind) == expected
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    numbers = [line[line.index("images:") - 1] for line in lines]
    assert sum(map(int, numbers)) == len(names)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ASKED)
def test_a_layout_of_two_meanings_is_asked_for(tmp_path, layout, kind):
    names, line = ASKED[layout]
    path = pack(tmp_path, names, kind)
    refused(line, read, path, kind)
    assert read(path, kind, labels="none").keys() <= {("", False), ("", True)}


def test_each_level_of_folders_can_be_taken(tmp_path):
    path = pack(tmp_path, spread("x/p0/benign", "x/p0/ill", "x/p1/benign"), "folder")
    assert read(path, labels="folder:1") == {("p0", False): 6, ("p1", False): 3}
    assert read(path, labels="folder:2") == {("benign", False): 6, ("ill", False): 3}
    refused("gives no class for 9 of 9", read, path, labels="folder:3")
    flat = pack(tmp_path / "b", spread("coco/train2017", "coco/val2017"), "folder")
    refused("gives no class for 6 of 6", read, flat, labels="folder")
    refused("accepted: auto, folder, .*folder:2", read, path, labels="folder:9")


def test_what_is_left_out_is_named(tmp_path, capsys):
    path = pack(tmp_path, spread("train/a", "train/b", "val/a", "val/fox", "test/a"), "folder")
    assert read(path) == {("a", False): 3, ("a", True): 3, ("b", False): 3}
    lines = capsys.readouterr().out.splitlines()[1:]  # behind a note of equal names
    assert lines[1:3] == ["  train 6 images: a 3, b 3", "  val 3 images: a 3"]
    assert lines[3].startswith("  left out")
    assert "fox 3" in lines[3]
    assert "test/a 3" in lines[3]


def test_images_that_are_left_out_are_not_held_out(tmp_path):
    """Kaggle's unlabelled test images beside labelled training images."""
    path = pack(tmp_path, [*spread("train/a", "train/b", count=20), *spread("test", count=60)], "folder")
    for fraction, held_out in ((0.05, 2), (0.6, 24)):
        counts = read(path, val_fraction=fraction)
        assert sum(count for (_, is_val), count in counts.items() if is_val) == held_out
        assert sum(counts.values()) == 40


def test_folders_of_equal_files_may_be_pairs(tmp_path, capsys):
    """Two with the same names are noted, as photos beside drawings of them would look so; others are not."""
    assert read(pack(tmp_path / "a", spread("photo", "sketch"), "folder")) == two("photo", "sketch", val=0)
    assert "note: photo, sketch have as many files of the same names" in capsys.readouterr().out
    for number, folders in enumerate([["cat", "dog", "cow"], ["cat"]]):
        read(pack(tmp_path / str(number), spread(*folders), "folder"))
        assert "same names" not in capsys.readouterr().out


def test_splits_are_whole_names():
    names = (
        "Train training train2017 train_set seg_train TRAIN_images",
        "val valid Validation val_2",
        "test Testing test1",
    )
    for split, words in zip(("train", "val", "test"), names):
        assert {split_of(name) for name in words.split()} == {split}
    others = ["trainers", "training shoes", "attest", "testA", "value", "deviation", "test-multiple_fruits", "seg", ""]
    assert {split_of(name) for name in others} == {""}


def shards(folder, *tars):
    """Tars with these members in this order; a .txt holds its name."""
    for number, names in enumerate(tars):
        with tarfile.open(folder / f"{number}.tar", "w") as tar:
            for name in names:
                content = encode_png(noise(8, 8)) if "jpg" in name else name
                tar.add(write(folder / "files" / name, content), name)
    return folder / "*.tar"


NAMES = [f"{i:02d}" for i in range(6)]
JPG = [f"{name}.jpg" for name in NAMES]
TXT = [f"{name}.txt" for name in NAMES]
CLS = [f"{name}.cls" for name in NAMES]
PAIRS = [name for pair in zip(TXT, JPG) for name in pair]


@pytest.mark.parametrize(
    "tars",
    [
        [JPG + TXT],
        [TXT + JPG],
        [JPG + CLS],
        [[*JPG[:3], *PAIRS[6:], *TXT[:3]]],
        [JPG, TXT],
        [TXT, JPG],
        [PAIRS[:6] + JPG[3:], TXT[3:]],
        [["cat.0.jpg", "cat.1.txt", "dog.0.jpg", "cat.1.jpg", "cat.0.txt"]],
    ],
)
def test_files_of_a_sample_that_are_apart_are_refused(tmp_path, tars):
    """Never fewer captions or classes than there are."""
    refused("tar --sort=name", read, shards(tmp_path, *tars), "tar")


def test_files_apart_that_nobody_asked_for_are_ignored(tmp_path):
    path = shards(tmp_path, [f"a/{name}" for name in JPG + TXT])
    assert read(path, "tar", labels="folder", val_fraction=0) == {("a", False): 6}


@pytest.mark.parametrize(
    "tars",
    [
        [PAIRS[::-1]],
        [PAIRS[6:] + PAIRS[:6]],
        [PAIRS, PAIRS],  # as the tars of several classes
        [["README.txt", *PAIRS]],
        [["cat.0.jpg", "dog.0.jpg", "cat.1.jpg", "dog.1.jpg"]],  # keys come back, but nothing belongs to them
    ],
)
def test_tars_may_have_any_order_of_samples(tmp_path, tars):
    source = open_source("tar", str(shards(tmp_path, *tars)), Options())
    items = list(source.items)
    assert len(items) == sum(name.endswith("jpg") for tar in tars for name in tar)
    for item in items:
        if "." not in item.name.removesuffix(".jpg"):
            assert item.caption == item.name.replace("jpg", "txt")


BAD_SIDES = {
    "3.txt": "the dog\u2019s ball".encode("cp1252"),
    "3.json": b'{"label": ["a", "b"], "caption": {"text": "a dog"}}',
    "2.json": b'{"caption": ',
    "3.cls": "größe".encode("latin-1"),
    "metadata.csv": "größe,b,c\n1,2,3,4,5\n".encode("latin-1"),
}


@pytest.mark.parametrize("labels", ["folder", "none", "folder:1"])
@pytest.mark.parametrize("name", BAD_SIDES)
def test_files_beside_that_nobody_asked_for_end_no_preparation(tmp_path, name, labels):
    make_folder(tmp_path / "in")
    write(tmp_path / "in" / "dog" / name, BAD_SIDES[name])
    out = report(tmp_path / "in", labels=labels, val_fraction=0)
    assert len(open_dataset("toy")) == 8
    assert name.split(".")[1] in out


@pytest.mark.parametrize("name", ["3.txt", "2.json", "3.json"])
def test_bad_captions_are_counted_and_named(tmp_path, name):
    make_folder(tmp_path / "in")
    write(tmp_path / "in" / "dog" / "1.txt", "a dog")
    write(tmp_path / "in" / "dog" / name, BAD_SIDES[name])
    out = report(tmp_path / "in", labels="folder", captions=tmp_path / "out.tsv")
    assert "captions: 1 of 8 images have one" in out
    assert "skipped 1 unreadable files" in out
    assert f"ignored: 1 unreadable {name[1:]}" in out
    assert f"'dog/{name}': " in (open_dataset("toy").path / "skipped.txt").read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_suffixes_in_any_case(tmp_path, kind):
    names = [f"{i}.{suffix}" for i in range(6) for suffix in ("JPG", "CLS", "TXT")]
    for name in names:
        write(tmp_path / "in" / name, name[0])
    path = tmp_path / "in" if kind == "folder" else archive(tmp_path / "in", kind, tmp_path / f"a.{kind}")
    if kind != "folder":
        path = path.rename(tmp_path / f"A.{kind.upper()}")
    source = open_source("auto", str(path), Options())
    assert source.class_names == [*"012345"]
    assert sorted(item.caption for item in source.items) == [*"012345"]
    table = write(tmp_path / "b" / "Metadata.CSV", "file,label\n0.JPG,x\n")
    write(table.parent / "0.JPG", b"")
    assert read(table.parent) == {("x", False): 1}
    assert read(table.parent, labels=str(table)) == {("x", False): 1}


@pytest.mark.parametrize(
    "column",
    [
        "filename",
        "path",
        "image_id",
        "id",
        "Image",
        "file_name",
        "picture",
    ],
)
@pytest.mark.parametrize("suffix", [".jpg", ""])
def test_files_of_a_table_by_any_usual_column_with_or_without_suffix(tmp_path, capsys, column, suffix):
    lines = [json.dumps({column: f"a/{i}{suffix}", "y": i}) for i in range(4)]
    rows = "".join(f"{i},a/{i}{suffix},{'xy'[i % 2]},8\n" for i in range(4))
    table = write(tmp_path / "t.csv", f",{column}, Label, width\n{rows}")
    path = pack(tmp_path, spread("a", count=4), "folder")
    settings = {"file_column": "Picture"} if column == "picture" else {}
    assert read(path, labels=str(table), **settings) == two("x", "y", train=2, val=0)
    assert "not used: , width\n" in capsys.readouterr().out
    table = write(tmp_path / "t.jsonl", "\n".join(lines))
    settings = {"file_column": column} if column in ("Image", "picture") else {}
    assert len(read(path, labels=str(table), label_column="y", **settings)) == 4


def test_integers_that_pandas_wrote_as_floats_are_classes_by_number(tmp_path):
    path = pack(tmp_path, spread("a", count=12), "folder")
    table = write(tmp_path / "t.csv", "file,label\n" + "".join(f"a/{i}.jpg,{i}.0\n" for i in range(12)))
    assert open_source("folder", str(path), Options(labels=str(table))).class_names == [str(i) for i in range(12)]


@pytest.mark.parametrize("comma", [",", ";"])
def test_tables_of_spreadsheets(tmp_path, comma):
    """With blanks around the columns' names, and semicolons, as where the comma is the decimal point."""
    rows = [["file ", " label "], ["a/0.jpg", '"x, w"'], ["a/1.jpg", "y"], ["a/2.jpg", "z"]]
    path = pack(tmp_path, spread("a"), "folder")
    for lines in (rows, rows[1:]):
        table = write(tmp_path / "t.csv", "\n".join(map(comma.join, lines)))
        assert open_source("folder", str(path), Options(labels=str(table))).class_names == ["x, w", "y", "z"]


def test_empty_columns_of_a_spreadsheet_hide_no_header_and_no_surplus_cell(tmp_path):
    path = pack(tmp_path, spread("a"), "folder")
    lines = [f"a/{i}.jpg,640,{label},," for i, label in enumerate("xyz")]
    table = write(tmp_path / "t.csv", "\n".join(["file_name,width,label,,", *lines]))
    assert open_source("folder", str(path), Options(labels=str(table))).class_names == [*"xyz"]
    write(table, "file,label\na/0.jpg,x, y,\n")
    refused("line 2: found 'a/0.jpg,x,y'; accepted: rows of file,class", read, path, labels=str(table))


def test_an_image_without_a_row_of_captions_is_named(tmp_path):
    path = pack(tmp_path, spread("a"), "folder")
    table = write(tmp_path / "t.csv", "file,text\na/0.jpg,x\na/1.jpg,y\n")
    refused("no class for 3 of 3 images, such as 'a/2.jpg'", read, path, labels=str(table))


@pytest.mark.parametrize("stem", ["{}_{}", "{}.{}"])
def test_the_start_of_a_files_name_is_its_class(tmp_path, stem):
    names = [f"{stem.format(name, i)}.jpg" for name in ("cat", "dog") for i in range(3)]
    source = open_source("folder", str(pack(tmp_path, names, "folder")), Options(labels="file"))
    assert source.class_names == ["cat", "dog"]


def test_a_header_without_a_known_file_column_is_no_row(tmp_path):
    path = pack(tmp_path, spread("a"), "folder")
    for column in ("label", "caption"):
        table = write(tmp_path / "t.csv", f"image_name,{column}\na/0.jpg,x\na/1.jpg,y\na/2.jpg,z\n")
        refused("a --file_column", read, path, labels=str(table))
        assert sum(read(path, labels=str(table), file_column="image_name").values()) == 3


@pytest.mark.parametrize("second", [".mask.png", "_mask.png"])
@pytest.mark.parametrize("kind", ["folder", "tar"])
def test_several_images_of_a_sample_are_told(tmp_path, capsys, kind, second):
    names = [f"a/{i}{suffix}" for i in range(4) for suffix in (".jpg", second)]
    assert read(pack(tmp_path, names, kind), kind) == {("a", False): 8}
    assert "note: 4 images share another's name up to a dot or _mask" in capsys.readouterr().out
    read(pack(tmp_path / "b", spread("a", count=12), kind), kind)
    assert "note" not in capsys.readouterr().out


def test_a_split_column_is_obeyed(tmp_path, capsys):
    splits = ["train", "train", "Validation", "test", "val", ""]
    path = pack(tmp_path, spread("a", count=6), "folder")
    rows = "".join(f"{i}.jpg,x,{split}\n" for i, split in enumerate(splits))
    write(path / "a" / "metadata.csv", "file,label,split\n" + rows)
    assert read(path, val_fraction=0.5) == {("x", False): 2, ("x", True): 2}
    assert "left out" in capsys.readouterr().out
    rows = "".join(f"{i}.jpg,x,{i}\n" for i in range(6))
    write(path / "a" / "metadata.csv", "file,label,split\n" + rows)
    assert read(path) == {("x", False): 6}
    assert "columns read: file, label; not used: split" in capsys.readouterr().out
    for splits, name in (
        (3 * ["test", ""], "test"),
        (3 * ["train", "holdout"], "train"),
    ):
        rows = "".join(f"{i}.jpg,x,{split}\n" for i, split in enumerate(splits))
        write(path / "a" / "metadata.csv", "file,label,split\n" + rows)
        read(path)
        assert f"the table's split is not used: it has {name} alone" in capsys.readouterr().out
    rows = "".join(f"{i}.jpg,y,x\n" for i in range(6))
    write(path / "a" / "metadata.csv", "file,class,label\n" + rows)
    assert read(path) == {("x", False): 6}
    assert read(path, label_column="class") == {("y", False): 6}
    assert "columns read: file, label; not used: class" in capsys.readouterr().out
    refused("file_column='f': .* has none", read, pack(tmp_path / "b", ["0.jpg"], "folder"), file_column="f")
    path = pack(tmp_path / "c", spread("cat"), "folder")
    write(path / "metadata.csv", "id,split\ncat/0,train\ncat/1,train\ncat/2,val\n")
    assert read(path, labels="folder") == {("cat", False): 2, ("cat", True): 1}


def test_an_image_above_the_splits_of_the_others_is_left_out(tmp_path, capsys):
    path = pack(tmp_path, ["x/0.jpg", *spread("x/train/cat", "x/train/dog", "x/val/cat")], "folder")
    names = [file.relative_to(path).as_posix() for file in path.rglob("*.jpg")]
    write(path / "metadata.csv", "\n".join(["file,split", *(f"{name},train" for name in names)]))
    assert read(path, labels="folder") == {("cat", False): 3, ("dog", False): 3, ("cat", True): 3}
    assert "left out, no split or no training image of a class: 1 images" in " ".join(capsys.readouterr().out.split())


def test_classes_are_chosen_by_quoted_names_and_numbers(tmp_path):
    make_folder(tmp_path / "in", classes=["tench, Tinca tinca", "cat", "dog"])
    for classes, names in (
        ('"tench, Tinca tinca", dog', ["dog", "tench, Tinca tinca"]),
        ("0, 1", ["cat", "dog"]),
    ):
        prepare(tmp_path / "in", classes=classes, val_fraction=0)
        assert open_dataset("toy").class_names == names


def test_arrays_keep_a_training_image_of_each_class(tmp_path):
    labels = np.array([0, 1, 1, 2] + 9 * [3])
    np.savez(tmp_path / "a.npz", arr_0=np.zeros((13, 8, 8, 3), np.uint8), labels=labels)
    counts = read(tmp_path / "a.npz", "npz", val_fraction=0.9)
    for label in range(4):
        assert counts[str(label), False] == 1


def test_one_image_is_held_out_if_a_class_can_spare_it(tmp_path):
    labels = np.array([0, 1] + 8 * [2])
    np.savez(tmp_path / "a.npz", arr_0=np.zeros((10, 8, 8, 3), np.uint8), labels=labels)
    for seed in range(9):
        counts = read(tmp_path / "a.npz", "npz", val_fraction=0.05, seed=seed)
        assert counts == {("0", False): 1, ("1", False): 1, ("2", False): 7, ("2", True): 1}


def test_backslashes_part_folders_only_where_no_slash_does(tmp_path):
    path = pack(tmp_path, [r"C:\cat/0.jpg", r"C:\dog/0.jpg"], "folder")
    assert read(path) == {(r"C:\cat", False): 1, (r"C:\dog", False): 1}
