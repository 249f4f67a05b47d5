"""Find an image's class, caption and split: in a table, in files beside it, or by its folder."""

import csv
import io
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from posixpath import basename, dirname, join, splitext

import numpy as np

from nanodiff.common import UserError, at, print0
from nanodiff.files import reading
from nanodiff.prepare.containers import SUFFIXES, cleaned, is_image, key_of

# Beside train/, in upper or lower case; the first that exists
VAL_FOLDERS = ("val", "valid", "validation", "test", "dev", "eval")
LABELS = ("auto", "folder", "file", "none")
TABLES = ("metadata.csv", "metadata.jsonl", "metadata.json", "dataset.json")  # Hugging Face, DiffSynth, EDM
FILE_COLUMNS = ("file_name", "file", "image")
LABEL_COLUMNS = ("label", "class")
CAPTION_COLUMNS = ("text", "caption", "prompt")
BESIDE = {".cls": "label", ".txt": "text"}  # files beside an image, and what their text is

# ---------------------------------------------------------------------------------------------------------------------
# Class and caption: (str, str), "" = not given


def text_of(payload: str | bytes, where: str) -> str:
    """The text of a file, given its path or content."""
    content = payload
    if isinstance(payload, str):
        with reading(where):
            content = Path(payload).read_bytes()
    try:
        if b"\0" not in content:  # else it is in UTF-16
            return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        pass
    raise UserError(f"{where} is in UTF-16, Latin-1 or another code; accepted: UTF-8")


def pick(row: dict, column: str, usual: tuple[str, ...]) -> str:
    """A row's value in a column or, for "", in the first of the usual columns that it has."""
    if column:
        usual = (column,)
    for key in usual:
        value = row.get(key)
        if isinstance(value, (list, dict)):
            raise UserError(f"{key} of an image is {str(value)[:80]!r}; accepted: one text or number")
        if value is not None:
            return " ".join(str(value).split())
    return ""


def class_and_caption(row: dict, options):
    return pick(row, options.label_column, LABEL_COLUMNS), pick(row, options.caption_column, CAPTION_COLUMNS)


def read_table(table: dict, payload: str | bytes, where: str, options, folder: str = "") -> None:
    """Add the rows of a .csv, .tsv, .jsonl or .json, given its path or content, to {file: (class, caption)}.

    A .csv or .tsv without a header has rows file,class; else rows are read by column. EDM's dataset.json lists
    such pairs, kohya's metadata.json maps each file to its row."""
    text = text_of(payload, where)
    with reading(where, "is not a table of images by file"):
        if where.endswith((".csv", ".tsv")):
            dialect = "excel-tab" if where.endswith(".tsv") else "excel"
            lines = list(csv.reader(io.StringIO(text, newline=""), dialect))
            columns = lines[0] if lines else []
            names = set(columns)
            if names.isdisjoint(FILE_COLUMNS) or len(names) < len(columns):  # no header
                columns = ["file", "label"]
            rows = [dict(itertools.zip_longest(columns, line)) for line in lines]
        elif where.endswith(".jsonl"):
            rows = [json.loads(line or "{}") for line in text.split("\n")]
        else:
            rows = json.loads(text)
            if "labels" in rows:
                rows = [{"file": file, "label": label} for file, label in rows["labels"] or []]
            elif isinstance(rows, dict):
                rows = [{"file": file, **row} for file, row in rows.items()]
        for number, row in enumerate(rows, 1):
            values = list(row.values())
            if not any(values) or values == list(row):  # empty, or the header
                continue
            file = pick(row, "", FILE_COLUMNS)
            facts = class_and_caption(row, options)
            if row.get(None) or not file.lower().endswith(SUFFIXES):  # None: more cells than columns
                found = ",".join(str(value) for value in values if value is not None)
                raise UserError(
                    f"{where}, line {number}: found {found!r}; "
                    "accepted: rows of file,class or a header with the columns file and label, or text"
                )
            before = table.setdefault(cleaned(join(folder, file)), facts)
            if before != facts:
                raise UserError(f"{where}, line {number}: {file!r} has {facts} here and {before} before")
        if not any(map(any, table.values())):
            print0(f"{where} gives no class or caption: {rows[:1]}; see --label_column and --caption_column")


def find_table(streams: list, options):
    """The table that options.labels names, or those beside the images: {name: (class, caption)}; None without one."""
    if options.labels not in LABELS:
        file = at(options.labels)
        if file.suffix not in (".csv", ".tsv", ".jsonl", ".json") or not file.is_file():
            raise UserError(f"labels={options.labels!r}; accepted: {', '.join(LABELS)}, a .csv, .tsv, .jsonl, .json")
        table = {}
        read_table(table, str(file), str(file), options)
        return table
    table = None
    for stream in streams:
        for name, payload in stream(TABLES):
            if basename(name) in TABLES:
                table = table or {}
                read_table(table, payload, name, options, dirname(name))
    return table


