"""Folders, tars and zips as streams of their files, in groups that share their path up to the suffix."""

import functools
import glob
import gzip
import itertools
import os
import posixpath
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from nanodiff.files import reading

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
TARS = (".tar", ".tar.gz", ".tgz")


def is_hidden(name: str) -> bool:
    """Is a file hidden, or added by macOS?"""
    return any(part.startswith((".", "__MACOSX")) for part in name.split("/"))


def is_image(name: str) -> bool:
    return name.lower().endswith(SUFFIXES) and not is_hidden(name)


# ---------------------------------------------------------------------------------------------------------------------
# A container: path -> its files on the disk, and a list of streams, one per archive. stream(wanted) yields the (name,
# path or content) of each member, or (name, None) if not wanted(name).


def open_folder(path: Path):
    """A folder of images or, if it holds tars and no images, its shards."""
    names, seen = [], set()

    def fail(error):
        raise error

    with reading(path):
        for folder, folders, files in os.walk(path, followlinks=True, onerror=fail):
            if os.path.realpath(folder) in seen:  # a link to a parent would recurse forever
                folders.clear()
                continue
            seen.add(os.path.realpath(folder))
            names += [os.path.relpath(os.path.join(folder, file), path) for file in files]
    names.sort(key=posixpath.splitext)
    shards = [os.path.join(path, name) for name in names if name.endswith(TARS)]
    if shards and not any(is_image(name) for name in names):
        return open_tars(shards)

    def stream(wanted):
        for name in names:
            yield name, os.path.join(path, name) if wanted(name) else None

    return [os.path.join(path, name) for name in names], [stream]


def open_unzipped(path: str | Path):
    """A binary file, decompressed as it is read if it is gzipped."""
    with open(path, "rb") as file:
        is_gzip = file.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rb") if is_gzip else open(path, "rb")


def read_tar(wanted: Callable[[str], bool], path: str | Path, below: str = "") -> Iterator:
    """The files of a .tar or .tar.gz as a stream; nothing is extracted to disk. Names begin with the folder `below`."""
    with reading(path), open_unzipped(path) as file, tarfile.open(fileobj=file, mode="r:") as tar:
        while (member := tar.next()) is not None:
            name = posixpath.normpath(posixpath.join(below, member.name))
            if member.isreg():
                yield name, tar.extractfile(member).read() if wanted(name) else None
            elif not member.isdir():
                yield f"{name} (a link)", None  # no image, by its suffix: one of the files that are ignored
            tar.members.clear()  # else the list of a large archive fills the memory
        # tarfile takes a damaged header or a truncation for the end, but only zeros mark it
        tail = file.read(2**20)
        if tail.strip(b"\0") or file.tell() < tar.offset + tarfile.BLOCKSIZE:
            raise tarfile.ReadError("no end of the archive where the last file ends")


def open_tars(shards: list[str]):
    """Tars as one container. A tar in a sub-folder, such as train/, counts as if its members lay in that folder."""
    root = os.path.commonpath([os.path.dirname(shard) for shard in shards])
    below = [os.path.relpath(os.path.dirname(shard), root or ".") for shard in shards]
    return shards, [functools.partial(read_tar, path=shard, below=place) for shard, place in zip(shards, below)]


def open_pattern(path: Path):
    """A tar, or all tars that a pattern such as shards/*.tar matches."""
    return open_tars([str(path)] if path.is_file() else sorted(glob.glob(str(path))))


def open_zip(path: Path):
    with reading(path):
        archive = zipfile.ZipFile(path)
    names = {name for name in archive.namelist() if not name.endswith("/")}

    def stream(wanted):
        with reading(path):
            for name in sorted(names, key=posixpath.splitext):
                yield name, archive.read(name) if wanted(name) else None

    return [str(path)], [stream]


CONTAINERS = {"folder": open_folder, "tar": open_pattern, "zip": open_zip}


def groups(streams: list, wanted: Callable[[str], bool]) -> Iterator[list[tuple]]:
    """Group neighbouring files that share their path up to the last suffix: an image and the files beside it."""
    for stream in streams:
        for _, members in itertools.groupby(stream(wanted), lambda member: posixpath.splitext(member[0])[0]):
            yield list(members)
