"""Files: atomic writes that survive a kill, locks, downloads, and reads that fail in one line."""

import argparse
import errno
import fcntl
import glob
import hashlib
import http.client
import json
import os
import pickle
import re
import shutil
import tempfile
import urllib.request
import warnings
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from nanodiff.common import Progress, UserError, is_out_of_memory, print0


def fsync(path: Path) -> None:
    """Make a rename within a folder survive a power cut."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def names_file(path: str | Path):
    """Add the file's name to the OSError of a failed write, which torch.save hides in a RuntimeError."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        if cause.errno and not cause.filename:
            cause.filename = str(path)
        raise cause from None


class Hashed:
    """A file that is written from start to end, with the SHA-256 of its content so far."""

    def __init__(self, file):
        self.file = file
        self.flush = file.flush
        self.sha256 = hashlib.sha256()

    def write(self, data) -> int:
        self.sha256.update(data)
        return self.file.write(data)


@contextmanager
def writing(path: Path, manifest: dict | None = None):
    """A temporary binary file, renamed to `path` once all of it is on the disk. `manifest` gets the file's size
    and hash, computed while writing: such a file cannot seek."""
    prefix = f".{path.name}.tmp-"
    for leftover in path.parent.glob(f"{glob.escape(prefix)}*"):  # of a killed process
        with suppress(OSError), open(leftover) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while another process writes it
            leftover.unlink()
    try:
        fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=prefix)
    except FileNotFoundError:
        raise UserError(f"cannot write {path}: its folder is gone; was it moved?") from None
    try:
        with names_file(path), os.fdopen(fd, "wb") as file:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_EX)
            if manifest is None:
                yield file
            else:
                hasher = Hashed(file)
                yield hasher
                manifest[path.name] = {"size": file.tell(), "sha256": hasher.sha256.hexdigest()}
            file.flush()
            os.fsync(file.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)  # it is gone if the folder was moved
        raise


def write_atomic(path: Path, data) -> None:
    """Write bytes to `path`: all of them or none."""
    with writing(path) as file:
        file.write(data)


def known_fields(record) -> dict:
    """What JSON keeps of a dataclass: the fields that are not None."""
    return {key: value for key, value in vars(record).items() if value is not None}


def write_json(path: Path, value, manifest: dict | None = None) -> None:
    """Write a value as JSON to `path`: all of it or nothing. `manifest`: see writing."""
    with writing(path, manifest) as file:
        file.write(json.dumps(value, indent=1, default=known_fields).encode())


def name_of_settings(stem: str, config, *apart: str) -> str:
    """A file name: `stem` plus the changed settings, except those in `apart`. Paths are cut to their last part. A name
    that was shortened gets a hash of the whole."""
    name = stem
    for key, value in config.items():
        if value != config.defaults[key] and key not in apart:
            stem += f"_{key}={value}"
            name += f"_{key}={Path(str(value)).name}"
    name = re.sub(r"[^\w.,=+-]+", "-", name, flags=re.ASCII)[:150]
    if name == stem:
        return name
    return f"{name}_{hashlib.sha256(stem.encode()).hexdigest()[:8]}"


