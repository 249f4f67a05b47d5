"""Where a run starts: its folder, the checkpoint it resumes from, the batch that fits."""

import re
from pathlib import Path

import torch
import torch.distributed as dist

from nanodiff.common import UserError, base_dir, collective, print0
from nanodiff.diffusion.guidance import conditioning
from nanodiff.diffusion.timesteps import make_timesteps
from nanodiff.training.checkpoint import find_checkpoint, load_meta

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