def samples(streams: list, table: dict, options, ignored: Counter, suffixes: tuple) -> Iterator[tuple]:
    """(name, path or content, class, caption) of each image; the content only if it has one of the suffixes. The class
    is "" if none is given, None if there is a table without the image.

    Successive files with one key_of are a sample. If it has several images, each takes the files that share its path
    up to the last dot. Unused files are counted by suffix in `ignored`."""
    unlisted = None if table else ""
    for stream in streams:
        members = stream((*BESIDE, ".json", *suffixes))
        for _, group in itertools.groupby(members, lambda member: key_of(member[0])):
            group = dict(group)
            images = [name for name in group if is_image(name)]
            rows = {splitext(name)[0]: {} for name in images}
            if len(rows) > 1:
                ignored["keys of several images, such as x.jpg and x.seg.png"] += 1
            for name in sorted(group.keys() - images):
                stem, suffix = splitext(name)
                base = basename(name)
                if len(rows) == 1:
                    (stem,) = rows
                found = {}
                if stem in rows and suffix == ".json":
                    with reading(name):
                        found = json.loads(text_of(group[name], name))
                if stem in rows and suffix in BESIDE:
                    rows[stem][BESIDE[suffix]] = text_of(group[name], name)
                elif isinstance(found, dict) and any(class_and_caption(found, options)):
                    rows[stem] = found | rows[stem]
                elif base not in TABLES:
                    ignored[suffix or base] += 1
            for name in images:
                label_beside, caption_beside = class_and_caption(rows[splitext(name)[0]], options)
                label, caption = table.get(name, (unlisted, ""))
                if options.labels == "auto" and label_beside:
                    label = label or label_beside
                yield name, group[name], label, caption or caption_beside


# ---------------------------------------------------------------------------------------------------------------------
# Classes and splits


@dataclass
class Place:
    """Images of one folder and one class."""

    folder: str
    label: str | None  # "" = not given, None = missing in the table
    example: str  # name of one image
    count: int = 0
    split: str | None = ""  # "train", "val", "" if there are no splits, None outside them
    number: int = 0  # of its class


def val_mask(num: int, val_fraction: float, seed: int) -> np.ndarray:
    """(num,) bool: which images are held out; at least one unless val_fraction is 0."""
    mask = np.zeros(num, bool)
    if val_fraction > 0 and num > 1:
        count = min(max(round(num * val_fraction), 1), num - 1)
        mask[np.random.default_rng([seed, num]).permutation(num)[:count]] = True
    return mask


def split_folders(places: list[Place]) -> list[Place]:
    """Find the split of each place, and cut its folder to the first below the split's -> the places in a split.

    A train/ folder with val/ or test/ beside it is a split. One folder around all others, common in archives, is
    ignored.
    """
    paths = [[*place.folder.split("/"), ""] for place in places]
    below = {path[1].lower() for path in paths}
    if len({path[0] for path in paths}) == 1 and ("" not in below or "train" in below):
        paths = [path[1:] for path in paths]
    tops = [path[0].lower() for path in paths]
    val = next((folder for folder in VAL_FOLDERS if folder in tops), None)
    if val and "train" in tops:
        paths = [path[1:] for path in paths]
        for place, top in zip(places, tops):
            place.split = {"train": "train", val: "val"}.get(top)
    num_beside = sum(place.count for place in places if place.split is None)
    if num_beside:
        print0(f"left out {num_beside:,} images beside train/ and {val}/")
    for place, path in zip(places, paths):
        place.folder = "".join(path[:1])
    return [place for place in places if place.split is not None]


def classify(places: list[Place], labels: str, row: str | None = None) -> list[str]:
    """Find the split and class of places -> class_names. `row`: a file that the table names; None without a table.

    labels     an image's class
    "folder"   its first folder, below a split's
    "none"     there are no classes
    "file"     place.label
    others     place.label if any is given or missing in the table; else "none" with a table, "folder" with folders
    """
    places = split_folders(places)
    given = {place.label for place in places}
    if labels not in LABELS[1:] and given == {""}:
        labels = "none"
        if row is not None:
            print0("unlabelled, as the table has no classes (--labels=folder takes the folders')")
        elif any(place.folder for place in places):
            labels = "folder"
    if labels == "none":
        return []
    if labels == "folder":
        for place in places:
            place.label = place.folder
    absent = [place for place in places if place.label is None] or [place for place in places if not place.label]
    if absent:
        of_all = f"{sum(place.count for place in absent):,} of {sum(place.count for place in places):,} images"
        hint = f"; a row of the table: {row!r}" if row else ""
        raise UserError(
            f"labels={labels!r} gives no class for {of_all}, such as {absent[0].example!r} "
            f"(--labels=none needs none; --pairs takes second images{hint})"
        )
    class_names = sorted({place.label for place in places})
    if all(name.isdecimal() for name in class_names):
        class_names.sort(key=int)
    for place in places:
        place.number = class_names.index(place.label)
    return class_names
