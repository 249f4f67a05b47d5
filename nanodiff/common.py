"""The ground floor: user errors, ranks and signals, seeds, progress."""

import contextlib
import difflib
import errno
import functools
import itertools
import os
import re
import signal
import sys
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist


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
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES)


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and bool(NO_MEMORY.search(str(error)))


def excepthook(kind, error, traceback, otherwise=sys.__excepthook__):
    """The sys.excepthook of scripts/: one line and an exit code for errors that are not bugs; a traceback for bugs."""
    code, line = 1, ""
    if isinstance(error, KeyboardInterrupt):
        code, line = 128 + signal.SIGINT, "stopped by Ctrl-C"
    elif isinstance(error, UserError):
        code, line = 2, f"error: {error}"
    elif getattr(error, "errno", 0) in NO_ROOM:
        where = error.filename or f"a file, most likely in NANODIFF_BASE_DIR={base_dir()}"
        code, line = 2, f"error: {error.strerror}: {where}; completed files are intact"
    elif isinstance(error, LostRank):
        line = f"error: {error}"
    elif isinstance(error, FloatingPointError):
        advice = "resume with a lower lr (and muon_lr), or in bf16 instead of fp16"
        line = f"error: {error}; the newest checkpoint is intact: {advice}"
    elif is_out_of_memory(error):
        what = str(error) or "out of memory"
        line = f"error: {what}; give a smaller --device_batch_size, then --checkpointing"
    if not line:
        return otherwise(kind, error, traceback)
    print(printable(" ".join(line.splitlines())), file=sys.stderr, flush=True)
    sys.exit(code)


def get_dist():
    """(rank, local_rank, world_size) from torchrun; (0, 0, 1) without it."""
    return tuple(int(os.environ.get(k, d)) for k, d in (("RANK", 0), ("LOCAL_RANK", 0), ("WORLD_SIZE", 1)))


def printable(text: str) -> str:
    """`text` with "?" for control characters and invalid bytes: names of classes and files may command a terminal."""
    return re.sub("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", "?", text)


def print0(*args, is_picture: bool = False, **kwargs):
    """print on rank 0, flushed; if the reader is gone (`| head`, closed terminal), the run continues."""
    if get_dist()[0] > 0:
        return
    try:
        print(*(arg if is_picture else printable(str(arg)) for arg in args), **kwargs, flush=True)
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise
        sys.stdout = open(os.devnull, "w")


def join_ranks(backend: str, timeout_s: float, device_id=None) -> None:
    """Join torchrun's process group; a collective fails after `timeout_s` seconds of waiting."""
    timeout = timedelta(seconds=timeout_s)
    store, rank, _ = next(dist.rendezvous("env://", timeout=timeout))
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        # After a restart (--max-restarts) torchrun reuses its store, which holds addresses of dead ranks. Several nodes
        # count restarts differently, so runs/multinode.sh gives each attempt a new store
        store = dist.PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT')}", store)
    group = dict(store=store, rank=rank, world_size=get_dist()[2], timeout=timeout, device_id=device_id)
    dist.init_process_group(backend, **group)
    # init_process_group's own excepthook swallows ours
    sys.excepthook = functools.partial(excepthook, otherwise=sys.excepthook)


@contextlib.contextmanager
def collective(name: str):
    """Names a collective (context or decorator): a hang or a dead rank is reported as LostRank, "all-gather of the
    weights failed after 600 s". NCCL's watchdog ends the process itself."""
    start = time.monotonic()
    try:
        yield
    except RuntimeError as e:
        # "Application timeout caused pair closure": another collective in flight timed out
        is_lost = isinstance(e, dist.DistError) or re.search("gloo|pair closure", str(e))
        if isinstance(e, LostRank) or not is_lost:  # the inner collective has named itself
            raise
        cause = re.sub(r"^\[.*?\] |\. This is typically.*", "", str(e).splitlines()[0])
        rank, _, world = get_dist()
        waited = f"after {time.monotonic() - start:.1f} s of waiting"
        raise LostRank(f"rank {rank} of {world}: {name} failed {waited}, another rank hangs or died: {cause}") from e


def over_ranks(x: torch.Tensor | int, op=dist.ReduceOp.SUM, what: str = "a sum over ranks") -> torch.Tensor:
    """A number or a tensor on the CPU, reduced over ranks; the same on every rank. `what` names it if it fails."""
    x = torch.as_tensor(x)
    if not dist.is_initialized():
        return x
    x = x.to("cuda" if dist.get_backend() == "nccl" else "cpu")
    with collective(what):
        dist.all_reduce(x, op)
    return x.cpu()


@collective("the gathering of results")
def gather_objects(value) -> list:
    """[value of each rank] on the first rank, [] on the others."""
    rank, _, world = get_dist()
    if not dist.is_initialized():
        return [value]
    values = [None] * world if rank == 0 else None
    dist.gather_object(value, values)
    return values or []


waits = itertools.count()


def wait_for_first_rank() -> None:
    """Wait until the first rank comes here too, however long it saves, hashes or trains a classifier. Asks the store:
    in a collective the others would give up after the ranks' timeout. A first rank that dies ends the wait."""
    if not dist.is_initialized():
        return
    store, key = dist.distributed_c10d._get_default_store(), f"first_rank/{next(waits)}"
    if get_dist()[0] == 0:
        store.set(key, "here")
    while not store.check([key]):
        time.sleep(0.02)


def from_first_rank(value, what: str = "a result"):
    """The first rank's `value`, on every rank, however long that takes."""
    shared = [value]
    if dist.is_initialized():
        with collective(f"the broadcast of {what}"):
            wait_for_first_rank()
            dist.broadcast_object_list(shared, src=0)
    return shared[0]


