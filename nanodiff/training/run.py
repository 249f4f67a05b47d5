"""What base_train and lora_train share: where a run resumes and reports; a step's batch and random numbers."""

import json
import sys
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from nanodiff.common import UserError, collective, get_dist, leave_together, make_generator, print0
from nanodiff.device import can_compile, environment, peak_flops, peak_memory_gb
from nanodiff.files import names_file, write_atomic
from nanodiff.png import encode_png, terminal_preview
from nanodiff.training.checkpoint import find_checkpoint, trim_metrics
from nanodiff.training.tracking import start_wandb
from nanodiff.web.report import LiveReport


def resume_point(run_dir: Path, resume: str) -> Path | None:
    """The checkpoint that a run goes on from, or None to start; `resume`: auto, never or a step. Raises UserError."""
    if resume not in ("auto", "never") and not resume.isdigit():
        raise UserError(f"resume={resume!r}: accepted are auto, never or the step of a checkpoint")
    checkpoint = find_checkpoint(run_dir, int(resume) if resume.isdigit() else None)
    if checkpoint and resume == "never":
        raise UserError(f"resume=never, but {run_dir} holds checkpoints: move them away or choose another model_tag")
    return checkpoint


def compiled(model: torch.nn.Module, device: torch.device):
    """The model through torch.compile where that works here."""
    obstacle = can_compile(device)
    print0(f"not compiled: {obstacle}" if obstacle else "torch.compile: the first step takes longer")
    return model if obstacle else torch.compile(model, dynamic=False)


class RunLog:
    """Where a run reports, from rank 0: config.json, metrics.jsonl, samples/, report.html; wandb unless run="dummy".

    `described` goes into config.json, with the machine and those of `defaults` that its "config" changes; lines of
    metrics.jsonl that will be logged again after `step` are dropped.
    """

    def __init__(self, run: str, run_dir: Path, device, described: dict, defaults: dict, step: int, wandb_id=None):
        self.run_dir, self.file = run_dir, None
        if get_dist()[0] == 0:
            changed = {key: value for key, value in defaults.items() if described["config"][key] != value}
            described = described | {"changed_from": changed, "environment": environment(device)}
            (run_dir / "samples").mkdir(parents=True, exist_ok=True)
            write_atomic(run_dir / "config.json", json.dumps(described, indent=1).encode())
            trim_metrics(run_dir / "metrics.jsonl", step)
            self.file = open(run_dir / "metrics.jsonl", "a")
        self.wandb = start_wandb(run, described["config"], run_dir, wandb_id)
        self.wandb_id, self.finish = self.wandb.id, self.wandb.finish
        self.html, self.news = LiveReport(run_dir), False

    def metrics(self, line: dict) -> None:
        """One JSON object to metrics.jsonl and, the same, to wandb."""
        if self.file:
            with names_file(self.file.name):
                self.file.write(json.dumps(line) + "\n")
                self.file.flush()
            self.wandb.log(line, step=line["step"])
            self.news |= any(key.startswith("val/") for key in line)

    def grid(self, grid, step: int) -> None:
        """A picture (H, W, C) uint8 to samples/, to wandb, and to the terminal if it is one."""
        png, path = encode_png(grid), self.run_dir / "samples" / f"step_{step:06d}.png"
        write_atomic(path, png)
        self.wandb.log_png("samples", png, step)
        print0(f"samples: {path}" + ("\n" + terminal_preview(grid) if sys.stdout.isatty() else ""))
        self.news = True

    def report(self, last: bool) -> None:
        """Bring report.html up to date where there is something new to see: an evaluation, a grid, or the end."""
        if self.file and (self.news or last):
            self.html.refresh(last)
            self.news = False


# ---------------------------------------------------------------------------------------------------------------------
# A step


