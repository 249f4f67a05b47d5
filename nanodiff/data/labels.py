"""Which class, caption and split an image has: by a table, by a file beside it, or by its path."""

import codecs
import csv
import io
import json
import posixpath
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from nanodiff.common import UserError, print0
from nanodiff.data.containers import SUFFIXES
from nanodiff.files import reading

VAL_FOLDERS = ("val", "valid", "validation", "test")  # beside train/, in any case; the first that is there
LABELS = ("auto", "folder", "file", "none")
TABLES = ("metadata.csv", "metadata.jsonl", "metadata.json", "dataset.json")  # Hugging Face, DiffSynth, EDM
FILE_COLUMNS = ("file_name", "file", "image")
LABEL_COLUMNS = ("label", "class")
CAPTION_COLUMNS = ("text", "caption", "prompt")
ACCEPTED = "rows of file,class or a header with the columns file and label, or text"


# ---------------------------------------------------------------------------------------------------------------------
# Class and caption: (str, str), "" for what is not said


def text_of(payload: str | bytes, where: str) -> str:
    """The text of a file, given its path or content."""
    with reading(where):
        content = Path(payload).read_bytes() if isinstance(payload, str) else payload
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in content:
        raise UserError(f"{where} is in UTF-16; accepted: UTF-8")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{where} is in Latin-1 or another code of 8 bits; accepted: UTF-8") from None


def pick(row: dict, column: str, usual: tuple[str, ...]) -> str:
    """A row's value in a column or, for "", in the first of the usual columns that it has."""
    found = [row[key] for key in ([column] if column else usual) if row.get(key) is not None]
    return " ".join(str(found[0]).split()) if found else ""


def class_and_caption(row: dict, options) -> tuple[str, str]:
    return pick(row, options.label_column, LABEL_COLUMNS), pick(row, options.caption_column, CAPTION_COLUMNS)


def beside(files: dict[str, str | bytes], stem: str, options) -> tuple[str, str, set[str]]:
    """Class and caption from the files beside an image, {suffix: path or content}, and the suffixes that gave them."""
    label, caption, used = "", "", set()
    if ".json" in files:
        with reading(f"{stem}.json"):
            row = json.loads(text_of(files[".json"], f"{stem}.json"))
        if isinstance(row, dict):
            label, caption = class_and_caption(row, options)
            used = {".json"} if label or caption else used
    if ".cls" in files and options.labels == "auto":
        label = label or text_of(files[".cls"], f"{stem}.cls").strip()
        used.add(".cls")
    if ".txt" in files:
        caption = caption or " ".join(text_of(files[".txt"], f"{stem}.txt").split())
        used.add(".txt")
    return label, caption, used


def read_table(payload: str | bytes, where: str, options) -> dict[str, tuple[str, str]]:
    """A .csv, .jsonl or .json, given its path or content -> {file: (class, caption)}.

    Rows are found by column; those of a .csv without a header are file,class. EDM's dataset.json has pairs of them."""
    text = text_of(payload, where)
    table = {}
    with reading(where, "is not a table"):
        if where.endswith(".csv"):
            rows = csv_rows(text, where)
        elif where.endswith(".jsonl"):
            rows = ((f"line {i}", json.loads(line)) for i, line in enumerate(text.split("\n"), 1) if line.strip())
        else:
            found = json.loads(text)
            if isinstance(found, dict):
                found = [{"file": file, "label": label} for file, label in found["labels"] or []]
            rows = ((f"row {i}", row) for i, row in enumerate(found, 1))
        for place, row in rows:
            file, facts = pick(row, "", FILE_COLUMNS), class_and_caption(row, options)
            if not file.lower().endswith(SUFFIXES):
                given = ",".join(map(str, row.values()))
                raise UserError(f"{where}, {place}: found {given!r}; accepted: {ACCEPTED}")
            file = posixpath.normpath(file)
            if table.setdefault(file, facts) != facts:
                (now, _), (before, _) = facts, table[file]
                raise UserError(f"{where}, {place}: {file!r} has the class {now!r} here and {before!r} before")
    return table