def publish_folder(temporary: Path, final: Path) -> None:
    """Rename a finished folder, replacing an old one."""
    temporary.chmod(0o755)
    fsync(temporary)
    old = tempfile.mkdtemp(dir=final.parent, prefix=f".{final.name}.tmp-")
    if final.exists():
        os.rename(final, Path(old, final.name))  # perhaps a link
    os.rename(temporary, final)
    fsync(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def lock_file(
    path: Path,
    busy: str,
    hint: str = "NANODIFF_BASE_DIR",
    wait: bool = False,
    leftovers: tuple[str, ...] = (),
):
    """Lock `path`, creating it, until the returned file is closed or the process dies.

    Raises UserError(busy) if another process holds it (unless `wait`), or one that names the setting `hint` if the
    folder is not writable. Then removes the files beside it that match `leftovers`, left by killed holders.
    """
    try:
        os.makedirs(path.parent, exist_ok=True)
        file = open(path, "a+")
    except OSError as error:
        raise UserError(f"cannot write to {path.parent}: {error.strerror}; see {hint}") from None
    try:
        mode = 0 if wait else fcntl.LOCK_NB
        fcntl.flock(file, fcntl.LOCK_EX | mode)
    except BlockingIOError:
        file.close()
        raise UserError(busy) from None
    except OSError as error:
        print0(f"warning: {path} cannot be locked ({error.strerror}): a second process could write there")
        return file
    for pattern in leftovers:
        for leftover in path.parent.glob(pattern):
            if leftover.is_dir():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink(missing_ok=True)
    return file


# Errors of a path. Others with a number are faults of the machine: EIO, ESTALE, EMFILE, EACCES, ENOSPC, ...
WRONG_PATH = (errno.ENOENT, errno.EISDIR, errno.ENOTDIR)


def raise_fault(error: Exception, path: str | Path | None = None) -> None:
    """If the machine failed, not the file, raise an OSError that names the file; Pillow's own have no number."""
    code = errno.ENOMEM if is_out_of_memory(error) else getattr(error, "errno", None)
    if code and code not in WRONG_PATH:
        raise OSError(code, os.strerror(code), getattr(error, "filename", None) or path) from error


@contextmanager
def reading(path: str | Path, fault: str = "is damaged or truncated"):
    """Turn an exception into a UserError, as libraries raise nearly every kind on a damaged file; but a fault of the
    machine into an OSError, so that nobody takes the file for a damaged one."""
    try:
        yield
    except Exception as error:
        raise_fault(error, path)
        if isinstance(error, FileNotFoundError):
            raise UserError(f"no such file: {error.filename or path}") from None
        if isinstance(error, OSError):
            raise UserError(f"{path} cannot be read: {error.strerror or error}") from None
        with suppress(OSError, TypeError), open(path, "rb") as file:  # TypeError: an array
            if file.read(30).startswith(b"version https://git-lfs"):
                raise UserError(f"{path} is only git-lfs's pointer to the file; get it by: git lfs pull") from None
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} {fault}: {type(error).__name__}: {str(error)[:300]}") from error


def sha256_of(*paths: Path) -> str:
    """The hash of a file, or of several as `cat` joins them."""
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


def read_json(path: Path) -> dict:
    with reading(path):
        return {**json.loads(path.read_bytes())}


def why_corrupt(checkpoint: Path, hashes: bool = True, file: str = "") -> str:
    """Why a checkpoint is corrupt, or "" if every file, or the one of this name, has the manifest's size and hash."""
    try:
        for name, entry in read_json(checkpoint / "manifest.json").items():
            if file and name != file:
                continue
            path = checkpoint / name
            with reading(path, "is not in the manifest as it should be"):
                size = path.stat().st_size
                if size != entry["size"]:
                    return f"{name} has {size:,} bytes, the manifest says {entry['size']}"
                if hashes and sha256_of(path) != entry["sha256"]:
                    return f"{name} does not match its SHA-256"
    except UserError as error:
        return str(error)
    return ""


def download(url: str, path: Path, num_bytes: int, sha256: str, otherwise: str) -> None:
    """Fetch a published file to `path`, verified. `otherwise`: what to do if that fails."""
    print0(f"downloading {url} ({num_bytes / 1e6:.0f} MB, once)")
    os.makedirs(path.parent, exist_ok=True)
    try:
        with (
            urllib.request.urlopen(url, timeout=60) as response,
            writing(path, {}) as file,
            Progress(num_bytes, "bytes", "downloading") as bar,
        ):
            while part := response.read(2**20):
                file.write(part)
                bar.update(len(part))
            digest = file.sha256.hexdigest()
            if digest != sha256:
                raise UserError(f"{url} sent {bar.done:,} bytes with SHA-256 {digest}, expected {sha256}")
    except (OSError, http.client.HTTPException) as error:  # URLError and timeouts are OSErrors
        raise UserError(f"could not download {url}: {error}; {otherwise}") from None


def load_tensors(path: Path, mmap: bool = False):
    """The only torch.load of the package: it accepts tensors and plain containers, never code. `mmap`: read tensors
    when they are used; only for our own files."""
    fault = "cannot be loaded safely as tensors"
    with reading(path, fault), open(path, "rb") as file, warnings.catch_warnings(action="ignore"):  # pickle protocols
        try:
            # Meta's training checkpoints hold an argparse.Namespace, a class without code of its own
            with torch.serialization.safe_globals([argparse.Namespace]):
                # By its path torch would take a file called .safetensors for one
                return torch.load(path if mmap else file, map_location="cpu", weights_only=True, mmap=mmap)
        except pickle.UnpicklingError as error:
            # The first sentence says what was refused; drop the next, which tells how to load it anyway
            reason = str(error.__context__ or error).strip().split("\n")[0].split(". ")[0]
            raise UserError(f"{path} {fault}: {reason[:200]}") from None
