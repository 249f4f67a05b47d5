"""Checkpoints that survive a kill at any moment: written aside, hashed, renamed; verified before use.

runs/<tag>/checkpoints/step_000500/
    model.pt  ema_0.999.pt  optim.pt  train.pt     for torch.load(weights_only=True)
    meta.json                                      step, settings, model config, loop state
    manifest.json                                  size and SHA-256 of each file above: written last
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
from pathlib import Path

import torch

from nanodiff.common import UserError, print0
from nanodiff.files import check_fields, lock_file, publish_folder, read_small, sha256_of, write_atomic

IN_USE = "in_use"  # a file in a checkpoint that adapters need: it is not deleted for newer ones
STEP_DIR = re.compile(r"step_(\d{6,})")


class HashingFile:
    """A binary file for torch.save that hashes what passes through; close() syncs it and returns size and hash."""

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
    """Write checkpoints/step_<step>, with <name>.pt for each of `tensors`; on rank 0.

    The folder gets its name when all of it is on the disk. Then the oldest checkpoints beyond `keep` (-1 keeps all) are
    deleted.
    """
    parent = run_dir / "checkpoints"
    for leftover in parent.glob(".*tmp-*"):  # of a run killed while it saved: the run's lock is ours
        shutil.rmtree(leftover, ignore_errors=True)
    temporary, final = parent / f".tmp-step_{step:06d}", parent / f"step_{step:06d}"
    try:
        temporary.mkdir(parents=True)
        manifest = {}
        for name, value in tensors.items():
            out = HashingFile(temporary / f"{name}.pt")
            try:
                torch.save(value, out)
            finally:
                manifest[f"{name}.pt"] = out.close()
        for name, value in (("meta.json", meta), ("manifest.json", manifest)):
            out = HashingFile(temporary / name)
            out.write(json.dumps(value, indent=1).encode())
            manifest[name] = out.close()
        publish_folder(temporary, final)
    except (OSError, RuntimeError) as error:  # torch raises a RuntimeError after the OSError of the file's write
        shutil.rmtree(temporary, ignore_errors=True)
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        raise UserError(f"cannot write checkpoint {final}: {cause.strerror}; earlier checkpoints are intact") from error
    if keep > 0:
        # Later steps, of a run that was resumed from an earlier one, do not count
        found = [(s, path) for s, path in list_checkpoints(run_dir) if s <= step]
        intact = [s for s, path in found if not why_corrupt(path, hashes=False)]
        for old_step, old in found:
            if old_step < intact[-keep:][0] and not (old / IN_USE).exists():
                shutil.rmtree(old, ignore_errors=True)
    return final


def keep_checkpoint(checkpoint: Path) -> None:
    """Mark a checkpoint that adapters need, so that a run that goes on there does not delete it."""
    with contextlib.suppress(OSError):  # in a folder that cannot be written to nobody deletes
        (checkpoint / IN_USE).touch()


def list_checkpoints(run_dir: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every checkpoint, oldest first, not verified."""
    found = [(STEP_DIR.fullmatch(p.name), p) for p in (run_dir / "checkpoints").glob("step_*")]
    return sorted((int(match[1]), path) for match, path in found if match)


def why_corrupt(checkpoint: Path, hashes: bool = True) -> str:
    """What is wrong with a checkpoint, or "" when every file has the manifest's size and hash."""
    name = "manifest.json"
    try:
        manifest = json.loads(read_small(checkpoint / name))
        if not {"meta.json", "model.pt"} <= manifest.keys():
            return "manifest.json does not list the model"
        for name, entry in manifest.items():
            path = checkpoint / name
            if path.stat().st_size != entry["size"]:
                return f"{name} has {path.stat().st_size:,} bytes, the manifest says {entry['size']}"
            if hashes and sha256_of(path) != entry["sha256"]:
                return f"{name} does not have its SHA-256"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        return "manifest.json cannot be read"
    return ""


def find_checkpoint(run_dir: Path, step: int | None = None) -> Path | None:
    """The newest checkpoint that verifies, or the one of `step`; None if the run has none.

    Corrupt ones are reported and skipped; it is an error if all are corrupt.
    """
    found = list_checkpoints(run_dir)
    if step is not None:
        steps = ", ".join(str(s) for s, _ in found) or "none"
        found = [(s, path) for s, path in found if s == step]
        if not found:
            raise UserError(f"{run_dir} has no checkpoint of step {step}; it has: {steps}")
    for _, path in reversed(found):
        fault = why_corrupt(path)
        if not fault:
            return path
        print0(f"corrupt checkpoint skipped: {path}: {fault}")
    if found:
        raise UserError(
            f"every checkpoint in {run_dir / 'checkpoints'} is corrupt; move that folder away to start anew"
        )
    return None


def load_meta(checkpoint: Path) -> dict:
    path = checkpoint / "meta.json"
    try:
        meta = json.loads(read_small(path))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    check_fields(meta, path, step=int, config=dict, arch=str, model_config=dict, data=dict, ema_rates=list, loop=dict)
    return meta


def lock_run(run_dir: Path):
    busy = f"another process is training in {run_dir}; stop it or choose another model_tag"
    return lock_file(run_dir / ".lock", busy, hint="model_tag and NANODIFF_BASE_DIR")


def trim_metrics(path: Path, step: int) -> None:
    """Drop from metrics.jsonl what a run that resumes from `step` logs again, and a half-written last line.

    A training line of step s precedes the checkpoint of step s, its evaluation line follows it.
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
