"""Find an image's class, caption and split: in a table, in files beside it, or by its folder."""

import csv
import io
import itertools
import json
import re
import textwrap
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from posixpath import basename, dirname, join, splitext

import numpy as np

from nanodiff.common import UserError, at, print0
from nanodiff.files import reading
from nanodiff.prepare.containers import cleaned, is_image, key_of, split_of

LABELS = "auto folder file none folder:1 folder:2 folder:3".split()
TABLES = ("metadata.csv", "metadata.jsonl", "metadata.json", "dataset.json")  # Hugging Face, DiffSynth, EDM
FILE_COLUMNS = "file_name file filename image path image_id id".split()
LABEL_COLUMNS = "label class".split()
CAPTION_COLUMNS = "text caption prompt".split()
VAL_SPLITS = "val test dev eval".split()  # beside train; the first that exists is held out
SPLIT_TITLES = {"train": "train", "val": "val", "": "all", None: "left out, no split or no training image of a class:"}
# No class's name: segmentation, VOC's folders, CycleGAN's trainA
PAIR = re.compile(
    r"images?|imgs?|masks?|labels?|annotations?|gt|ground_?truth|inputs?|targets?|jpegimages|segmentation\w*|train_?[ab]",
    re.IGNORECASE,
)
BESIDE = {".json": "", ".cls": "label", ".txt": "text"}  # files beside an image, and their text's column

# ---------------------------------------------------------------------------------------------------------------------
# Class and caption: (str, str), "" = not given


def text_of(payload: str | bytes, origin: str) -> str:
    """The text of a file, given its path or content."""
    content = payload
    if isinstance(payload, str):
        with reading(origin):
            content = Path(payload).read_bytes()
    try:
        if b"\0" not in content:  # else it is in UTF-16
            return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        pass
    raise UserError(f"{origin} is in UTF-16, Latin-1 or another code; accepted: UTF-8")


def pick(row: dict, column: str, usual: Iterable[str], used: set) -> str:
    """A row's value in a column or, for "", in the first of the usual columns that it has."""
    if column:
        usual = (column, column.lower())
    for key in usual:
        value = row.get(key)
        if isinstance(value, (list, dict)):
            raise UserError(f"{key} of an image is {str(value)[:80]!r}; accepted: one text or number")
        if value is not None:
            used.add(key)
            return str(value).strip()
    return ""


def class_and_caption(row: dict, options, used: set) -> tuple[str, str]:
    """The class, unless it comes from elsewhere, and the caption. `used` gets the columns that have them."""
    label = ""
    if options.labels not in LABELS[1:]:
        label = pick(row, options.label_column, LABEL_COLUMNS, used)
    caption = pick(row, options.caption_column, CAPTION_COLUMNS, used)
    label = re.sub(r"^(\d+)\.0$", r"\1", " ".join(label.split()))  # as pandas writes integers beside empty cells
    return label, " ".join(caption.split())


def read_table(table: dict, payload: str | bytes, origin: str, options, folder: str = "") -> None:
    """Add the rows of a .csv, .tsv, .jsonl or .json, given its path or content, to {file: (class, caption, split)}.

    A .csv or .tsv without a header has rows file,class; else rows are read by column. EDM's dataset.json lists
    such pairs, kohya's metadata.json maps each file to its row."""
    text = text_of(payload, origin)
    suffix = splitext(origin)[1].lower()
    used = set()
    with reading(origin, "is not a table of images by file"):
        if suffix in (".csv", ".tsv"):
            delimiter = "\t" if suffix == ".tsv" else re.search("[,;]|$", text)[0] or ","
            lines = list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True))
            for line in lines:
                while line and not line[-1].strip():  # empty columns of Excel
                    line.pop()
            columns = [name.strip().lower() for name in lines[0]] if lines else []
            names = set(columns)
            usual_columns = FILE_COLUMNS + LABEL_COLUMNS + CAPTION_COLUMNS
            if names & {options.file_column.lower() or "file", *usual_columns} and len(names) == len(columns):
                lines[0] = []  # the header
            else:
                columns = ["file", "label"]
            rows = [dict(itertools.zip_longest(columns, line)) for line in lines]
        elif suffix == ".jsonl":
            rows = [json.loads(line.strip() or "{}") for line in text.split("\n")]
        else:
            rows = json.loads(text)
            if "labels" in rows:
                rows = [{"file": file, "label": label} for file, label in rows["labels"] or []]
            elif isinstance(rows, dict):
                rows = [{"file": file, **row} for file, row in rows.items()]
        for number, row in enumerate(rows, 1):
            values = row.values()
            if not any(values):
                continue
            file = pick(row, options.file_column, FILE_COLUMNS, used)
            split = split_of(str(row.get("split")))
            if split:
                used.add("split")
            facts = (*class_and_caption(row, options, used), split)
            if row.get(None) or not file:  # None: more cells than columns
                cells = ",".join(str(value) for value in values if value is not None)
                raise UserError(
                    f"{origin}, line {number}: found {cells!r}; accepted: rows of file,class "
                    "or a header with the columns file (or a --file_column) and label, or text"
                )
            entry = table.setdefault(cleaned(join(folder, cleaned(file))), facts)
            if entry != facts:
                raise UserError(f"{origin}, line {number}: {file!r} has {facts} here and {entry} before")
    if unused := set(itertools.chain(*rows)) - used - {None}:
        print0(f"{origin}: columns read: {listed(used)}; not used: {listed(unused)}")


