"""Which class and split an image is in, by its path or by a table."""

import csv
import json
import posixpath
from pathlib import Path

import numpy as np

from nanodiff.common import UserError, print0
from nanodiff.data.containers import SUFFIXES
from nanodiff.files import reading

VAL_FOLDERS = ("val", "valid", "validation", "test")  # beside train/, in any case; the first that is there
LABELS = ("auto", "folder", "file", "none")


def val_mask(num: int, val_fraction: float, seed: int) -> np.ndarray:
    """(num,) bool: which images are held out; at least one unless val_fraction is 0."""
    mask = np.zeros(num, bool)
    if val_fraction > 0 and num > 1:
        count = round(num * val_fraction)
        count = min(max(count, 1), num - 1)
        order = np.random.default_rng([seed, num]).permutation(num)
        mask[order[:count]] = True
    return mask


def split_folders(names: list[str]):
    """-> the names that are in a split, their paths below it as lists of parts, is_val (n,) or None.

    A train/ folder with val/ or test/ beside it is a split. One folder around all others, as archives often have, is
    left out of the paths.
    """
    paths = [name.split("/") for name in names]
    tops = {path[0] if len(path) > 2 else "" for path in paths}
    if len(tops) == 1 and "" not in tops:
        paths = [path[1:] for path in paths]
    tops = [path[0].lower() for path in paths]
    val = next((folder for folder in VAL_FOLDERS if folder in tops), None)
    if val is None or "train" not in tops:
        return names, paths, None
    in_split = [i for i, top in enumerate(tops) if top in ("train", val)]
    if len(in_split) < len(names):
        print0(f"left out {len(names) - len(in_split):,} images beside train/ and {val}/")
    is_val = np.array([tops[i] == val for i in in_split])
    names = [names[i] for i in in_split]
    paths = [paths[i][1:] for i in in_split]
    return names, paths, is_val


def look_up(table: dict, names: list[str], missing: str) -> list:
    """[table[name] for each name]; a name that is not there raises UserError, which begins with `missing`."""
    absent = [name for name in names if name not in table]
    if absent:
        raise UserError(f"{missing} for {len(absent):,} of {len(names):,} images, such as {absent[0]!r}")
    return [table[name] for name in names]


def classify(names: list[str], labels: str | dict):
    """-> the names that are in a split, class_names, labels (n,), is_val (n,) or None.

    labels     an image's class
    "folder"   its first folder, below a split's
    "file"     its file name up to the first "_"
    a dict     labels[name]
    "none"     there are no classes
    "auto"     "folder" if there are folders, else "none"
    """
    names, paths, is_val = split_folders(names)
    if labels == "auto":
        labels = "folder" if any(len(path) > 1 for path in paths) else "none"
    if labels == "none":
        return names, [], np.zeros(len(names), np.int64), is_val
    table = labels
    if labels == "folder":
        table = {name: path[0] for name, path in zip(names, paths) if len(path) > 1}
    elif labels == "file":
        table = {name: path[-1].split("_")[0] for name, path in zip(names, paths) if "_" in path[-1]}
    source = "the table" if isinstance(labels, dict) else f"labels={labels!r}"
    classes = look_up(table, names, f"{source} gives no class (--labels=none ignores classes)")
    class_names = sorted(set(classes))
    if all(name.isdecimal() for name in class_names):
        class_names.sort(key=int)
    numbers = {name: i for i, name in enumerate(class_names)}
    return names, class_names, np.array([numbers[name] for name in classes]), is_val


def find_labels(setting: str, path: Path, found: list[str], fetch) -> str | dict[str, str]:
    """`setting`, one of LABELS, or the table {name: class} that it names; for auto EDM's dataset.json, if there is one.

    `found`, `fetch`: the container at `path`."""
    if setting == "auto" and "dataset.json" in found:
        ((_, content),) = fetch(["dataset.json"])
        if isinstance(content, str):
            content = Path(content).read_bytes()
        with reading(f"{path}/dataset.json"):
            rows = json.loads(content)["labels"]  # [[file, class], ...] or null
            table = {posixpath.normpath(file): str(label) for file, label in rows or []}
        if not table:
            return "none"
    elif setting in LABELS:
        return setting
    else:
        table = read_csv(setting)
    absent = table.keys() - set(found)
    if absent:
        print0(f"{len(absent):,} labels have no file in {path}, such as {min(absent)!r}")
    return table


def read_csv(labels: str) -> dict[str, str]:
    """A table of labels -> {file: class}: rows of file,class, or a header that names the columns file and label."""
    path = Path(labels).expanduser()
    if path.suffix != ".csv" or not path.is_file():
        raise UserError(f"labels={labels!r}; accepted: {', '.join(LABELS)}, or a .csv file")
    accepted = "rows of file,class or a header with the columns file and label"
    table = {}
    file_column, label_column = 0, 1
    with reading(path, "is not a table in UTF-8"), open(path, encoding="utf-8-sig", newline="") as lines:
        rows = csv.reader(lines)
        for row in rows:
            if row.count("file") == row.count("label") == 1 and not table:
                file_column, label_column = row.index("file"), row.index("label")
                continue
            if not row:
                continue
            where = f"{path}, line {rows.line_num}"
            has_both = len(row) > max(file_column, label_column)
            if not has_both or not row[file_column].lower().endswith(SUFFIXES):
                raise UserError(f"{where}: found {','.join(row)!r}; accepted: {accepted}")
            file = posixpath.normpath(row[file_column])
            label = row[label_column].strip()
            if not label:
                raise UserError(f"{where}: {file!r} has an empty class; --labels=none ignores classes")
            if table.setdefault(file, label) != label:
                raise UserError(f"{where}: {file!r} has the class {label!r} here and {table[file]!r} before")
    return table
