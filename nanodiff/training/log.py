"""A run's output: log lines, config.json, metrics.jsonl, grids, wandb."""

import base64
import json
import math
import shlex
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nanodiff.common import Progress, Tensors, UserError, get_dist, is_first_rank, print0
from nanodiff.device import environment, host_copy, peak_flops, peak_memory_gb, synchronize
from nanodiff.dist import gather_objects, leave_together, over_ranks, stop_signal
from nanodiff.files import names_file, read_json, write_atomic, write_json
from nanodiff.png import encode_png
from nanodiff.training.checkpoint import go_back, trim_metrics, way_back


def quartile_sums(t, values, weight, process) -> Tensor:
    """(2, 4) fp32: the sums of weight * values and of weight in each quarter of the range of t, all of one shape."""
    quarter = (t / process.t_max * 4).long().clamp(max=3)
    terms = torch.stack([weight * values, weight])  # (2, ...)
    return terms.new_zeros(2, 4).index_add(1, quarter.flatten(), terms.flatten(1))


@dataclass
class Meter:
    """Collects losses and times between two log lines, and makes the lines."""

    process: object
    device: torch.device
    dtype: torch.dtype  # of products
    costs: list  # of evaluations, for the time left: (steps between them, images that pass forward)
    loop_state: dict  # counters that a resume restores

    peak = 0.0  # FLOP/s of one device; known at the first line

    def __post_init__(self):
        self.shapes = set()  # of images so far; a shape's first step compiles, and counts in speeds only if logged
        self.restart()

    def restart(self) -> None:
        """Forget what the last line has reported."""
        self.sums = defaultdict(int)  # name -> (2, 4): see quartile_sums
        self.num_images = 0
        self.steps = 0
        self.seconds = 0.0
        self.data_seconds = 0.0

    def state_dict(self) -> list[dict]:
        """A collective: each rank's sums for the next line; empty except on rank 0."""
        # A copy, as add() changes the sums while a checkpoint is written
        return gather_objects({"images": self.num_images, "sums": host_copy(self.sums)})

    def load_state_dict(self, state: list[dict]) -> None:
        """Share the states out among any number of ranks."""
        rank, _, world = get_dist()
        if state:
            self.num_images = state[0]["images"]
        for rank_state in state[rank::world]:
            for name, x in rank_state["sums"].items():
                self.sums[name] += x.to(self.device)

    def start_step(self, passes: int) -> None:
        """`passes`: micro-batches, shown in the first step, which may take minutes."""
        self.parts = defaultdict(list)  # t, weights and loss terms, (B,) of each micro-batch
        self.step_start = time.perf_counter()
        self.step_data_seconds = 0.0
        self.bar = None if self.shapes else Progress(passes, "passes", "first step")

    def add(self, t, weight, terms: Tensors, data_seconds: float) -> None:
        """Add a micro-batch: its t (unless the terms have their own), weights and loss terms, (B,) each, and how long
        it waited for the loader."""
        for name, x in ({"t": t, "weight": weight} | terms).items():
            self.parts[name].append(x.detach())
        self.step_data_seconds += data_seconds
        if self.bar:
            self.bar.update(1)

    def losses(self) -> tuple[Tensor, Tensor]:
        """Count the step in the next line. Return (t, unweighted losses) of this rank's images, (micro-steps, B), for
        the timestep sampler."""
        terms = {name: torch.stack(micro_batches) for name, micro_batches in self.parts.items()}
        t, weight = terms.pop("t"), terms.pop("weight")
        for name, x in terms.items():
            self.sums[name] += quartile_sums(t, x, weight, self.process)
        self.num_images += t.numel() * get_dist()[2]
        return t, terms["loss"]

    def end_step(self, shape: torch.Size, log_now: bool) -> None:
        """Stop the clock. Waits for the device only where the time will be read, so that other steps stay queued."""
        is_first = shape not in self.shapes
        self.shapes.add(shape)
        if log_now or is_first:
            synchronize(self.device)
        seconds = time.perf_counter() - self.step_start
        self.loop_state["train_time_s"] += seconds
        if self.bar:
            self.bar.__exit__()
        if is_first:
            print0(f"first step with images of {'x'.join(map(str, shape[1:]))}: {seconds:.1f} s")
            if not log_now:
                return
        self.steps += 1
        self.seconds += seconds
        self.data_seconds += self.step_data_seconds

    def line(self, step: int, total_batch_size: int, flops_per_image: float) -> dict:
        """A collective: return the metrics since the last line and reset them.

        Over all ranks: loss, loss_q0 to loss_q3 (by quarter of t), for Gaussian diffusion also mse, mse_q0 ..., vb,
        vb_q0 ...; loss_smooth. On this rank: dt_ms, data_ms (waiting for data), images_per_sec, mfu.
        """
        state = self.loop_state
        dt_s = self.seconds / self.steps
        img_per_sec = total_batch_size / dt_s
        flops_per_sec = flops_per_image * img_per_sec / get_dist()[2]
        for _ in range(3):
            if flops_per_sec > self.peak:  # not measured yet, or while the machine was busy
                self.peak = max(self.peak, peak_flops(self.device, self.dtype))
        line = {
            "step": step,
            "images_seen": step * total_batch_size,
            "total_training_flops": step * total_batch_size * flops_per_image,
            "total_training_time_s": state["train_time_s"],
            "train/dt_ms": 1000 * dt_s,
            "train/data_ms": 1000 * self.data_seconds / self.steps,
            "train/images_per_sec": img_per_sec,
            # Model FLOPs utilisation: FLOPs of forward and backward, without recomputation, in percent of the peak
            "train/mfu": 100 * flops_per_sec / self.peak,
        }
        line |= self.mean_losses()
        if math.isfinite(line["train/loss"]):
            state["log_lines"] += 1
            state["running_loss"] += 0.1 * (line["train/loss"] - state["running_loss"])
        # As nanochat's: a running mean over about ten lines, corrected for its start at 0
        line["train/loss_smooth"] = state["running_loss"] / (1 - 0.9 ** max(state["log_lines"], 1))
        self.restart()
        return line

    def mean_losses(self) -> dict[str, float]:
        """{"train/loss": weighted mean over ranks and steps, "train/loss_q0": the same in the first quarter of t, ...};
        also of the other terms."""
        means = {}
        for name, sums in self.sums.items():
            totals, weights = over_ranks(sums.cpu().double())
            means[f"train/{name}"] = float(totals.sum()) / self.num_images
            for i, mean in enumerate((totals / weights).tolist()):  # NaN without images
                means[f"train/{name}_q{i}"] = mean
        return means

    def console(self, line: dict, num_iterations: int) -> str:
        """The line to print. The minutes left include the evaluations still to come, that of this step too."""
        step = line["step"]
        img_per_sec = line["train/images_per_sec"]
        images = (num_iterations - step) * line["images_seen"] / step
        for every, cost in self.costs:
            if every >= 0:
                every = every or num_iterations
                images += cost / 3 * (-(-num_iterations // every) - (step - 1) // every)  # no backward passes
        return (
            f"step {step:,}/{num_iterations:,} | loss {line['train/loss_smooth']:.4f} | "
            f"grad {line['train/grad_norm']:.2f} | lr x{line['train/lrm']:.2f} | {line['train/dt_ms']:.1f} ms | "
            f"img/s {img_per_sec:,.0f} | mfu {line['train/mfu']:.0f}% | "
            f"{line['total_training_time_s'] / 60:.1f} min, {images / img_per_sec / 60:.1f} left"
        )


def open_wandb(run: str, run_dir: Path, config: dict, run_id: str | None):
    """The run in wandb. What fails is bad input: wandb is not installed, has no API key or no network."""
    print0("waiting for wandb, up to two minutes")
    hook = sys.excepthook
    try:
        import wandb

        return wandb.init(project="nanodiff", name=run, config=config, id=run_id, resume="allow", dir=run_dir)
    except Exception as error:
        raise UserError(
            f"run={run!r} logs to wandb: {error}; "
            "accepted: `pip install wandb`, `wandb login`, WANDB_MODE=offline or --run=dummy"
        ) from error
    finally:
        sys.excepthook = hook  # wandb's own prints a traceback above our line


def record(path: Path, run_info: dict, step: int) -> None:
    """Write config.json. A run that resumes with other settings appends them to its list "changes"."""
    past = run_info | {"changes": []}
    if step:
        try:
            past |= read_json(path)
        except UserError as error:
            print0(f"{error}: written anew")
    last = [past, *past["changes"]][-1]["config"]
    now = {key: run_info[key] for key in "config num_iterations environment".split()} | {"step": step}
    if last | {"resume": ""} != now["config"] | {"resume": ""}:
        past["changes"].append(now)
    write_json(path, past)


class RunLog:
    """Writes config.json, metrics.jsonl and samples/ from rank 0, and the same to wandb unless run="dummy".

    `run_info` goes into config.json, with the machine and the defaults of the changed settings. `loop_state` keeps
    wandb's id of the run for a resume.
    """

    file = None  # metrics.jsonl
    wandb = None  # its run

    def __init__(self, run: str, run_dir: Path, device, run_info: dict, step: int, loop_state: dict):
        self.run_dir = run_dir
        if not is_first_rank():
            return
        config = run_info["config"]
        changes = {key: value for key, value in config.defaults.items() if config[key] != value}
        (run_dir / "samples").mkdir(exist_ok=True)
        run_info = run_info | {"changed_from": changes, "environment": environment(device)}
        record(run_dir / "config.json", run_info, step)
        if (config["resume"].isdigit() or not step) and go_back(run_dir, step):
            loop_state["wandb_id"] = None  # a new run there: wandb drops lines of steps that it has
        trim_metrics(run_dir / "metrics.jsonl", step)
        self.file = open(run_dir / "metrics.jsonl", "a")
        if run != "dummy":
            self.wandb = open_wandb(run, run_dir, config, loop_state["wandb_id"])
            loop_state["wandb_id"] = self.wandb.id

    def metrics(self, line: dict) -> None:
        """Log one JSON object of numbers to metrics.jsonl and wandb, without NaN and infinity."""
        finite = {key: x for key, x in line.items() if math.isfinite(x)}
        if self.file is None:
            return
        with names_file(self.file.name):
            self.file.write(json.dumps(finite, default=float) + "\n")
            self.file.flush()
        if self.wandb:
            self.wandb.log(finite, step=finite["step"])

    def evaluation(self, step: int, figures: dict) -> str:
        """Log an evaluation's figures; return the line to print. One that is not finite ends the run, except in a
        quarter of t without images."""
        self.metrics({"step": step} | figures)
        for key, x in figures.items():
            if "loss_q" not in key and not math.isfinite(x):
                raise FloatingPointError(f"step {step}: {key} is {x}; {way_back(self.run_dir)}")
        texts = [f"{key} {x:.4f}" for key, x in figures.items()]
        return f"step {step:,} | {' | '.join(texts)}"

    def grid(self, grid, step: int) -> None:
        """Write a picture (H, W, 3) uint8 to samples/ and wandb."""
        if self.file is None:
            return
        png = encode_png(grid)
        path = self.run_dir / "samples" / f"step_{step:06d}.png"
        write_atomic(path, png)
        if self.wandb:
            import wandb

            # As HTML: wandb.Image would need Pillow
            picture = f'<img src="data:image/png;base64,{base64.b64encode(png).decode()}">'
            self.wandb.log({"samples": wandb.Html(picture)}, step=step)
        print0(f"samples: {path}")


def end(log: RunLog, step: int, train_time_s: float, device: torch.device, has_checkpoint: bool) -> None:
    """Print a summary, and leave together with the other ranks. `has_checkpoint`: this step is saved."""
    number = stop_signal.agree()
    if log.wandb:
        log.wandb.finish()
    if number:
        outcome = "the same command resumes" if has_checkpoint else "nothing was saved (save_every=-1)"
        print0(f"stopped by signal {number} after step {step}: {outcome}")
    print0(
        f"{step:,} steps in {train_time_s / 60:.1f} minutes of training, "
        f"{peak_memory_gb(device):.1f} GiB of memory at the peak"
    )
    sample = f"; to sample: python3 -m scripts.sample --model={shlex.quote(log.run_dir.name)}" if has_checkpoint else ""
    print0(f"everything is in {log.run_dir}{sample}")
    leave_together()
    if number:
        sys.exit(128 + number)  # as shells report it: 0 would let a chain of commands go on