def find_table(streams: list, options):
    """The table that options.labels names, or those beside the images: {name: (class, caption, split)}; None without
    one. A name may lack its suffix."""
    if options.labels not in LABELS:
        file = at(options.labels)
        if file.suffix.lower() not in (".csv", ".tsv", ".jsonl", ".json") or not file.is_file():
            raise UserError(f"labels={options.labels!r}; accepted: {', '.join(LABELS)}, a .csv, .tsv, .jsonl, .json")
        table = {}
        read_table(table, str(file), str(file), options)
        return table
    table = None
    for stream in streams:
        for name, payload in stream(TABLES):
            if basename(name).lower() in TABLES:
                table = table or {}
                try:
                    read_table(table, payload, name, options, dirname(name))
                except UserError as error:
                    if options.labels == "auto" or options.captions:
                        raise
                    print0(f"not used: {error}")
                    table = None
    return table


def read_beside(name: str, payload: str | bytes, options) -> dict:
    """The row in a file beside an image, {} if it has no class or caption."""
    column = BESIDE[splitext(name)[1].lower()]
    text = text_of(payload, name)
    with reading(name):
        row = {column: text} if column else json.loads(text)
    return row if isinstance(row, dict) and any(class_and_caption(row, options, set())) else {}


def samples(streams: list, table: dict, options, extras: Counter, unreadable: set, suffixes: tuple) -> Iterator[tuple]:
    """(name, path or content, (class, caption, split)) of each image; the content only if it has one of the suffixes.
    The class is "" if none is given, None if there is a table without the image.

    Successive files with one key_of are a sample. If it has several images, each takes the files that share its path
    up to the last dot. Unused files are counted by suffix in `extras`, and `unreadable` gets the reasons of others.
    Raises UserError after the last image if a sample's files were apart, which only tars do."""
    default = (None if table else "", "", "")
    stems = array("q")  # hashes of images' paths up to the last dot
    loose_stems = array("q")  # and of files beside no such image
    for stream in streams:
        members = stream((*BESIDE, *suffixes))
        for _, group in itertools.groupby(members, lambda member: key_of(member[0])):
            files = list(group)
            group = dict(files)
            extras["under a name that is there twice"] += len(files) - len(group)
            images = [name for name in group if is_image(name)]
            rows = {splitext(name)[0]: {} for name in images}
            stems.extend(map(hash, rows))
            sidecars = sorted(group.keys() - images, key=lambda name: (splitext(name)[1].lower() != ".json", name))
            for name in sidecars:  # .cls and .txt overrule .json
                stem, suffix = splitext(name)
                is_beside = suffix.lower() in BESIDE
                if is_beside and stem not in rows:
                    loose_stems.append(hash(stem))
                if len(rows) == 1:
                    (stem,) = rows
                row = {}
                try:
                    if is_beside and stem in rows:
                        row = read_beside(name, group[name], options)
                except UserError as error:
                    unreadable.add(f"{name!r}: {error}")
                    extras[f"unreadable {suffix}"] += 1
                    continue
                if row:
                    rows[stem] |= row
                elif not table or basename(name).lower() not in TABLES:
                    extras[suffix or basename(name)] += 1
            for name in images:
                stem = splitext(name)[0]
                label_beside, caption_beside = class_and_caption(rows[stem], options, set())
                label, caption, split = table.get(name) or table.get(stem, default)
                if options.labels == "auto" and label_beside:
                    label = label or label_beside
                yield name, group[name], (label, caption or caption_beside, split)
    is_apart = np.isin(loose_stems, stems).any()
    if is_apart and (options.labels == "auto" or options.captions):
        raise UserError(
            "the files of a sample, such as an image and its .txt, are apart in a tar or in two; "
            "pack them together, by: tar --sort=name -cf"
        )


# ---------------------------------------------------------------------------------------------------------------------
# Classes and splits


@dataclass
class Place:
    """Images of one folder, class and split of a table."""

    path: tuple[str, ...]  # the table's split or "", then folders; after find_splits those that may be classes
    label: str | None  # "" = not given, None = missing in the table
    example: str  # name of one image
    count: int = 0
    split: str | None = ""  # "train", "val", "" if there are no splits, None outside them
    number: int = 0  # of its class


