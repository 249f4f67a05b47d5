"""Where a run starts: its folder, the checkpoint it resumes from, the batch that fits."""

import re
from pathlib import Path

import torch
import torch.distributed as dist

from nanodiff.common import UserError, base_dir, from_first_rank, get_dist, is_out_of_memory, over_ranks, print0
from nanodiff.conditions import some_conditions
from nanodiff.device import reset_peak_memory
from nanodiff.diffusion.guidance import learns_guidance
from nanodiff.diffusion.timesteps import make_timesteps
from nanodiff.training.checkpoint import (
    find_checkpoint,
    is_same_command,
    list_checkpoints,
    load_meta,
    read_best,
    why_corrupt,
)

# Settings that a resumed run may change freely, since they do not shape the weights
FREE = {
    "run", "model_tag", "resume", "device_type", "compile", "deterministic", "device_batch_size", "checkpointing",
    "autoencoder", "ema_rates", "eval_every", "eval_images", "fid_every", "fid_images",
    "fid_metric", "bpd_every", "sample_every", "sample_steps", "sampler", "cfg_scale", "cfg_interval", "save_every",
    "save_epochs", "checkpoints_kept", "log_every",
}  # fmt: skip

# Those that it may change with --resume=changed or --resume=STEP. All others are fixed: they make the model what it is
RATES = {
    "num_iterations", "num_epochs", "target_flops", "target_param_data_ratio", "lr", "muon_lr", "weight_decay", "beta2",
    "grad_clip", "warmup_ratio", "warmdown_ratio", "dtype",
}  # fmt: skip


def run_folder(model_tag: str) -> Path:
    """The folder of the run `model_tag`: a name, not a path."""
    if not re.fullmatch(r"(?!-|\.+$)[\w.+=,@-]+", model_tag):
        raise UserError(f"model_tag={model_tag!r}; accepted: letters, digits and _ . + = , @ -, not - first")
    return base_dir() / "runs" / model_tag


def resume_point(run_dir: Path, resume: str) -> tuple[Path | None, dict]:
    """The checkpoint that a run resumes from and its meta.json, or (None, {}) to start; a collective.

    `resume`: auto, never, changed, or a step. The first rank finds and verifies the checkpoint for all.
    """
    rank, _, world = get_dist()
    checkpoint, meta = None, {}
    if rank == 0:
        goes_back = resume.isdigit() and not is_same_command(run_dir)
        checkpoint = find_checkpoint(run_dir, resume if goes_back else "newest")
        if checkpoint:
            meta = load_meta(checkpoint)
            best = read_best(run_dir)
            if not best or best["step"] > meta["step"]:  # not this branch's, or not saved to its end
                best = meta["loop"].get("best") or {}
            is_kept = best.get("step") in dict(list_checkpoints(run_dir))
            meta["loop"]["best"] = best if is_kept else None
    checkpoint, meta = from_first_rank((checkpoint, meta), "the checkpoint to resume from")
    if checkpoint is None:
        return None, {}
    fault = why_corrupt(checkpoint, hashes=False) if rank else ""
    if fault:
        raise UserError(f"rank {rank} of {world} cannot open {checkpoint}, which rank 0 resumes from: {fault}")
    if resume == "never":
        raise UserError(f"resume=never, but {run_dir} holds checkpoints: move them away or choose another model_tag")
    return checkpoint, meta


def check_settings(checkpoint: Path, meta: dict, config) -> None:
    """Refuse settings that differ from the checkpoint's, unless they are FREE or, on request, RATES.

    `config` is a configurator.Config. A setting missing from the checkpoint had its default.
    """
    tag, changed = checkpoint.parents[1].name, {}
    for key, value in config.items():
        was = meta["config"].get(key, config.defaults[key])
        # 0 steps train nothing; -1 was derived from the other settings of the horizon, which are compared
        is_same_horizon = key == "num_iterations" and (value == 0 or was == -1)
        if value != was and not is_same_horizon:
            changed[key] = f"{key}={value!r} (was {was!r})"
    free = FREE - {"cfg_scale", "cfg_interval"} if learns_guidance(config) else FREE
    fixed = [text for key, text in changed.items() if key not in free | RATES]
    if fixed:
        raise UserError(f"{tag} was trained with other settings: {', '.join(fixed)}; use another model_tag")
    rates = [text for key, text in changed.items() if key in RATES]
    if rates and config["resume"] == "auto":
        hint = "--model_tag=NAME for a new run, or --resume=changed to continue with them"
        raise UserError(f"{tag} was trained with other settings: {', '.join(rates)}; give {hint}")
    print0(f"resumed from {checkpoint}" + (f", now with {', '.join(changed.values())}" if changed else ""))


