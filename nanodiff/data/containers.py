"""Folders, tars and zips: the names of their files, and a function names -> (name, path or content) of each."""

import gzip
import os
import posixpath
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from nanodiff.common import print0
from nanodiff.files import reading

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")


def is_image(name: str) -> bool:
    """By suffix, but not if hidden or added by macOS."""
    hidden = any(part.startswith((".", "__MACOSX")) for part in name.split("/"))
    return name.lower().endswith(SUFFIXES) and not hidden


def open_folder(path: Path):
    names, seen = [], set()

    def fail(error):
        raise error

    for folder, folders, files in os.walk(path, followlinks=True, onerror=fail):
        folders.sort()
        if os.path.realpath(folder) in seen:  # a link to a parent would recurse forever
            folders.clear()
            continue
        seen.add(os.path.realpath(folder))
        names += [os.path.relpath(os.path.join(folder, file), path) for file in files]

    def fetch(wanted):
        for name in wanted:
            yield name, os.path.join(path, name)

    return names, fetch


def open_unzipped(path: Path):
    """A binary file, decompressed as it is read if it is gzipped."""
    with open(path, "rb") as file:
        is_gzip = file.read(2) == b"\x1f\x8b"
    return gzip.open(path, "rb") if is_gzip else open(path, "rb")


def read_tar(path: Path) -> Iterator:
    """(name, content) of the regular files in a .tar or .tar.gz; nothing is extracted to disk."""
    with reading(path), open_unzipped(path) as file, tarfile.open(fileobj=file, mode="r|") as tar:
        while (member := tar.next()) is not None:
            if member.isreg():
                yield posixpath.normpath(member.name), tar.extractfile(member).read()
            tar.members.clear()  # else the list of a large archive fills the memory
        # tarfile takes a damaged header or a truncation for the end, but only zeros mark it
        tail = tar.fileobj.read(2**20)
        if tail.strip(b"\0") or tar.fileobj.tell() < tar.offset + tarfile.BLOCKSIZE:
            raise tarfile.ReadError("no end of the archive where the last file ends")


def open_tar(path: Path):
    """Two passes: the names, then the contents, in the archive's order."""
    print0(f"listing the files in {path}")

    def fetch(wanted):
        left = set(wanted)
        for name, data in read_tar(path):
            if name in left:  # if two files share a name, the first counts
                left.remove(name)
                yield name, data

    return [name for name, _ in read_tar(path)], fetch


def open_zip(path: Path):
    with reading(path):
        archive = zipfile.ZipFile(path)

    def fetch(wanted):
        with reading(path):
            for name in wanted:
                yield name, archive.read(name)

    return archive.namelist(), fetch


CONTAINERS = {"folder": open_folder, "tar": open_tar, "zip": open_zip}