def val_mask(classes: Sequence[int], val_fraction: float, seed: int) -> np.ndarray:
    """(N,) bool: which images, of these classes, are held out; at least one unless val_fraction is 0 or each is the
    only image of its class."""
    num = len(classes)
    mask = np.zeros(num, bool)
    if val_fraction > 0:
        order = np.random.default_rng([seed, num]).permutation(num)
        _, last = np.unique(np.take(classes, order)[::-1], return_index=True)
        order = np.delete(order, num - 1 - last)  # so that each class has a training image
        mask[order[: max(round(num * val_fraction), 1)]] = True
    return mask


def listed(names: Iterable[str]) -> str:
    return textwrap.shorten(", ".join(sorted({*names})), 200)


def find_splits(places: list[Place]) -> None:
    """Find the split of each place, at the first level of folders (or in the table) where train and others stand."""
    levels = itertools.zip_longest(*(place.path for place in places), fillvalue="")
    table_splits = {place.path[0] for place in places} - {""}
    shared = set()  # levels of folders around all images
    for level, names in enumerate(levels):
        splits = [*map(split_of, names)]
        val = next((split for split in VAL_SPLITS if split in splits), None)
        if val and "train" in splits:
            for place, split in zip(places, splits):
                place.split = {"train": "train", val: "val"}.get(split)
                # By level, not by name: a class may be called train, or like the folder around all
                place.path = tuple(folder for k, folder in enumerate(place.path) if k not in {level, *shared})
            break
        if len({*names}) == 1:
            shared.add(level)
    else:
        if table_splits:
            print0(f"the table's split is not used: it has {listed(table_splits)} alone; accepted: train and another")


def folder_classes(places: list[Place], labels: str) -> None:
    """Set the label of places to a folder, of the level that `labels` names. A level does not count if its name is the
    same for all training images, unless there is no other. Raises UserError if `labels` names none of several."""
    train = [place for place in places if place.split != "val"]
    paths = [place.path for place in train]
    columns = [*itertools.zip_longest(*paths, fillvalue="")] or [()]
    depths = [k for k, names in enumerate(columns) if len({*names}) > 1] or [len(columns) - 1]
    outer = {*columns[depths[0]]}
    starts = {(place.count, splitext(basename(place.example))[0]) for place in train}
    if len(train) == 2 and len(starts) == 1:
        print0(f"note: {listed(outer)} have as many files of the same names; if they are no classes, --pairs has one")
    is_pair = len(outer) > 1 and any(map(PAIR.fullmatch, outer))
    if labels == "folder" and (is_pair or len(depths) > 1):
        levels = [f"--labels=folder:{i} ({listed(columns[k])})" for i, k in enumerate(depths[:3], 1)]
        raise UserError(f"which folders are the classes? {', '.join(levels)}, --labels=none; --pairs has second images")
    level = int(labels.partition(":")[2] or 1)
    for place in places:
        path = [name for k, name in enumerate(place.path) if k in depths]
        place.label = "".join(path[level - 1 : level])


def classify(places: list[Place], labels: str, row: str | None = None) -> list[str]:
    """Find the split and class of places -> class_names. `row`: a file that the table names; None without a table.

    labels       an image's class
    "folder"     see folder_classes
    "folder:2"   its second folder, below a split's
    "none"       there are no classes
    "file"       place.label
    others       place.label if any is given or missing in the table; else "none" with a table, "folder" with folders

    Validation images of a class that has no training image are left out.
    """
    find_splits(places)
    places = [place for place in places if place.split is not None]
    if labels not in LABELS[1:] and all(place.label == "" for place in places):
        labels = "none"
        if row is not None:
            print0("unlabelled, as the table has no classes (--labels=folder takes the folders')")
        elif {name for place in places for name in place.path if not split_of(name)} - {"", "images"}:
            labels = "folder"  # unlike YOLO's train/images and train/train
    if labels == "none":
        return []
    if labels.startswith("folder"):
        folder_classes(places, labels)
    train_labels = {place.label for place in places if place.split != "val"}
    for place in places:
        if place.label not in train_labels:
            place.split = None
    places = [place for place in places if place.split is not None]
    absent = sorted((place for place in places if not place.label), key=lambda place: place.label == "")
    if absent:  # first those that a table lacks
        of_all = f"{sum(place.count for place in absent):,} of {sum(place.count for place in places):,} images"
        hint = f"; a row of the table: {row!r}" if row else ""
        raise UserError(
            f"labels={labels!r} gives no class for {of_all}, such as {absent[0].example!r} "
            f"(--labels=none needs none; --pairs takes second images{hint})"
        )
    class_names = sorted(train_labels)
    if all(name.isdecimal() for name in class_names):
        class_names.sort(key=int)
    for place in places:
        place.number = class_names.index(place.label)
    return class_names


def print_places(places: list[Place]) -> None:
    """What was understood: per split the number of images of each class or folder."""
    for split, title in SPLIT_TITLES.items():
        counts = Counter()
        for place in places:
            if place.split == split:
                counts[place.label or dirname(place.example)] += place.count
        if counts:
            names = [f"{name or '.'} {count:,}" for name, count in counts.items()]
            print0(f"  {title} {counts.total():,} images: {listed(names)}")
