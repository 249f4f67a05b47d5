"""Checkpoints that survive a kill at any moment: written aside, hashed, fsynced, renamed; verified before use.

runs/<tag>/checkpoints/step_000500/
    model.pt  ema_0.999.pt  optim.pt  train.pt     tensors, each torch.load(weights_only=True)-able
    meta.json                                      step, settings, model and process configs, loop state
    manifest.json                                  size and SHA-256 of each file above: written last
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
from pathlib import Path

import torch

from nanodiff.common import UserError, print0
from nanodiff.files import fsync_dir, write_atomic

STEP_DIR = re.compile(r"step_(\d{6,})")
FILE_NAME = re.compile(r"\w[\w.+-]{0,99}", re.ASCII)


class _HashingFile:
    """A binary file for torch.save that hashes what passes through, so that no file is read back to be hashed."""

    def __init__(self, path):
        self.file, self.sha256, self.size = open(path, "wb"), hashlib.sha256(), 0

    def write(self, data):
        self.sha256.update(data)
        self.size += len(data)
        return self.file.write(data)

    def flush(self):
        self.file.flush()

    def close(self):
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()
        return {"size": self.size, "sha256": self.sha256.hexdigest()}


def save_checkpoint(run_dir: Path, step: int, tensors: dict[str, object], meta: dict, keep: int = -1) -> Path:
    """Write checkpoints/step_<step>: `tensors` maps a name to anything weights_only-loadable, saved as <name>.pt.

    Call it on rank 0. The folder appears under its name only when all of it is on the disk; then the oldest
    checkpoints beyond `keep` (-1 keeps all) go. Raises UserError when the disk is full; earlier checkpoints stay.
    """
    parent = run_dir / "checkpoints"
    for leftover in parent.glob(".tmp-*"):  # of a run that was killed while it saved; the run lock says none lives
        shutil.rmtree(leftover, ignore_errors=True)
    tmp, final = parent / f".tmp-step_{step:06d}", parent / f"step_{step:06d}"
    try:
        tmp.mkdir(parents=True)
        manifest = {}
        for name, value in tensors.items():
            out = _HashingFile(tmp / f"{name}.pt")
            try:
                torch.save(value, out)
            finally:
                manifest[f"{name}.pt"] = out.close()
        for name, value in (("meta.json", meta), ("manifest.json", manifest)):
            out = _HashingFile(tmp / name)
            out.write(json.dumps(value, indent=1).encode())
            manifest[name] = out.close()
        fsync_dir(tmp)
        if final.exists():  # a broken one of the same step that resume passed over
            shutil.rmtree(final)
        os.rename(tmp, final)
        fsync_dir(parent)
    except (OSError, RuntimeError) as e:  # torch raises a RuntimeError after what the file's write raised
        shutil.rmtree(tmp, ignore_errors=True)
        cause = e if isinstance(e, OSError) else e.__context__
        if not isinstance(cause, OSError):
            raise
        raise UserError(f"cannot write checkpoint {final}: {cause.strerror}; earlier checkpoints are intact") from e
    if keep > 0:
        # Later steps are of another course, if an earlier one was resumed: they do not crowd out what was saved now
        found = [(s, path) for s, path in list_checkpoints(run_dir) if s <= step]
        complete = [s for s, path in found if not why_broken(path, hashes=False)]
        for old_step, old in found:
            if old_step < complete[-keep:][0]:
                shutil.rmtree(old, ignore_errors=True)
    return final


def list_checkpoints(run_dir: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every checkpoint folder, oldest first; not verified."""
    found = [(STEP_DIR.fullmatch(p.name), p) for p in (run_dir / "checkpoints").glob("step_*")]
    return sorted((int(match[1]), path) for match, path in found if match)


