"""The ranks of a run: joining, exchanging, waiting, stopping and leaving together, and sharing batches."""

import contextlib
import functools
import itertools
import os
import re
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from nanodiff.common import Batches, LostRank, Progress, Settings, UserError, excepthook, get_dist, is_first_rank
from nanodiff.files import sha256_of


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
        reason = "the port is taken" if "EADDRINUSE" in cause else "another rank hangs or died"
        duration = f"after {time.monotonic() - start:.1f} s of waiting"
        raise LostRank(f"rank {rank} of {world}: {name} failed {duration}, {reason}: {cause}") from e


@collective("the rendezvous")
def join_ranks(device: torch.device, timeout_s: float) -> None:
    """Join torchrun's process group; a collective fails after `timeout_s` seconds of waiting. 0 =
    $NANODIFF_RANK_TIMEOUT, by default 600."""
    try:
        timeout = timedelta(seconds=timeout_s or float(os.environ.get("NANODIFF_RANK_TIMEOUT") or 600))
        store, rank, world = next(dist.rendezvous("env://", timeout=timeout))
    except ValueError as error:
        accepted = "RANK, WORLD_SIZE and MASTER_ as torchrun sets them, or none; NANODIFF_RANK_TIMEOUT in seconds"
        raise UserError(f"{error}; accepted: {accepted}") from None
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
        # After a restart (--max-restarts) torchrun reuses its store, which holds addresses of dead ranks. Several nodes
        # count restarts differently, so runs/multinode.sh gives each attempt a new store
        store = dist.PrefixStore(f"attempt_{os.environ.get('TORCHELASTIC_RESTART_COUNT')}", store)
    backend, device_id = ("nccl", device) if device.type == "cuda" else ("gloo", None)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout, device_id=device_id)
    # init_process_group's own excepthook swallows ours
    sys.excepthook = functools.partial(excepthook, otherwise=sys.excepthook)


def over_ranks(x: torch.Tensor | int, op=dist.ReduceOp.SUM, name: str = "a sum over ranks") -> torch.Tensor:
    """A number or a tensor on the CPU, reduced over ranks; the same on every rank. `name` is reported if it fails."""
    x = torch.as_tensor(x)
    if not dist.is_initialized():
        return x
    x = x.to("cuda" if dist.get_backend() == "nccl" else "cpu")
    with collective(name):
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


def ranks_store():
    """torchrun's, which answers at once, whatever the other ranks do."""
    return dist.distributed_c10d._get_default_store()


waits = itertools.count()


def wait_for_first_rank() -> None:
    """Wait until the first rank comes here too, however long it saves, hashes or trains a classifier. This asks the
    store, as a collective would give up after the ranks' timeout. If the first rank dies, the wait ends."""
    if not dist.is_initialized():
        return
    store = ranks_store()
    key = f"first_rank/{next(waits)}"
    if is_first_rank():
        store.set(key, "here")
    while not store.check([key]):
        time.sleep(0.02)


def from_first_rank(value, name: str = "a result"):
    """The first rank's `value`, on every rank, however long the first rank takes."""
    shared = [value]
    if dist.is_initialized():
        with collective(f"the broadcast of {name}"):
            wait_for_first_rank()
            dist.broadcast_object_list(shared, src=0)
    return shared[0]


def compare_ranks(config: Settings) -> None:
    """A collective: refuse a rank whose settings, torch or code differ from the first rank's. Each machine reads its
    own presets and checkout. Only the names of the run may differ."""
    root = Path(__file__).parents[1]
    code = sha256_of(*sorted([*root.glob("nanodiff/**/*.py"), *root.glob("scripts/*.py")]))
    facts = config | {"torch": torch.__version__, "code": code[:8], "model_tag": "", "run": ""}
    fault = ""
    for rank, rank_facts in enumerate(gather_objects(facts)):
        differences = [
            f"{name}={value}, rank 0 {facts.get(name)}"
            for name, value in rank_facts.items()
            if value != facts.get(name)
        ]
        if differences:
            fault = f"rank {rank} has {'; '.join(differences)}; accepted: the same on every rank"
    fault = from_first_rank(fault, "the settings")
    if fault:  # raise on every rank: launchers may show only one
        raise UserError(fault)


def leave_together() -> None:
    """Leave the process group once all ranks are done: gloo may otherwise abort one still working."""
    if dist.is_initialized():
        with collective("the wait for all ranks to finish"):
            wait_for_first_rank()
            dist.barrier()
        dist.destroy_process_group()


class Stopped(BaseException):
    """A signal to any rank has ended an evaluation, on all ranks. BaseException: libraries must not catch it."""


class StopSignal:
    """How the trainer handles signals: the first drops an evaluation at once, or a step after its current pass, and
    ends the run. The process exits with 128 + the signal's number. In other scripts, and before `listen`, a signal ends
    the process at once.

    Slurm, systemd and torchrun each send theirs. So a signal that comes again kills only if it comes late: SIGINT, a
    person's, after a second, the others after ten. A signal to torchrun ends the run, whatever its --max-restarts;
    one to a rank alone counts as a failure, after which --max-restarts=1 starts all ranks again.
    """

    number = 0  # of this rank's signal
    is_stopping = 0  # not 0 once all ranks know that they stop
    drops = False  # in gather_batches

    def listen(self) -> None:
        # A hangup is a closed terminal; with USR1 and USR2 Slurm and submitit announce the end of a job's time
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup asks
                signal.signal(number, self._receive)

    def _receive(self, number, frame):
        now = time.monotonic()
        if self.number:
            if now - self.since > (1 if number == signal.SIGINT else 10):
                os._exit(128 + number)
            return
        self.number = number
        self.since = now
        if is_first_rank():
            task = "dropping this step or evaluation, then saving and leaving"
            line = f"{signal.Signals(number).name}: {task}; Ctrl-C kills\n"
            with contextlib.suppress(OSError):  # the terminal may be gone
                os.write(2, line.encode())  # not print, which may be in progress
        if self.drops:
            raise Stopped

    def agree(self) -> int:
        """A collective: the largest signal number of any rank, or 0."""
        self.is_stopping = int(over_ranks(self.number, dist.ReduceOp.MAX, "the agreement to stop"))
        return self.is_stopping


stop_signal = StopSignal()


def rank_batch(batch_size: int, num_images: int) -> int:
    """The batch size, or each rank's share of the images if that is less, so that every rank works."""
    return min(batch_size, -(-num_images // get_dist()[2]))


def gather_batches(compute, batches: Batches, label: str) -> list:
    """[compute(ids) for ids in batches] on the first rank, [] on the others; all ranks share the work.

    In the trainer a signal ends it at once, on the other ranks before their next batch; then all raise Stopped. So
    `compute` has no collectives and, there, writes no files.
    """
    rank, _, world = get_dist()
    num_images = sum(map(len, batches))
    results = []
    try:
        stop_signal.drops = True
        with Progress(-(-num_images // world), "images", label) as bar:
            for ids in batches[rank::world]:
                if stop_signal.number or (dist.is_initialized() and ranks_store().check(["stopped"])):
                    break
                results.append(compute(ids))
                bar.update(len(ids))
    except Stopped:
        pass
    finally:
        stop_signal.drops = False
    if stop_signal.number and dist.is_initialized():
        ranks_store().set("stopped", "")
    if stop_signal.agree():
        raise Stopped
    rank_results = gather_objects(results)
    return [rank_results[i % world][i // world] for i in range(len(batches)) if rank_results]