def cut_batch(total_batch_size: int, device_batch_size: int, world: int) -> tuple[int, int]:
    """(images per forward pass of one rank, micro-steps) of a step of `total_batch_size`. UserError if they do not fit.

    A device_batch_size beyond a rank's share of the step is lowered to it.
    """
    device_batch_size = min(device_batch_size, max(total_batch_size // world, 1))
    if total_batch_size % (device_batch_size * world):
        micro = f"device_batch_size x ranks = {device_batch_size} x {world}"
        raise UserError(f"total_batch_size={total_batch_size} is not a multiple of {micro}")
    return device_batch_size, total_batch_size // (device_batch_size * world)


NO_MEMORY = ("out of memory", "can't allocate memory", "bad_alloc")  # MPS; torch's allocator of the CPU; C++


def largest_batch(try_batch, limit: int, zero_grad=None) -> int:
    """The largest power of two that divides `limit`, a rank's share of the step, and fits into memory on every rank.

    `try_batch(n)` runs forward and backward on n images and returns nothing, without a collective; `zero_grad()`
    forgets the gradients after each try, failed or not. Make optimizer and averages before, so that their memory is
    counted, and try the model that is not compiled: it takes more, and would be compiled anew for each size. A CPU
    mostly kills a process that asks for too much, rather than refuse. A collective. Raises UserError where one image
    does not fit.
    """
    fits, n = 0, 1
    while n <= limit and limit % n == 0:
        try:
            try_batch(n)
            refused = False
        except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is a RuntimeError
            refused = isinstance(error, torch.OutOfMemoryError | MemoryError) or any(s in str(error) for s in NO_MEMORY)
            if not refused:
                raise
        # not above: while the error is at hand, so are the tensors of the frames that it came through
        if zero_grad is not None:
            zero_grad()
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


class Draw(NamedTuple):
    """All that is random in one step, for the whole batch of all ranks."""

    u_flip: torch.Tensor  # (N,) uniform in [0, 1), as the next two
    u_t: torch.Tensor
    u_drop: torch.Tensor
    noise: torch.Tensor  # (N, C, H, W)
    eps: torch.Tensor | None  # likewise, where a latent is a distribution, of which each step takes another sample


def draw_step(seed: int, step: int, total_batch_size: int, codec, device: torch.device) -> Draw:
    """A function of (seed, step): so the model does not depend on how the batch is cut up, and resuming needs no state
    of a random number generator. Drawn on CUDA where that is the device, else on the CPU."""
    on = device if device.type == "cuda" else torch.device("cpu")
    generator = make_generator(seed, step, device=on)
    uniform = torch.rand(3, total_batch_size, generator=generator, device=on).to(device)
    noise = torch.randn(total_batch_size, *codec.shape, generator=generator, device=on).to(device)
    eps = torch.randn(noise.shape, generator=generator, device=on).to(device) if codec.stochastic else None
    return Draw(*uniform, noise, eps)


def trapezoid(step: int, num_steps: int, warmup_ratio: float, warmdown_ratio: float, final: float = 0.0) -> float:
    """Warmup, constant, warmdown to `final`: a factor on every learning rate."""
    warmup, warmdown = warmup_ratio * num_steps, warmdown_ratio * num_steps
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if step <= num_steps - warmdown:
        return 1.0
    left = (num_steps - step) / warmdown
    return left + (1 - left) * final


def metrics_line(step, batch_size, flops_per_image, device, train_time_s, since_log, sums, grad_norm, lrm, scaler):
    """What is logged of a step, a dict. `since_log`: steps, seconds, and seconds of waiting for data since the last
    line; `sums`: {name: quartile_sums over all ranks}."""
    steps, seconds, data_s = since_log
    peak = peak_flops(device) * get_dist()[2]
    images_per_sec = steps * batch_size / seconds
    line = {
        "step": step,
        "images_seen": step * batch_size,
        "total_training_flops": step * batch_size * flops_per_image,
        "total_training_time_s": train_time_s,
        "train/loss": float(sums["loss"][0].sum()) / batch_size,  # over all ranks and micro-steps
        "train/grad_norm": grad_norm,
        "train/lrm": lrm,
        "train/dt_ms": 1000 * seconds / steps,
        "train/data_ms": 1000 * data_s / steps,
        "train/images_per_sec": images_per_sec,
        "train/mfu": 100 * flops_per_image * images_per_sec / peak if peak else 0.0,
    }
    for name, x in sums.items():
        line |= {f"train/{name}_q{i}": float(total / n) for i, (total, n) in enumerate(x.T) if n}
    return line | ({"train/lg_loss_scale": scaler.lg_loss_scale} if scaler.enabled else {})


def console_line(line: dict, num_steps: int) -> str:
    """A line of metrics as it is printed."""
    step, dt_ms = line["step"], line["train/dt_ms"]
    return (
        f"step {step:05d}/{num_steps:05d} ({100 * step / num_steps:.1f}%) "
        f"| loss {line['train/loss']:.4f} | grad {line['train/grad_norm']:.2f} | lr {line['train/lrm']:.2f} "
        f"| dt {dt_ms:.1f} ms | img/s {line['train/images_per_sec']:,.0f} | mfu {line['train/mfu']:.1f} "
        f"| {line['total_training_time_s'] / 60:.1f} m | eta {(num_steps - step) * dt_ms / 60000:.1f} m"
    )


def end(step: int, stopping: int, train_time_s: float, device: torch.device, run_dir: Path) -> None:
    """Say what was done, and leave together with the other ranks."""
    if stopping:
        print0(f"stopped by signal {stopping} after step {step}: the same command continues")
    minutes, memory_gb = train_time_s / 60, peak_memory_gb(device)
    print0(f"{step:,} steps in {minutes:.1f} minutes of training, {memory_gb:.1f} GiB of memory at the peak")
    print0(f"everything is in {run_dir}; to sample: python -m scripts.sample --run={run_dir.name}")
    leave_together()
