"""A run's folder and logs: where it resumes, what it writes, how it ends."""

import base64
import json
import math
import re
import shlex
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from nanodiff.common import UserError, base_dir, collective, get_dist, leave_together, print0, sum_over_ranks
from nanodiff.device import can_compile, environment, peak_memory_gb
from nanodiff.diffusion.sampling import conditioning, quartile_sums
from nanodiff.diffusion.timesteps import make_timesteps
from nanodiff.files import names_file, write_atomic
from nanodiff.models.build import compile_model
from nanodiff.models.unet import UNet
from nanodiff.png import encode_png, terminal_preview
from nanodiff.training.checkpoint import find_checkpoint, load_meta, trim_metrics

# ---------------------------------------------------------------------------------------------------------------------
# Start and resume

COMPILE_WHOLE = 3000  # steps of a run

# Settings that do not shape the weights: they may change in a resume
FREE = {
    "run", "model_tag", "resume", "device_type", "compile", "deterministic", "device_batch_size", "checkpointing",
    "autoencoder", "base_step", "base_ema", "ema_rates", "eval_every", "eval_images", "fid_every", "fid_images",
    "fid_metric", "bpd_every", "sample_every", "sample_steps", "sampler", "cfg_scale", "cfg_interval", "save_every",
    "save_epochs", "checkpoints_kept", "log_every",
}  # fmt: skip


def run_folder(model_tag: str) -> Path:
    """The folder of the run `model_tag`: a name, not a path."""
    if not re.fullmatch(r"(?!-|\.+$)[\w.+=,@-]+", model_tag):
        raise UserError(f"model_tag={model_tag!r}; accepted: letters, digits and _ . + = , @ -, not - first")
    return base_dir() / "runs" / model_tag


def resume_point(run_dir: Path, resume: str, config: dict, fixed: tuple[str, ...]) -> tuple[Path | None, dict]:
    """The checkpoint that a run resumes from and its meta.json, or (None, {}) to start. `resume`: auto, never, changed,
    a step.

    Settings in `fixed` must agree with the checkpoint's. Others that shape the weights must agree unless `resume` is
    "changed" or a step. A setting missing from the checkpoint had its default.
    """
    checkpoint = find_checkpoint(run_dir, int(resume) if resume.isdigit() else None)
    if checkpoint is None:
        return None, {}
    if resume == "never":
        raise UserError(f"resume=never, but {run_dir} holds checkpoints: move them away or choose another model_tag")
    meta, changed = load_meta(checkpoint), {}
    if ("lora" in meta) != ("base" in config):
        script = "lora_train" if "lora" in meta else "base_train"
        raise UserError(f"{run_dir.name} is a run of {script}; use another model_tag")
    for key, value in config.items():
        was = meta["config"].get(key, config.defaults[key])
        if value != was:
            changed[key] = f"{key}={value!r} (was {was!r})"
    refused = ", ".join(changed[key] for key in fixed if key in changed)
    if refused:
        raise UserError(f"{run_dir.name} was trained with other settings: {refused}; use another model_tag")
    differing = ", ".join(text for key, text in changed.items() if key not in FREE)
    if differing and resume == "auto":
        hint = "--model_tag=NAME for a new run, or --resume=changed to continue with them"
        raise UserError(f"{run_dir.name} was trained with other settings: {differing}; give {hint}")
    print0(f"resumed from {checkpoint}" + (f", now with {', '.join(changed.values())}" if changed else ""))
    return checkpoint, meta


def compiled(model: torch.nn.Module, device: torch.device, num_steps: int) -> torch.nn.Module:
    """The model, compiled where torch.compile works here: block by block, or as a whole if the run is long enough.

    As a whole, at depth 3 on two CPU cores, the first step takes 28 s more, the others 9 to 18 ms less.
    """
    obstacle = can_compile(device)
    if device.type == "cpu" and isinstance(model, UNet):
        obstacle = "a UNet takes minutes to compile on a CPU and gets no faster"
    if obstacle:
        print0(f"not compiled: {obstacle}")
        return model
    whole = num_steps >= COMPILE_WHOLE
    print0(f"torch.compile {'as a whole' if whole else 'by blocks'} ({COMPILE_WHOLE:,} steps or more: as a whole)")
    return compile_model(model, whole)


def cut_batch(total_batch_size: int, device_batch_size: int, world: int) -> tuple[int, int]:
    """(images per forward pass of one rank, at most its share of the step; micro-steps)."""
    device_batch_size = min(device_batch_size, max(total_batch_size // world, 1))
    if total_batch_size % (device_batch_size * world):
        micro = f"device_batch_size x ranks = {device_batch_size} x {world}"
        raise UserError(f"total_batch_size={total_batch_size} is not a multiple of {micro}")
    return device_batch_size, total_batch_size // (device_batch_size * world)


NO_MEMORY = ("out of memory", "can't allocate memory", "bad_alloc")  # MPS; torch's CPU allocator; C++


def largest_batch(model, process, shape: tuple, autocast, optim, limit: int) -> int:
    """The largest power of two that divides `limit`, a rank's share of the step, and fits into memory on every rank.

    Tries forward and backward passes of the uncompiled model, which takes more memory than the compiled one, after
    optimizer and averages have theirs. On a CPU, asking for too much mostly kills the process. A collective.
    """
    device = next(model.parameters()).device
    timesteps = make_timesteps("uniform", process)

    def try_batch(n):
        x0 = torch.randn(n, *shape, device=device)
        y = torch.zeros(n, dtype=torch.int64, device=device)
        t, _ = timesteps.sample(torch.rand(n, device=device))
        with autocast:
            loss = process.losses(model, x0, t, x0, **conditioning(model.config, x0, y))["loss"]
        loss.mean().backward()

    fits, n = 0, 1
    while n <= limit and limit % n == 0:
        try:
            try_batch(n)
            refused = False
        except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
            refused = isinstance(error, torch.OutOfMemoryError | MemoryError) or any(s in str(error) for s in NO_MEMORY)
            if not refused:
                raise
        # Not in the except block: there the error's frames keep their tensors alive
        optim.zero_grad()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if refused:
            break
        fits, n = n, 2 * n
    if dist.is_initialized():
        least = torch.tensor(fits, device="cuda" if dist.get_backend() == "nccl" else "cpu")
        with collective("the agreement on device_batch_size"):
            dist.all_reduce(least, dist.ReduceOp.MIN)
        fits = int(least)
    if fits == 0:
        raise UserError("not even one image at a time fits into memory: lower depth, or give --checkpointing")
    return fits


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


def end(log: RunLog, step: int, stopping: int, train_time_s: float, device: torch.device) -> None:
    """Print a summary, and leave together with the other ranks."""
    if log.wandb:
        log.wandb.finish()
    if stopping:
        print0(f"stopped by signal {stopping} after step {step}: the same command resumes")
    minutes, memory_gb = train_time_s / 60, peak_memory_gb(device)
    print0(f"{step:,} steps in {minutes:.1f} minutes of training, {memory_gb:.1f} GiB of memory at the peak")
    name = shlex.quote(log.run_dir.name)
    print0(f"everything is in {log.run_dir}; to sample: python -m scripts.sample --run={name}")
    leave_together()