def refuse_useless(config: dict, description: dict, conditions: list[str]) -> None:
    """UserError for settings of base_train that the data or the model leave nothing to do.

    `description`: of the codec; `conditions`: those that training drops.
    """
    kind = description["kind"]
    if config["latent_norm"] != "channels" and kind == "images":
        what = f"latent_norm={config['latent_norm']!r} would do nothing"
        raise UserError(f"{what}: {config['data']} holds images, and no autoencoder is given")
    if config["bpd_every"] >= 0 and kind != "images":
        raise UserError(f"bpd_every={config['bpd_every']}: bits/dim need uint8 images, not {kind}; -1 = never")
    if config["guided_from"] < 1 and not (conditions and config["label_drop"] > 0 and config["cfg_scale"] > 1):
        needs = "classes or vectors, label_drop > 0 and cfg_scale > 1"
        raise UserError(f"guided_from={config['guided_from']} needs {needs}; accepted: 1")


def last_step(checkpoint: Path | None, step: int, num_iterations: int) -> int:
    """The horizon of a run that stands at `step`: num_iterations, or `step` itself for 0, which trains nothing."""
    if num_iterations == 0:
        return step
    if step > num_iterations:
        raise UserError(
            f"num_iterations={num_iterations}: {checkpoint} is at step {step}; accepted: {step} or more, or 0"
        )
    return num_iterations


def cadence(every: float, num_iterations: int) -> int:
    """Steps from one evaluation to the next. Less than 1 is a fraction of the run, but 250 steps or more."""
    if 0 < every < 1:
        return max(250, round(every * num_iterations))
    return int(every)


def cut_batch(total_batch_size: int, device_batch_size: int, world: int) -> tuple[int, int]:
    """(images per forward pass of one rank, at most its share of the step; micro-steps)."""
    device_batch_size = min(device_batch_size, max(total_batch_size // world, 1))
    if total_batch_size % (device_batch_size * world):
        micro = f"device_batch_size x ranks = {device_batch_size} x {world}"
        raise UserError(f"total_batch_size={total_batch_size} is not a multiple of {micro}")
    return device_batch_size, total_batch_size // (device_batch_size * world)


def automatic_batch(model, process, shape: tuple, autocast, optim, share: int) -> int:
    """Images per forward pass for a rank's `share` of the step: on CUDA as many as fit, elsewhere up to 64."""
    device = next(model.parameters()).device
    share = max(share, 1)
    if device.type != "cuda":
        return max(n for n in range(1, min(share, 64) + 1) if share % n == 0)
    found = largest_batch(model, process, shape, autocast, optim, share)
    reset_peak_memory(device)  # the run's own is to be reported
    return found


MEMORY_TRIED = 0.95  # of a GPU's


def largest_batch(model, process, shape: tuple, autocast, optim, limit: int) -> int:
    """The largest divisor of `limit`, a rank's share of the step, that fits into memory on every rank.

    Tries forward and backward passes of the uncompiled model, which takes more memory than the compiled one, after
    optimizer and averages have theirs. Takes as long as two to four steps. A collective.
    """
    device = next(model.parameters()).device
    timesteps = make_timesteps("uniform", process)

    def try_batch(n):
        x0 = torch.randn(n, *shape, device=device)
        cond = some_conditions(model.config, n, device)
        t, _ = timesteps.sample(torch.rand(n, device=device))
        with autocast:
            loss = process.losses(model, x0, t, x0, cond)["loss"]
        loss.mean().backward()

    if device.type == "cuda":  # a margin for what is not tried here: gradients in exchange, the optimizer's temporaries
        torch.cuda.set_per_process_memory_fraction(MEMORY_TRIED, device)
    fits = 0
    for n in [n for n in range(1, limit + 1) if limit % n == 0]:
        try:
            try_batch(n)
            refused = False
        except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
            refused = is_out_of_memory(error)
            if not refused:
                raise
        # Not in the except block: there the error's frames keep their tensors alive
        optim.zero_grad()
        if refused:
            break
        fits = n
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    fits = int(over_ranks(fits, dist.ReduceOp.MIN, "the agreement on device_batch_size"))
    if fits == 0:
        raise UserError("not even one image at a time fits into memory: lower depth, or give --checkpointing")
    return fits
