"""Folders, tars and zips as streams of their files."""

import functools
import glob
import os
import posixpath
import re
import tarfile
import unicodedata
import zipfile
from collections.abc import Iterator
from pathlib import Path

from nanodiff.common import print0
from nanodiff.files import reading

SUFFIXES = tuple(".jpg .jpeg .png .webp .bmp .gif .tif .tiff .ppm .pgm".split())
TAR_SUFFIXES = tuple(".tar .tar.gz .tgz .tar.bz2 .tbz2 .tar.xz .txz".split())
SPLIT = re.compile(
    r"(?:seg_)?(train|val|test|dev|eval)(?:ing|id|idation|uation)?(?:[_-]?(?:set|images|data))?[_-]?\d*",
    re.IGNORECASE,
)
MAX_BYTES = 2**26  # per file in an archive: a zip of 11 MB may hold 2.5 GB of zeros
# Added to a name, so that it ends like no image's and is ignored
NO_FILE = " (a link or no file, over 64 MB, or packed by bzip2 or LZMA)"


def split_of(name: str) -> str:
    """The split that a folder, a tar or a table's cell names, as Training, val2017 and seg_test do; "" = none."""
    match = SPLIT.fullmatch(name.strip())
    return match[1].lower() if match else ""


def cleaned(name: str) -> str:
    """A path with / between folders (Windows writes \\ alone), and é as one character (macOS writes two), ? for what is
    no UTF-8."""
    name = name.encode(errors="replace").decode()
    if "/" not in name:
        name = name.replace("\\", "/")
    return unicodedata.normalize("NFC", posixpath.normpath(name))


def key_of(name: str) -> str:
    """WebDataset's key of a sample: the path up to the first dot in the file's name."""
    return re.match(r"(.*/)?[^/.]*", name)[0]


def is_image(name: str) -> bool:
    """Judged by suffix; files that are hidden or added by macOS do not count."""
    hidden = any(part.startswith((".", "__MACOSX")) for part in name.split("/"))
    return name.lower().endswith(SUFFIXES) and not hidden


# ---------------------------------------------------------------------------------------------------------------------
# A container: path -> its files on the disk, and one stream per archive. stream(suffixes) yields (name, path or
# content) of all members; in an archive, the content is None unless the name has one of these suffixes.


def open_folder(path: Path):
    """A folder of images or, if it holds tars and no images, its shards."""
    members = []  # (name, path)
    real_folders = set()

    def fail(error):
        raise error

    with reading(path):
        for folder, folders, files in os.walk(path, followlinks=True, onerror=fail):
            real_folder = os.path.realpath(folder)
            folders.sort()
            if real_folder in real_folders:  # a link to a parent would recurse forever
                print0(f"left out {folder}: it is read under another name")
                folders.clear()
                continue
            real_folders.add(real_folder)
            for file in files:
                file = os.path.join(folder, file)
                name = cleaned(os.path.relpath(file, path))
                if not Path(file).is_file():  # a named pipe would block its reader
                    name += NO_FILE
                members.append((name, file))
    members.sort()  # so that a sample's files are neighbours
    files = [file for _, file in members]
    tars = [file for file in files if file.lower().endswith(TAR_SUFFIXES) and "/._" not in file]  # as macOS adds
    if tars and not any(is_image(name) for name, _ in members):
        if len(tars) < len(files):
            print0(f"ignored: {len(files) - len(tars):,} files beside the tars")
        return open_tars(tars)
    return files, [lambda suffixes: members]


def read_tar(suffixes: tuple[str, ...], path: str | Path, below: str = "") -> Iterator:
    """The files of a tar, packed or not, as a stream; nothing is extracted to disk. Names begin with the folder
    `below`."""
    with reading(path), tarfile.open(path) as tar:
        while (member := tar.next()) is not None:
            name = cleaned(posixpath.join(below, cleaned(member.name)))
            if not member.isreg() or member.size > MAX_BYTES:
                name += NO_FILE
            content = tar.extractfile(member).read() if name.lower().endswith(suffixes) else None
            if not member.isdir():
                yield name, content
            tar.members.clear()  # else the list of a large archive fills the memory
        # tarfile takes a damaged header or a truncation for the end, but only zeros mark it
        tail = tar.fileobj.read(2**20)
        if tail.strip(b"\0") or tar.fileobj.tell() < tar.offset + tarfile.BLOCKSIZE:
            raise tarfile.ReadError("no end-of-archive mark after the last file")


def open_tars(tars: list[str]):
    """Tars as one container. The members of a tar in a sub-folder, such as train/, count as lying in that folder; so do
    those of a tar whose name holds a split's, such as imagenet-train-0000.tar."""
    folders = [os.path.dirname(os.path.abspath(tar)) for tar in tars]
    root = os.path.commonpath(folders)
    streams = []
    for tar, folder in zip(tars, folders):
        splits = filter(split_of, re.split("[-_.]", os.path.basename(tar)))
        below = os.path.relpath(os.path.join(folder, *splits), root)
        streams.append(functools.partial(read_tar, path=tar, below=below))
    return tars, streams


def open_pattern(path: Path):
    """A tar, or all tars that a pattern such as shards/*.tar matches."""
    return open_tars([str(path)] if path.exists() else sorted(glob.glob(str(path))))


def open_zip(path: Path):
    with reading(path):
        try:
            archive = zipfile.ZipFile(path, metadata_encoding="utf-8")  # as macOS writes names, without saying so
        except UnicodeDecodeError:
            archive = zipfile.ZipFile(path)
        infos = [(cleaned(info.filename), info) for info in archive.infolist() if not info.is_dir()]
        infos.sort(key=lambda pair: pair[0])

    def stream(suffixes):
        with reading(path):
            for name, info in infos:
                # zipfile decompresses bzip2 and LZMA, whose numbers are higher, without a limit
                if info.compress_type > zipfile.ZIP_DEFLATED or info.file_size > MAX_BYTES:
                    name += NO_FILE
                content = None
                if name.lower().endswith(suffixes):
                    content = archive.open(info).read(info.file_size)  # not more, whatever is packed
                yield name, content

    return [str(path)], [stream]


CONTAINERS = {"folder": open_folder, "tar": open_pattern, "zip": open_zip}
