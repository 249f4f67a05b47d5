"""A run's folder and logs: where it resumes, what it writes, how it ends."""

import base64
import json
import math
import shlex
import sys
from pathlib import Path

import torch

from nanodiff.common import UserError, get_dist, leave_together, print0, sum_over_ranks
from nanodiff.device import environment, peak_memory_gb
from nanodiff.diffusion.timesteps import quartile_sums
from nanodiff.files import names_file, write_atomic
from nanodiff.png import encode_png, terminal_preview
from nanodiff.training.checkpoint import trim_metrics

# ---------------------------------------------------------------------------------------------------------------------
# Start and resume


# ---------------------------------------------------------------------------------------------------------------------
# Logs


class LossTerms:
    """Sums of the loss terms since the last log line; those of the current step also per image."""

    def __init__(self, process):
        self.process = process
        self.parts = []  # current step: {"t": (B,), "weight": (B,), "loss": (B,), ...} of each micro-batch
        self.sums = {}  # name -> (2, 4): see quartile_sums
        self.num_images = 0

    def add(self, t, weight, terms: dict[str, torch.Tensor]) -> None:
        self.parts.append({"t": t, "weight": weight} | {name: x.detach() for name, x in terms.items()})

    def end_step(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(t, unweighted losses) of this rank's images of the step, for the timestep sampler."""
        step = {name: torch.cat([part[name] for part in self.parts]) for name in self.parts[0]}
        t, weight = step.pop("t"), step.pop("weight")
        for name, x in step.items():
            self.sums[name] = self.sums.get(name, 0) + quartile_sums(t, x, weight, self.process)
        self.num_images += len(t)
        self.parts = []
        return t, step["loss"]

    def summary(self, loop: dict, device) -> dict[str, float]:
        """{"train/loss": mean over ranks and steps, "train/loss_q0": mean in the first quarter of t, ...}, with
        importance weights; the same for the other terms. Then resets. A collective.

        "train/loss_running" is nanochat's running mean over about the last ten lines, debiased; `loop` keeps it.
        """
        total = sum_over_ranks(self.sums["loss"].sum(1).cpu().double(), device)
        loss = float(total[0]) / (self.num_images * get_dist()[2])
        if math.isfinite(loss):
            loop["lines"] += 1
            loop["running_loss"] += 0.1 * (loss - loop["running_loss"])
        running = loop["running_loss"] / (1 - 0.9 ** max(loop["lines"], 1))
        line = {"train/loss": loss, "train/loss_running": running}
        for name, sums in self.sums.items():
            weighted, weights = sum_over_ranks(sums.cpu().double(), device)
            line |= {f"train/{name}_q{i}": float(weighted[i] / weights[i]) for i in range(4)}
        self.sums, self.num_images = {}, 0
        return line


def check_wandb(run: str) -> None:
    """Refuse a wandb run that could not log."""
    if run == "dummy" or get_dist()[0] > 0:
        return
    try:
        import wandb
    except ImportError:
        raise UserError(f"run={run!r} logs to wandb, which is not installed: pip install wandb") from None
    if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False, verify=False):
        hint = "`wandb login`, WANDB_MODE=offline or --run=dummy"
        raise UserError(f"run={run!r} logs to wandb, which has no API key here; accepted: {hint}")


def record(path: Path, described: dict, step: int) -> None:
    """Write config.json. A run that resumes from `step` with other settings appends them to its list "changes"."""
    config = described["config"]
    try:
        past = json.loads(path.read_bytes()) if step else described
        changes = past.get("changes", [])
        known = dict(past["config"])
        for change in changes:
            known |= change["config"]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):  # missing or damaged: written anew
        past, known = described, config
    changed = {key: value for key, value in config.items() if known.get(key) != value and key != "resume"}
    if changed:
        change = {"step": step, "config": changed, "num_iterations": described["num_iterations"]}
        past["changes"] = [*changes, change]
    write_atomic(path, json.dumps(past, indent=1).encode())


class RunLog:
    """Writes config.json, metrics.jsonl and samples/ from rank 0, and the same to wandb unless run="dummy".

    `described` goes into config.json, with the machine and the defaults of the settings that were changed.
    """

    def __init__(self, run: str, run_dir: Path, device, described: dict, step: int, wandb_id: str | None):
        self.run_dir, self.file, self.wandb, self.wandb_id = run_dir, None, None, wandb_id
        if get_dist()[0] > 0:
            return
        config = described["config"]
        changed = {key: value for key, value in config.defaults.items() if config[key] != value}
        (run_dir / "samples").mkdir(parents=True, exist_ok=True)
        record(run_dir / "config.json", described | {"changed_from": changed, "environment": environment(device)}, step)
        trim_metrics(run_dir / "metrics.jsonl", step)
        self.file = open(run_dir / "metrics.jsonl", "a")
        if run != "dummy":
            import wandb

            resumed = dict(id=wandb_id, resume="allow", dir=run_dir)
            self.wandb = wandb.init(project="nanodiff", name=run, config=config, **resumed)
            self.wandb_id, self.html = self.wandb.id, wandb.Html

    def metrics(self, line: dict) -> None:
        """Log one JSON object to metrics.jsonl and wandb, without NaN and infinity."""
        if self.file is None:
            return
        line = {key: value for key, value in line.items() if math.isfinite(value)}
        with names_file(self.file.name):
            self.file.write(json.dumps(line) + "\n")
            self.file.flush()
        if self.wandb:
            self.wandb.log(line, step=line["step"])

    def grid(self, grid, step: int) -> None:
        """Write a picture (H, W, C) uint8 to samples/, wandb and, if any, the terminal."""
        if self.file is None:
            return
        png, path = encode_png(grid), self.run_dir / "samples" / f"step_{step:06d}.png"
        write_atomic(path, png)
        if self.wandb:  # as HTML, since wandb.Image would need Pillow
            picture = f'<img src="data:image/png;base64,{base64.b64encode(png).decode()}">'
            self.wandb.log({"samples": self.html(picture)}, step=step)
        print0(f"samples: {path}" + ("\n" + terminal_preview(grid) if sys.stdout.isatty() else ""))


def end(log: RunLog, step: int, stopping: bool, train_time_s: float, device: torch.device) -> None:
    """Print a summary, and leave together with the other ranks."""
    if log.wandb:
        log.wandb.finish()
    if stopping:
        print0(f"stopped by a signal after step {step}: the same command resumes")
    minutes, memory_gb = train_time_s / 60, peak_memory_gb(device)
    print0(f"{step:,} steps in {minutes:.1f} minutes of training, {memory_gb:.1f} GiB of memory at the peak")
    name = shlex.quote(log.run_dir.name)
    print0(f"everything is in {log.run_dir}; to sample: python -m scripts.sample --run={name}")
    leave_together()