def why_broken(checkpoint: Path, hashes: bool = True) -> str:
    """What is wrong with a checkpoint, in a few words, or "" when every file has the size and hash of the manifest."""
    try:
        manifest = json.loads((checkpoint / "manifest.json").read_bytes())
        files = {str(name): (entry["size"], entry["sha256"]) for name, entry in manifest.items()}
    except OSError:
        return "manifest.json is missing"
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        return "manifest.json cannot be read"
    if not all(type(size) is int and isinstance(sha256, str) for size, sha256 in files.values()):
        return "manifest.json has a size or hash that is none"
    if "meta.json" not in files or "model.pt" not in files:
        return "manifest.json does not list the model"
    for name, (size, sha256) in files.items():
        if not FILE_NAME.fullmatch(name):
            return f"manifest.json lists a file {name[:100]!r}"
        path = checkpoint / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size:,} bytes of {size}"
        if hashes:
            try:
                with open(path, "rb") as f:
                    digest = hashlib.file_digest(f, "sha256").hexdigest()
            except OSError as e:
                return f"{name} cannot be read ({e.strerror})"
            if digest != sha256:
                return f"{name} does not have its SHA-256"
    return ""


def find_checkpoint(run_dir: Path, step: int | None = None) -> Path | None:
    """The newest checkpoint that verifies, or the one of `step`; None where the run has none.

    A broken one is named and passed over. Raises UserError when all are broken or the wanted step is not there.
    """
    found = list_checkpoints(run_dir)
    if step is not None:
        found = [(s, path) for s, path in found if s == step]
        if not found:
            steps = ", ".join(str(s) for s, _ in list_checkpoints(run_dir)) or "none"
            raise UserError(f"{run_dir} has no checkpoint of step {step}; it has: {steps}")
    for _, path in reversed(found):
        fault = why_broken(path)
        if not fault:
            return path
        print0(f"broken checkpoint passed over: {path}: {fault}")
    if found:
        raise UserError(f"every checkpoint in {run_dir / 'checkpoints'} is broken; move that folder away to start anew")
    return None


def load_meta(checkpoint: Path) -> dict:
    """meta.json of a checkpoint; UserError if it is not what save_checkpoint wrote."""
    try:
        meta = json.loads((checkpoint / "meta.json").read_bytes())
    except (OSError, ValueError, RecursionError) as e:
        raise UserError(f"{checkpoint / 'meta.json'} cannot be read: {e}") from e
    wanted = {
        "step": int,
        "config": dict,
        "arch": str,
        "model_config": dict,
        "data": dict,
        "ema_rates": list,
        "loop": dict,
    }
    for key, kind in wanted.items():
        if not isinstance(meta, dict) or not isinstance(meta.get(key), kind):
            raise UserError(f"{checkpoint / 'meta.json'}: {key!r} is missing or not a {kind.__name__}")
    return meta


def lock_run(run_dir: Path, doing: str = "training", setting: str = "model_tag"):
    """Lock the run folder until the returned file is closed or the process dies.

    Raises UserError if another process holds it, `doing` what we were about to, or if the folder cannot be written to;
    it names the `setting` that chooses another folder.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = open(run_dir / ".lock", "a+")
    except OSError as e:
        raise UserError(f"cannot write to {run_dir}: {e.strerror}; see {setting} and NANODIFF_BASE_DIR") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise UserError(f"another process is {doing} in {run_dir}; stop it or choose another {setting}") from None
    except OSError:  # a file system without locks
        pass
    return lock


def trim_metrics(path: Path, step: int) -> None:
    """Before a run goes on from `step`: drop from metrics.jsonl what it will log again, and a half-written last line.

    A training line of step s was written before the checkpoint of step s, its evaluation line after it.
    """
    if not path.exists():
        return
    kept = []
    for text in path.read_bytes().splitlines():
        with contextlib.suppress(ValueError, KeyError, TypeError):
            line = json.loads(text)
            if line["step"] < step or (line["step"] == step and "train/loss" in line):
                kept.append(text + b"\n")
    write_atomic(path, b"".join(kept))
