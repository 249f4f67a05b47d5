"""Checkpoints that survive a kill: written to a temporary folder, hashed meanwhile, then renamed; verified before use.
A thread writes them while training continues.

runs/<tag>/checkpoints/step_000500/
    model.safetensors  ema_0.999.safetensors       weights; their metadata describes them, so each file is an export
    optim.pt  train.pt                             to resume: for torch.load(weights_only=True)
    meta.json                                      to resume: step, settings, model config, loop state
    manifest.json                                  size and SHA-256 of each file above: written last
runs/<tag>.left_.../                               what is of another branch or run: see go_back
"""

import contextlib
import json
import os
import re
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from nanodiff.common import UserError, base_dir, get_dist, print0
from nanodiff.conditions import DataInfo
from nanodiff.device import free_host_memory
from nanodiff.dist import collective, from_first_rank, wait_for_first_rank
from nanodiff.files import fsync, lock_file, publish_folder, read_json, why_corrupt, write_json, writing
from nanodiff.safetensors import described, save_safetensors


def is_base(run_dir: Path, step: int) -> bool:
    """Do adapters or a flow map of another run need this checkpoint?"""
    base = json.dumps(f"{run_dir.name},step={step},ema=")[:-1]  # as written: letters beyond ASCII are escaped
    with contextlib.suppress(OSError):  # another run is deleting one: retried after the next checkpoint
        return any(f": {base}" in meta.read_text() for meta in run_dir.parent.glob("*/checkpoints/*/meta.json"))
    return True


def save_checkpoint(
    run_dir: Path,
    step: int,
    tensors: dict[str, object],
    meta: dict,
    keep: int = -1,
) -> Path:
    """On rank 0: write checkpoints/step_<step>, with a file for each of `tensors` (weights, optim, train).

    Then delete the oldest checkpoints beyond `keep` intact ones (-1 keeps all). FloatingPointError if weights or
    averages are not finite.
    """
    for name in tensors.keys() - {"optim", "train"}:
        for key, x in tensors[name].items():
            if not x.isfinite().all():
                raise FloatingPointError(f"step {step}: {name}: {key} is not finite; earlier checkpoints are intact")
    parent = run_dir / "checkpoints"
    temporary = parent / f".tmp-step_{step:06d}"
    final = parent / f"step_{step:06d}"
    manifest = {}
    try:
        parent.mkdir(exist_ok=True)  # without its parents: fails if the run's folder was moved during training
        temporary.mkdir()
        for name, value in tensors.items():
            if name in ("optim", "train"):
                with writing(temporary / f"{name}.pt", manifest) as file:
                    torch.save(value, file)
            else:
                ema = "raw" if name == "model" else name.removeprefix("ema_")
                file = temporary / f"{name}.safetensors"
                save_safetensors(value, file, described(meta | {"ema": ema}), manifest)
        write_json(temporary / "meta.json", meta, manifest)
        write_json(temporary / "manifest.json", manifest)
        with contextlib.suppress(FileNotFoundError):
            fsync(run_dir / "metrics.jsonl")  # a checkpoint's log lines are on the disk before it
        publish_folder(temporary, final)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(f"cannot write {final}: {error.strerror}; earlier checkpoints are intact") from error
    # Later steps do not count: the run was resumed from an earlier one
    intact = [s for s in intact_steps(run_dir) if s <= step]
    for s, path in list_checkpoints(run_dir):
        if keep > 0 and s < min(intact[-keep:], default=0) and not is_base(run_dir, s):
            shutil.rmtree(path, ignore_errors=True)
    return final


def intact_steps(run_dir: Path) -> list[int]:
    """Steps of the checkpoints whose files have the right sizes; hashes are not compared."""
    return [s for s, path in list_checkpoints(run_dir) if not why_corrupt(path, hashes=False)]


class Saver:
    """Runs save_checkpoint in a thread, one at a time, while training continues. `step`: of the newest checkpoint."""

    running = None  # the save in progress

    def __init__(self, step: int = -1):
        self.step = step
        self.thread = ThreadPoolExecutor(1)  # the process waits for it before it exits

    def start(self, *args) -> None:
        """save_checkpoint(*args), after wait(). Its tensors must be copies: training changes the weights meanwhile."""
        self.running = self.thread.submit(save_checkpoint, *args)

    def check(self, waiting: bool = False) -> None:
        """Report a save that has ended (`waiting`: wait for its end), or raise its error. Call at every step."""
        if self.running and (waiting or self.running.done()):
            task = self.running
            self.running = None
            print0(f"saved {task.result()}")
            free_host_memory()  # of the copies

    @collective("the end of rank 0's save")
    def wait(self) -> None:
        """Wait, on every rank, for rank 0's save in progress, however long it takes."""
        self.check(waiting=True)
        wait_for_first_rank()


def list_checkpoints(run_dir: Path, pattern: str = "checkpoints/step_*"):
    """(step, folder) of every checkpoint, oldest first, not verified. Another `pattern` may also find grids."""
    checkpoints = []
    for path in run_dir.glob(pattern):
        if match := re.fullmatch(r"step_(\d{6,})", path.stem):
            checkpoints.append((int(match[1]), path))
    return sorted(checkpoints)