def leave_together() -> None:
    """Leave the process group once all ranks are done: gloo may otherwise abort one still working."""
    if dist.is_initialized():
        with collective("the wait for all ranks to finish"):
            wait_for_first_rank()
            dist.barrier()
        dist.destroy_process_group()


class StopSignal:
    """The first SIGINT, SIGTERM or SIGHUP (a closed terminal) requests a clean stop, the second kills the process."""

    def __init__(self):
        self.received = 0  # the signal's number
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._receive)

    def _receive(self, number, frame):
        if self.received:
            os._exit(128 + number)
        self.received = number
        if get_dist()[0] == 0:
            with contextlib.suppress(OSError):  # the terminal may be gone
                os.write(2, b"stopping after this step; again to kill\n")  # print may be under way

    def agreed(self) -> int:
        """The largest signal number of any rank, or 0; a collective."""
        return int(over_ranks(self.received, dist.ReduceOp.MAX, "the agreement to stop"))


def make_generator(*key: int, device: str | torch.device = "cpu") -> torch.Generator:
    """A generator seeded by the integers >= 0 in `key`, such as (seed, step); trailing zeros do not count."""
    words = np.random.SeedSequence([int(k) for k in key]).generate_state(2, np.uint32)
    return torch.Generator(device=device).manual_seed(int(words[0]) << 32 | int(words[1]))


# Rows per generator. Fewer rows: more generators to make, at 35 us each. More rows: a small micro-batch discards most
# of the numbers drawn for it
BLOCK = 32


def draw_rows(key: tuple[int, ...], first: int, device, like: torch.Tensor, random=torch.randn) -> torch.Tensor:
    """N rows from `first` on, shaped like `like` (N, ...), of an endless table of `random` numbers set by `key`, drawn
    on `device`. Every BLOCK rows have their own generator: a rank draws little more than it uses."""
    drawn = []
    for block in range(first // BLOCK, -(-(first + len(like)) // BLOCK)):
        g = make_generator(*key, block, device=device)
        drawn.append(random(BLOCK, *like.shape[1:], generator=g, device=device))
    skipped = first % BLOCK
    return torch.cat(drawn)[skipped : skipped + len(like)].to(like.device)


class StackedGenerator:
    """One generator per image, so that its noise depends on its seed alone. Drawn on the CPU: equal on every device."""

    def __init__(self, seeds):
        self.generators = [make_generator(int(seed)) for seed in seeds]

    def randn(self, shape, device="cpu") -> torch.Tensor:
        """(N, ...) standard normal in fp32, N = number of seeds."""
        return torch.stack([torch.randn(shape[1:], generator=g) for g in self.generators]).to(device)

    def randn_like(self, x: torch.Tensor) -> torch.Tensor:
        return self.randn(x.shape, x.device).to(x.dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Folders and progress


def base_dir() -> Path:
    """The folder of data sets and runs: $NANODIFF_BASE_DIR, by default ~/.cache/nanodiff."""
    return Path(os.environ.get("NANODIFF_BASE_DIR") or Path.home() / ".cache" / "nanodiff").expanduser()


def nearest(name: str, known: Iterable[str]) -> str:
    """The five names that are most like `name`, for messages; "none" if nothing is known."""
    return ", ".join(difflib.get_close_matches(name, known, 5, cutoff=0)) or "none"


def brief(value, most: int = 50):
    """A JSON value for display; a list or dict of more than `most` entries becomes their number."""
    if isinstance(value, (list, dict)) and len(value) > most:
        return f"{len(value):,} entries"
    return {key: brief(v, most) for key, v in value.items()} if isinstance(value, dict) else value


class Progress:
    """`with Progress(total, "images") as bar: bar.update(n)` shows rate and ETA, live or, in a file, every 30 s."""

    def __init__(self, total: int, unit: str, label: str = ""):
        self.total = total
        self.unit = unit
        self.label = label
        self.done = 0
        self.start = self.last = time.perf_counter()
        self.shown = get_dist()[0] == 0
        self.on_terminal = sys.stderr.isatty()

    def __enter__(self):
        return self

    def update(self, n: int = 1) -> None:
        self.done += n
        now = time.perf_counter()
        pause = 0.2 if self.on_terminal else 30.0
        is_end = self.on_terminal and self.done >= self.total
        if now - self.last > pause or is_end:
            self.last = now
            rate = self.done / max(now - self.start, 1e-9)
            eta = max(self.total - self.done, 0) / max(rate, 1e-9)
            self._show(f"{self.label} {self.done:,.0f}/{self.total:,} {self.unit} | {rate:,.1f}/s | eta {eta:,.0f} s")

    def __exit__(self, *exc):
        if self.on_terminal:
            self._show("")

    def _show(self, text: str) -> None:
        if self.shown:
            text = f"\r\033[K{text}" if self.on_terminal else f"{text}\n"
            print(text, end="", file=sys.stderr, flush=True)


def in_batches(ids: np.ndarray, batch_size: int) -> list[np.ndarray]:
    return np.split(ids, range(batch_size, len(ids), batch_size))


def rank_batches(batches: list[np.ndarray]) -> list[np.ndarray]:
    """This rank's batches: every world-th, from its own number on."""
    rank, _, world = get_dist()
    return batches[rank::world]


def gather_batches(compute, batches: list[np.ndarray], label: str = "") -> list:
    """[compute(ids) for each batch], shared among the ranks: the first gets all results, the others their own."""
    done = {}  # first image of a batch -> its result
    with Progress(-(-sum(map(len, batches)) // get_dist()[2]), "images", label) as bar:
        for ids in rank_batches(batches):
            done[int(ids[0])] = compute(ids)
            bar.update(len(ids))
    for others in gather_objects(done):
        done |= others
    return [done[int(ids[0])] for ids in batches if int(ids[0]) in done]
