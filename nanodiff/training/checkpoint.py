"""Checkpoints that survive a kill: written to a temporary folder, hashed, renamed; verified before use. A thread
writes them while training goes on.

runs/<tag>/checkpoints/step_000500/
    model.pt  ema_0.999.pt  optim.pt  train.pt     for torch.load(weights_only=True)
    meta.json                                      step, settings, model config, loop state
    manifest.json                                  size and SHA-256 of each file above: written last
runs/<tag>/best.json                               step of the best checkpoint, and the figure by which it is
"""

import contextlib
import json
import math
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from nanodiff.common import UserError, print0
from nanodiff.files import lock_file, publish_folder, reading, sha256_of, write_atomic, writing

STEP_DIR = re.compile(r"step_(\d{6,})")


def save_checkpoint(
    run_dir: Path,
    step: int,
    tensors: dict[str, object],
    meta: dict,
    keep: int = -1,
) -> Path:
    """Write checkpoints/step_<step>, with <name>.pt for each of `tensors`; on rank 0.

    Then delete the oldest checkpoints beyond `keep` (-1 keeps all), but not the best.
    """
    parent = run_dir / "checkpoints"
    for leftover in parent.glob(".*tmp-*"):  # left by a run killed while saving: we hold its lock
        shutil.rmtree(leftover, ignore_errors=True)
    temporary, final = parent / f".tmp-step_{step:06d}", parent / f"step_{step:06d}"
    try:
        temporary.mkdir(parents=True)
        for name, value in tensors.items():
            with writing(temporary / f"{name}.pt") as file:
                torch.save(value, file)
        write_atomic(temporary / "meta.json", json.dumps(meta, indent=1).encode())
        files = sorted(temporary.iterdir())
        manifest = {path.name: {"size": path.stat().st_size, "sha256": sha256_of(path)} for path in files}
        write_atomic(temporary / "manifest.json", json.dumps(manifest, indent=1).encode())
        publish_folder(temporary, final)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(f"cannot write checkpoint {final}: {error.strerror}; earlier checkpoints are intact") from error
    if keep > 0:
        # Ignore later steps: the run was resumed from an earlier one
        found = [(s, path) for s, path in list_checkpoints(run_dir) if s <= step]
        oldest = [s for s, path in found if not why_corrupt(path, hashes=False)][-keep:][0]
        best_step = read_best(run_dir).get("step")
        for s, path in found:
            if s < oldest and s != best_step:
                shutil.rmtree(path, ignore_errors=True)
    return final


class Saver:
    """Calls save_checkpoint in a thread, so that training goes on; one at a time."""

    def __init__(self):
        self.thread = ThreadPoolExecutor(1)  # at its end, the process waits for it
        self.running = None  # the save in progress

    def start(
        self,
        run_dir: Path,
        step: int,
        tensors: dict,
        meta: dict,
        keep: int = -1,
    ) -> None:
        """`tensors` must be copies: training changes the weights meanwhile."""
        self.wait()
        self.running = self.thread.submit(save_checkpoint, run_dir, step, tensors, meta, keep)

    def check(self) -> None:
        """Report a save that has ended; raise its error, if any. Call at every step."""
        if self.running and self.running.done():
            self.wait()

    def wait(self) -> None:
        """Wait for the save in progress, if any."""
        if self.running:
            saved, self.running = self.running, None
            print0(f"saved {saved.result()}")


def mark_if_best(run_dir: Path, step: int, metric: str, value: float) -> None:
    """Note that the checkpoint of `step` is the run's best so far, if it is: lower is better. It then stays."""
    best = read_best(run_dir)
    # A run that went back to an earlier step compares no more with what it left
    comparable = best.get("metric") == metric and best["step"] < step
    if math.isfinite(value) and (not comparable or value < best["value"]):
        write_atomic(run_dir / "best.json", json.dumps({"step": step, "metric": metric, "value": value}).encode())


def read_best(run_dir: Path) -> dict:
    """step, metric and value of the best checkpoint; {} if none has been measured."""
    path = run_dir / "best.json"
    if not path.exists():
        return {}
    with reading(path):
        return json.loads(path.read_bytes())


def list_checkpoints(run_dir: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every checkpoint, oldest first, not verified."""
    found = [(STEP_DIR.fullmatch(p.name), p) for p in (run_dir / "checkpoints").glob("step_*")]
    return sorted((int(match[1]), path) for match, path in found if match)


def why_corrupt(checkpoint: Path, hashes: bool = True) -> str:
    """What is wrong with a checkpoint, or "" if every file has the manifest's size and hash."""
    name = "manifest.json"
    try:
        manifest = json.loads((checkpoint / name).read_bytes())
        if not {"meta.json", "model.pt"} <= manifest.keys():
            return "manifest.json does not list the model"
        for name, entry in manifest.items():
            path = checkpoint / name
            if path.stat().st_size != entry["size"]:
                return f"{name} has {path.stat().st_size:,} bytes, the manifest says {entry['size']}"
            if hashes and sha256_of(path) != entry["sha256"]:
                return f"{name} does not match its SHA-256"
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    except (ValueError, AttributeError, KeyError, TypeError):
        return "manifest.json cannot be read"
    return ""


def find_checkpoint(run_dir: Path, step: int | str = "newest") -> Path | None:
    """The newest intact checkpoint, the "best", or that of a step; None if the run has none. Corrupt ones are
    reported."""
    found = list_checkpoints(run_dir)
    if step == "best":
        step = read_best(run_dir).get("step")
        if step is None:
            raise UserError(f"{run_dir} has no best checkpoint: none was evaluated when it was saved; accepted: newest")
        if step not in dict(found):  # the run was killed while it was being saved
            print0(f"the best checkpoint, of step {step}, was not saved to its end: the newest instead")
            step = "newest"
    if step != "newest":
        steps = ", ".join(str(s) for s, _ in found) or "none"
        found = [(s, path) for s, path in found if s == int(step)]
        if not found:
            raise UserError(f"{run_dir} has no checkpoint of step {step}; it has: {steps}")
    for _, path in reversed(found):
        fault = why_corrupt(path)
        if not fault:
            return path
        print0(f"corrupt checkpoint skipped: {path}: {fault}")
    if found:
        raise UserError(f"every checkpoint in {run_dir}/checkpoints is corrupt; move that folder away to start anew")
    return None


def load_meta(checkpoint: Path) -> dict:
    path = checkpoint / "meta.json"
    with reading(path):
        return json.loads(path.read_bytes())


def lock_run(run_dir: Path):
    busy = f"another process is training in {run_dir}; stop it or choose another model_tag"
    return lock_file(run_dir / ".lock", busy, hint="model_tag and NANODIFF_BASE_DIR")


def trim_metrics(path: Path, step: int) -> None:
    """Drop metrics.jsonl lines that a run resuming from `step` logs again, and a half-written last line.

    A step's training line precedes its checkpoint, its evaluation line follows.
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
