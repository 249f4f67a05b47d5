"""The ground floor: user errors, what is printed, seeds, progress."""

import errno
import os
import re
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

Tensors = dict[str, Tensor]  # by name
Settings = dict[str, object]  # of a run, by name
Batches = list[np.ndarray]  # numbers of images, (n,) each


class UserError(ValueError):
    """Bad input: says which value was given and which are accepted. Any function may raise it.

    The program prints this one line and exits with code 2.
    """

    def __str__(self):
        return " ".join(super().__str__().splitlines())


class LostRank(RuntimeError):
    """Another rank hangs or died. The program prints one line and exits with code 1."""


# Phrases in the messages of torch's allocators (CUDA, MPS, CPU) and of C++: their error types are too general
NO_MEMORY = re.compile("out of memory|can't allocate memory|bad_alloc")
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError | OSError) and bool(NO_MEMORY.search(str(error)))


def excepthook(kind, error, traceback, otherwise=sys.__excepthook__):
    """The sys.excepthook of scripts/: one line and an exit code for errors that are not bugs; a traceback for bugs."""
    code = 1
    line = f"error: {error}"
    if isinstance(error, KeyboardInterrupt):
        code = 130  # as shells say for SIGINT
        line = "stopped by Ctrl-C"
    elif isinstance(error, UserError):
        code = 2
    elif isinstance(error, OSError) and (error.filename or error.errno in NO_ROOM):
        code = 2
        path = error.filename2 or error.filename or f"a file, most likely in NANODIFF_BASE_DIR={base_dir()}"
        line = f"error: {error.strerror}: {path}; completed files are intact"
    elif is_out_of_memory(error):
        reason = str(error) or "out of memory"
        line = f"error: {reason}; lower --device_batch_size (in training; then --checkpointing) or --batch_size"
    elif not isinstance(error, LostRank | FloatingPointError):
        return otherwise(kind, error, traceback)
    print(printable(" ".join(line.splitlines())), file=sys.stderr, flush=True)
    sys.exit(code)


def get_dist():
    """(rank, local_rank, world_size) from torchrun; (0, 0, 1) without it. Refuses several tasks of srun or mpirun."""
    get = os.environ.get
    counts = ["SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"]
    try:
        # salloc and sbatch set SLURM_NTASKS, too, with PROCID=0, though no other task may start; a later PROCID is one
        if int(get("SLURM_PROCID") or 0) and not get("RANK"):
            counts.append("SLURM_NTASKS")
        tasks = max(int(get(name) or 1) for name in counts)
        rank = int(get("RANK") or 0)
        local_rank = int(get("LOCAL_RANK") or 0)
        world = int(get("WORLD_SIZE") or 1)
    except ValueError as error:
        raise UserError(f"RANK, LOCAL_RANK, WORLD_SIZE or tasks in the environment: {error}") from None
    if max(tasks, rank + 1) > world or rank < 0:
        raise UserError(f"{tasks} tasks, RANK={rank}, WORLD_SIZE={world}: start them by torchrun or runs/multinode.sh")
    return rank, local_rank, world


def is_first_rank() -> bool:
    return get_dist()[0] == 0


def printable(text: str) -> str:
    """Replace control characters and invalid bytes by "?": a file's or class's name could control the terminal."""
    return re.sub("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", "?", text)


def print0(text):
    """Print on rank 0, and write to print0.file once a run has opened its log. If the reader is gone (`| head`, closed
    terminal), the run continues."""
    if not is_first_rank():
        return
    text = printable(str(text))
    if print0.file:
        print(text, file=print0.file, flush=True)
    try:
        print(text, flush=True)
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise
        sys.stdout = open(os.devnull, "w")


print0.file = None


def make_generator(*key: int, device: str | torch.device = "cpu") -> torch.Generator:
    """A generator seeded by the integers >= 0 in `key`, such as (seed, step). Keys (1,) and (1, 0) seed alike."""
    high, low = np.random.SeedSequence(key).generate_state(2, np.uint32).tolist()
    return torch.Generator(device=device).manual_seed(high << 32 | low)


# Rows per generator. Fewer rows: more generators to make, at 35 us each. More rows: a small micro-batch discards most
# of the numbers drawn for it
BLOCK = 32


def draw_rows(key: tuple[int, ...], first: int, device, template: Tensor, random=torch.randn) -> Tensor:
    """Rows first to first + N - 1, shaped as `template` (N, ...), of an endless table of `random` numbers, a function
    of `key` and `device`. Each BLOCK rows have their own generator, so that a rank draws little more than it uses."""
    blocks = []
    last = first + len(template) - 1
    for block in range(first // BLOCK, last // BLOCK + 1):
        g = make_generator(*key, block, device=device)
        blocks.append(random(BLOCK, *template.shape[1:], generator=g, device=device))
    offset = first % BLOCK
    return torch.cat(blocks)[offset : offset + len(template)].to(template.device)


class StackedGenerator:
    """One generator per image: an image's noise depends on (seed, its id) alone. On the CPU: equal on every device."""

    def __init__(self, ids, seed: int = 0):
        self.generators = [make_generator((seed << 32) + int(i)) for i in ids]

    def randn(self, shape, device="cpu") -> Tensor:
        """(N, ...) standard normal in fp32, N = number of ids."""
        return torch.stack([torch.randn(shape[1:], generator=g) for g in self.generators]).to(device)

    def randn_like(self, x: Tensor) -> Tensor:
        return self.randn(x.shape, x.device).to(x.dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Folders and progress


def at(name: str | Path) -> Path:
    """Expand ~ in a path, unless the user in ~user is unknown."""
    path = Path(os.path.expanduser(name))
    if path.parts[:1] == ("~",):  # else a folder called ~ would be made
        raise UserError(f"{path}: this user has no home folder; give another path, or set HOME or NANODIFF_BASE_DIR")
    return path


def base_dir() -> Path:
    """The folder of data sets and runs: $NANODIFF_BASE_DIR, by default ~/.cache/nanodiff."""
    return at(os.environ.get("NANODIFF_BASE_DIR") or "~/.cache/nanodiff")


@dataclass
class Progress:
    """`with Progress(total, "images") as bar: bar.update(n)` shows rate and ETA; in a file after 5 s, then every 30."""

    total: int
    unit: str
    label: str

    def __post_init__(self):
        self.done = 0
        self.start = self.last = time.perf_counter()
        self.on_terminal = sys.stderr.isatty()
        self.pause = 0.2 if self.on_terminal else 5.0

    def __enter__(self):
        return self

    def update(self, n: int) -> None:
        self.done += n
        now = time.perf_counter()
        if now - self.last > self.pause:
            self.last = now
            self.pause = 0.2 if self.on_terminal else 30.0
            rate = self.done / (now - self.start)
            eta = max(self.total - self.done, 0) / rate
            self._show(f"{self.label} {self.done:,.0f}/{self.total:,} {self.unit} | {rate:,.1f}/s | eta {eta:,.0f} s")

    def __exit__(self, *exc):
        if self.on_terminal:
            self._show("")

    def _show(self, text: str) -> None:
        if is_first_rank():
            with suppress(OSError):  # a closed terminal or pipe
                print(f"\r\033[K{text}" if self.on_terminal else f"{text}\n", end="", file=sys.stderr, flush=True)


def count(n: int, noun: str, plural: str) -> str:
    """1 image, 2,000 images."""
    return f"{n:,} {noun if n == 1 else plural}"


def in_batches(ids: np.ndarray, batch_size: int) -> Batches:
    return np.split(ids, range(batch_size, len(ids), batch_size))