def csv_rows(text: str, where: str) -> Iterator[tuple[str, dict[str, str]]]:
    """The place of each row, and its values by column."""
    columns = ["file", "label"]
    rows = csv.reader(io.StringIO(text, newline=""))
    for row in rows:
        is_header = rows.line_num == 1 and not set(row).isdisjoint(FILE_COLUMNS)
        if is_header:
            columns = row
        if is_header and len(set(row)) < len(row):
            raise UserError(f"{where}, line 1: found {','.join(row)!r}; accepted: columns of different names")
        if row and not is_header:
            yield f"line {rows.line_num}", dict(zip(columns, row))


# ---------------------------------------------------------------------------------------------------------------------
# Classes and splits


class Place(NamedTuple):
    """Images of one folder and one class."""

    folder: str
    label: str  # "" if nothing gives it
    example: str  # the name of one
    count: int


def val_mask(num: int, val_fraction: float, seed: int) -> np.ndarray:
    """(num,) bool: which images are held out; at least one unless val_fraction is 0."""
    mask = np.zeros(num, bool)
    if val_fraction > 0 and num > 1:
        count = round(num * val_fraction)
        count = min(max(count, 1), num - 1)
        order = np.random.default_rng([seed, num]).permutation(num)
        mask[order[:count]] = True
    return mask


def split_folders(places: list[Place]) -> tuple[list[list[str]], list[str]]:
    """-> the path of each place below its split, as a list of folders, and its split: "train", "val", "" if there is no
    split, None if it lies beside them.

    A train/ folder with val/ or test/ beside it is a split. One folder around all others, as archives often have, is
    left out of the paths.
    """
    paths = [place.folder.split("/") if place.folder else [] for place in places]
    tops = {path[0] if len(path) > 1 else "" for path in paths}
    if len(tops) == 1 and "" not in tops:
        paths = [path[1:] for path in paths]
    tops = [path[0].lower() if path else "" for path in paths]
    val = next((folder for folder in VAL_FOLDERS if folder in tops), None)
    if val is None or "train" not in tops:
        return paths, [""] * len(paths)
    splits = [{"train": "train", val: "val"}.get(top) for top in tops]
    num_beside = sum(place.count for place, split in zip(places, splits) if split is None)
    if num_beside:
        print0(f"left out {num_beside:,} images beside train/ and {val}/")
    return [path[1:] for path in paths], splits


def classify(places: list[Place], labels: str, has_table: bool) -> tuple[list[str], list[int], list[str]]:
    """-> class_names, the class of each place, the split of each (see split_folders).

    labels     an image's class
    "folder"   its first folder, below a split's
    "none"     there are no classes
    "auto"     that of its place, if any has one; else "none" with a table, "folder" if there are folders
    others     that of its place
    """
    paths, splits = split_folders(places)
    classes = [place.label for place in places]
    by_folder = labels == "folder" or (labels == "auto" and not any(classes) and not has_table and any(paths))
    if by_folder:
        classes = [path[0] if path else "" for path in paths]
    elif labels == "none" or (labels == "auto" and not any(classes)):
        return [], [0] * len(places), splits
    inside = [i for i, split in enumerate(splits) if split is not None]
    absent = [places[i] for i in inside if not classes[i]]
    if absent:
        counts = [sum(place.count for place in some) for some in (absent, places)]
        missing = f"labels={labels!r} gives no class (--labels=none ignores classes)"
        raise UserError("{} for {:,} of {:,} images, such as {!r}".format(missing, *counts, absent[0].example))
    class_names = sorted({classes[i] for i in inside})
    if all(name.isdecimal() for name in class_names):
        class_names.sort(key=int)
    numbers = {name: i for i, name in enumerate(class_names)}
    return class_names, [numbers.get(name, 0) for name in classes], splits