def find_checkpoint(run_dir: Path, step: int | str = "newest") -> Path | None:
    """The newest intact checkpoint, or that of a step; None if the run has none. Reports and skips corrupt ones."""
    checkpoints = dict(list_checkpoints(run_dir))
    if step != "newest":
        path = checkpoints.get(int(step))
        if path is None:
            steps = ", ".join(map(str, checkpoints)) or "none"
            raise UserError(f"{run_dir} has no checkpoint of step {step}; it has: {steps}")
        checkpoints = {step: path}
    for path in reversed(checkpoints.values()):
        fault = why_corrupt(path)
        if not fault:
            return path
        print0(f"corrupt checkpoint skipped: {path}: {fault}")
    if checkpoints:
        raise UserError(f"no intact checkpoint in {run_dir}/checkpoints; move the corrupt ones away to start over")
    return None


def find_weights(run_dir: Path, step: int | str = "newest", ema: str = "") -> Path:
    """The file of weights in the checkpoint from find_checkpoint. `ema`: a rate, "raw", or "" for the first rate."""
    checkpoint = find_checkpoint(run_dir, step)
    if checkpoint is None:
        raise UserError(
            f"{run_dir} is no run with a checkpoint; to load a file of weights in it, name the file; "
            f"it has {', '.join(sorted(os.listdir(run_dir)))[:300] or 'nothing'}"
        )
    averages = [*map(str, load_meta(checkpoint)["ema_rates"]), "raw"]
    ema = str(ema or averages[0])
    if ema not in averages:
        raise UserError(f"ema={ema!r} was not kept by this run; it has: {', '.join(averages)}")
    return checkpoint / ("model.safetensors" if ema == "raw" else f"ema_{ema}.safetensors")


def load_meta(checkpoint: Path) -> dict:
    return read_json(checkpoint / "meta.json")


def run_folder(model_tag: str) -> Path:
    """The folder of the run `model_tag`: a name, not a path."""
    if not re.fullmatch(r"(?!-|\.+$)[\w.+=@-]+", model_tag):
        raise UserError(f"model_tag={model_tag!r}; accepted: letters, digits and _ . + = @ -, not - first")
    return base_dir() / "runs" / model_tag


def lock_run(run_dir: Path):
    """Let only one process train the run, and remove the unfinished files of a killed one."""
    busy = f"another process is training in {run_dir}; stop it or choose another model_tag"
    leftovers = ".config.json.* .report.html.* samples/.step_* checkpoints/.*tmp-*"
    return lock_file(run_dir / ".lock", busy, hint="model_tag and NANODIFF_BASE_DIR", leftovers=leftovers.split())


def resume_point(run_dir: Path, resume: str):
    """A collective: the checkpoint that a run resumes from and its meta.json, or (None, {}) for a new run.

    `resume`: auto, never, changed, or a step. The first rank finds and verifies the checkpoint for all.
    """
    rank, _, world = get_dist()
    checkpoint = None
    if rank == 0:
        checkpoint = find_checkpoint(run_dir)
        # A command that went back and was killed later resumes from its own newest checkpoint
        if resume.isdigit() and not (checkpoint and load_meta(checkpoint).get("command") == sys.argv[1:]):
            checkpoint = find_checkpoint(run_dir, resume)
    checkpoint = from_first_rank(checkpoint, "the checkpoint to resume from")
    if checkpoint is None:
        return None, {}
    if fault := why_corrupt(checkpoint, hashes=False):
        raise UserError(f"rank {rank} of {world} cannot open {checkpoint}, which rank 0 resumes from: {fault}")
    if resume == "never":
        raise UserError(f"resume=never, but {run_dir} holds checkpoints: move them away or choose another model_tag")
    meta = load_meta(checkpoint)
    return checkpoint, meta | {"data": DataInfo(**meta["data"])}


def go_back(run_dir: Path, step: int) -> bool:
    """For --resume=STEP, or a new run in an old folder: put later checkpoints, grids and figures aside, as they are not
    this run's. Returns whether there were any."""
    later = [path for s, path in list_checkpoints(run_dir, "*/step_*") if s > step]
    for path in run_dir.glob("eval_*.json"):
        if (match := re.match(r"eval_[a-z_]+_(\d{6,})", path.name)) and int(match[1]) > step:
            later.append(path)
    if not later:
        return False
    archive = Path(tempfile.mkdtemp(dir=run_dir.parent, prefix=f"{run_dir.name}.left_"))
    for file in run_dir.glob("metrics.jsonl"):  # unless somebody has removed it
        shutil.copy(file, archive)
    for path in later:
        path.rename(archive / path.name)
    print0(f"back at step {step}: later checkpoints, grids and the log are now in {archive}")
    return True


def way_back(run_dir: Path) -> str:
    """What to try when a gradient or metric is not finite. The newest checkpoint may already be diverging."""
    steps = ", ".join(map(str, intact_steps(run_dir))) or "none"
    return (
        f"give --resume=STEP from before the loss grew (saved: {steps}) or --model_tag=NEW, and "
        "a lower lr and muon_lr, --dtype=float32 or --compile=False"
    )


def trim_metrics(path: Path, step: int) -> None:
    """Drop metrics.jsonl lines that a run resuming from `step` logs again, and a half-written last line.

    A step's training line precedes its checkpoint, its evaluation line follows.
    """
    if not path.exists():
        return
    place = end = 0  # in bytes; end: of the last line that stays
    with open(path, "rb") as file:
        for text in file:
            place += len(text)
            match = re.match(rb'{"step": (\d+)\b.*}\n', text)  # "step" comes first; parsing the JSON would be slow
            if match and int(match[1]) < step + (b'"train/loss"' in text):
                end = place
    os.truncate(path, end)
