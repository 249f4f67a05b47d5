"""
Measure training against the published recipe, side by side in one run; if asked, sampling and reading the data too.

    python -m scripts.bench                                        # d4, 32x32x3, batch 32
    python -m scripts.bench --depths=4,6 --dtypes=float32,bfloat16 --compiles=True,False
    python -m scripts.bench --archs=dit --optimizers=muon --data=cifar10 --sampling --loading
    python -m scripts.bench --autoencoder=taef2_encoder.pth        # encoding on the fly against cached latents
    torchrun --standalone --nproc_per_node=2 -m scripts.bench      # on several ranks

The reference is what users would otherwise run: the same backbone as published (DiT's classic block, or the UNet),
eager, fp32 (TF32 on GPUs), torch's AdamW, EMA in a loop over the parameters, DistributedDataParallel on several ranks;
for sampling, the same model and sampler, eager, in fp32. Each candidate is a process of its own (on each rank), so that
memory is its own too; they take turns, round by round, so that a noisy machine is noisy for all; medians count.

A step is timed as a whole; in other steps the device is waited for after each part: forward, backward (in which DDP
exchanges gradients), optim (exchange, clipping, update), ema, and data, what is left of the wait for the next batch.
Synthetic data need no wait. Under torchrun, times and memory are rank 0's, and images those of all ranks.
"""

import itertools
import multiprocessing
import os
import re
import socket
import statistics
import sys
import tempfile
import time
from json import dumps
from pathlib import Path

import torch
import torch.distributed as dist

from configurator import configure
from nanodiff.common import UserError, get_dist, leave_together, print0
from nanodiff.device import (
    can_compile,
    choose_dtype,
    device_name,
    init_device,
    peak_flops,
    peak_memory_gb,
    reset_peak_memory,
    synchronize,
)
from nanodiff.workloads import SETS, load, sample, train

# The candidates: all combinations of these lists, comma-separated (the singular, as in --depth=4, does as well)
archs = "dit_classic,dit"  # of dit_classic, dit, unet
depths = "4"  # the dial
dtypes = "auto"  # of auto, bfloat16, float16, float32
compiles = "True"  # of True, False: torch.compile
batch_sizes = "32"  # images per step of each rank
optimizers = "adamw"  # of adamw, muon
checkpointing = False  # for each also one that recomputes activations
# Data
data = ""  # name of a prepared set, or its folder, which then tells size, channels, classes; "" = synthetic
autoencoder = ""  # path: encode on the fly; with synthetic data, for each candidate also one on cached latents
image_size = 32  # >= 1: pixels, also with an autoencoder
channels = 3  # >= 1: of the images
num_classes = 10  # >= 0: 0 = unconditional
patch_size = 0  # >= 0: of the DiT; 0 = for about 256 tokens
num_res_blocks = 3  # >= 1: of the UNet
# What to measure
training = True  # training steps
sampling = False  # drawing samples, the guided batch in one forward pass
sampler = "auto"  # auto|euler|heun|sde|ddpm|ddim|dpm++: auto = heun for flow, ddim for the rest
sample_steps = 10  # >= 1: of the sampler
cfg_scale = 2.0  # >= 0: guidance; 1 = none
loading = False  # reading a set, from the page cache and from the disk, against what the first candidate trains on
load_mib = 64  # >= 1: how much is read in a pass; without `data`, of this size are the sets made in a temporary folder
rounds = 5  # >= 1: turns that each candidate takes
steps = 4  # >= 1: steps in a turn, and half as many that are split
profile = ""  # path: chrome trace (.json) of 3 steps of the first candidate; its 15 costliest operations are shown
device_type = ""  # ""|cuda|cpu|mps: "" = the best that is present
as_json = False  # one JSON object instead of the tables
json = False  # the same, for short

LISTS = {
    "arch": ("dit_classic", "dit", "unet"), "depth": int, "dtype": ("auto", "bfloat16", "float16", "float32"),
    "compile": ("True", "False"), "batch_size": int, "optimizer": ("adamw", "muon"),
}  # fmt: skip
PARTS = ("forward", "backward", "optim", "ema", "data")
COLUMNS = {
    "img/s": "{images_per_sec:.1f}", "ratio": "{ratio:.2f}", "step ms": "{step_ms:.1f}",
    "min - max": "{min_ms:.1f} - {max_ms:.1f}",
}  # fmt: skip
COSTS = {"GiB": "{memory_gb:.2f}", "first s": "{first_step_s:.1f}"}
TABLES = {
    "training": COLUMNS | {part: f"{{{part}_ms:.1f}}" for part in PARTS} | {"optim/step": "{optim_share:.0%}"} | COSTS
    | {"MB sent": "{sent_mb:.2f}", "mfu": "{mfu:.1f}"},
    "sampling": COLUMNS | COSTS,
    "loading": {
        "warm img/s": "{warm_images_per_sec:.0f}", "cold img/s": "{cold_images_per_sec:.0f}",
        "model img/s": "{images_per_sec:.1f}", "warm/model": "{warm_ratio:.1f}", "cold/model": "{cold_ratio:.1f}",
        "MiB": "{mib:.1f}", "from disk": "{read_mib:.1f}",
    },
}  # fmt: skip

# ---------------------------------------------------------------------------------------------------------------------
# What to measure


def parse_list(name: str, text: str) -> list:
    """The values of a comma-separated setting. Raises UserError."""
    items, accepted = [item.strip() for item in text.split(",")], LISTS[name]
    if accepted is int and all(re.fullmatch("0*[1-9][0-9]{,8}", item) for item in items):
        return [int(item) for item in items]
    if accepted is not int and set(items) <= set(accepted):
        return [item == "True" for item in items] if name == "compile" else items
    known = "integers from 1 on" if accepted is int else ", ".join(accepted)
    raise UserError(f"{name}s={text!r}; accepted: {known}, comma-separated")


def published(table: str, spec: dict) -> dict:
    """The reference that a candidate is compared with."""
    arch = spec["arch"] if table == "sampling" or spec["arch"] == "unet" else "dit_classic"
    plain = {"dtype": "float32", "compile": False, "optimizer": "adamw", "checkpointing": False, "online": True}
    return spec | plain | {"arch": arch, "reference": True}


def candidates(config: dict) -> dict[str, list[dict]]:
    """{table: specs}, a reference before all that are to be compared with it."""
    values = itertools.product(*(parse_list(name, config[f"{name}s"]) for name in LISTS))
    flags = {"reference": False, "checkpointing": False, "online": True}
    specs, tables = [config | flags | dict(zip(LISTS, point)) for point in values], {}
    if training:
        encoding = (True, False) if autoencoder and not data else (True,)
        pairs = list(itertools.product(encoding, (False, True)[: 1 + checkpointing]))
        tables["training"] = [spec | {"online": o, "checkpointing": c} for spec in specs for o, c in pairs]
    if sampling:
        tables["sampling"] = [spec for spec in specs if spec["optimizer"] == specs[0]["optimizer"]]
    for table, rows in tables.items():
        groups = {}  # in the order of their first candidates
        for spec in rows:
            reference = published(table, spec)
            key = tuple(reference[name] for name in LISTS)
            groups.setdefault(key, [reference]).append(spec)
        tables[table] = [spec for group in groups.values() for spec in group]
    if loading:
        forms = [{"set": data}] if data else [{"set": form, "patch_size": 0} for form in SETS]
        tables["loading"] = [specs[0] | form for form in forms]
    return tables


def describe(spec: dict, table: str, device) -> str:
    """A candidate in words."""
    words = [
        f"{spec['arch']} d{spec['depth']}, batch {spec['batch_size']}",
        str(choose_dtype(spec["dtype"], device))[6:],
    ]
    words += ["compiled" if spec["compile"] else "eager"]
    words += [spec["optimizer"]] * (table != "sampling") + ["checkpointing"] * spec["checkpointing"]
    if autoencoder and table == "training":
        words.append("encoding on the fly" if spec["online"] else "cached latents")
    words += ["reference"] * spec["reference"]
    return ", ".join(words)


# ---------------------------------------------------------------------------------------------------------------------
# The processes that measure


def timed(functions, device) -> list[float]:
    """Seconds that each function takes, from an idle device to an idle device."""
    seconds = []
    synchronize(device)
    for function in functions:
        start = time.perf_counter()
        function()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return seconds


def profiled(step, path: str, device) -> str:
    """Write a chrome trace of 3 steps; a table of the 15 operations that took most time themselves."""
    kinds = torch.profiler.ProfilerActivity
    activities = [kinds.CPU] + [kinds.CUDA] * (device.type == "cuda")
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(3):
            step()
        synchronize(device)
    if get_dist()[0] == 0:
        profiler.export_chrome_trace(path)
    key = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    return profiler.key_averages().table(sort_by=key, row_limit=15, max_name_column_width=50)


def worker(connection, workload, spec):
    """A candidate: warm up, then take turns whenever the parent says how many steps; a path asks for a profile."""
    try:
        device = init_device(spec["device_type"])
        start = time.perf_counter()
        step, parts, facts = workload(spec, device)
        seconds = timed([step], device)
    except UserError as error:
        return connection.send(error)
    facts["first_step_s"] = time.perf_counter() - start
    connection.send(facts)
    for _ in range(2):
        timed([step, *parts.values()], device)
    reset_peak_memory(device)  # that of compiling
    while request := connection.recv():
        if isinstance(request, str):
            connection.send(profiled(step, request, device))
            continue
        if dist.is_initialized():
            dist.barrier()
        times = {name: [] for name in ("step", *parts)}
        for i in range(request):
            times["step"] += timed([step], device)
            for name, seconds in zip(parts, timed(parts.values(), device) if i % 2 == 0 else ()):
                times[name].append(seconds)
        connection.send((times, facts | {"memory_gb": peak_memory_gb(device)}))
    leave_together()


def receive(process, pipe):
    """What a worker sends; UserError where that is one, or the worker has died."""
    try:
        answer = pipe.recv()
    except EOFError:
        process.join()
        raise UserError(f"a candidate ended with exit code {process.exitcode}; its own words are above") from None
    if isinstance(answer, UserError):
        raise answer
    return answer


def start(workload, spec: dict, world: int):
    """A process for a candidate, and the pipe to it, warmed up."""
    if world > 1:  # a process group of its own, that meets at a port of its own
        with socket.socket() as free:
            free.bind(("", 0))
            port = [free.getsockname()[1]]
        dist.broadcast_object_list(port)
        os.environ |= {"MASTER_PORT": str(port[0]), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    spawn = multiprocessing.get_context("spawn")
    pipe, theirs = spawn.Pipe()
    process = spawn.Process(target=worker, args=(theirs, workload, spec), daemon=True)
    process.start()
    theirs.close()  # so that the end of the process is the end of the pipe
    receive(process, pipe)
    return process, pipe


def measure(workload, specs: list[dict], world: int, trace: str = ""):
    """[({name: [seconds]}, facts)] of each candidate, all in turns, and the text of the profile of the first."""
    # started one after the other, as compiling takes all cores
    workers = [start(workload, spec, world) for spec in specs]
    times, facts, text = [{} for _ in specs], [{} for _ in specs], ""
    for _ in range(rounds):
        for i, (process, pipe) in enumerate(workers):
            pipe.send(steps)
            turn, facts[i] = receive(process, pipe)
            times[i] = {name: times[i].get(name, []) + seconds for name, seconds in turn.items()}
    if trace:
        first = [spec["reference"] for spec in specs].index(False)
        workers[first][1].send(trace)
        text = receive(*workers[first])
    for process, pipe in workers:
        pipe.send(0)
        process.join()
    return list(zip(times, facts)), text


# ---------------------------------------------------------------------------------------------------------------------


def make_row(table: str, spec: dict, times: dict, facts: dict, reference: dict | None, world: int, device) -> dict:
    """The numbers of a candidate; `reference`: the row to compare it with, None if this is the reference itself."""
    ms = {name: 1000 * statistics.median(seconds) for name, seconds in times.items()}
    row = {"table": table, "what": describe(spec, table, device), "world": world} | facts
    row |= {key: spec[key] for key in (*LISTS, "reference", "checkpointing")}
    row |= {"step_ms": ms["step"], "min_ms": 1000 * min(times["step"]), "max_ms": 1000 * max(times["step"])}
    row |= {"images_per_sec": 1000 * spec["batch_size"] * world / ms["step"]}
    row["ratio"] = row["images_per_sec"] / reference["images_per_sec"] if reference else 1.0
    if table == "training":
        peak, flops = peak_flops(device), facts["flops_per_image"] * spec["batch_size"]
        row |= {f"{part}_ms": ms[part] for part in PARTS} | {"optim_share": ms["optim"] / ms["step"]}
        row |= {"mfu": 100_000 * flops / ms["step"] / peak if peak else 0.0, "sent_mb": facts["bytes_per_step"] / 1e6}
    if table == "sampling":
        row["what"] += f", {facts['sampler']}, {sample_steps} steps, guidance {cfg_scale:g}"
    if table == "loading":
        for kind in ("warm", "cold"):
            speed = 1000 * facts["images_in_pass"] / ms[kind]
            row |= {f"{kind}_images_per_sec": speed, f"{kind}_ratio": speed / row["images_per_sec"]}
        row |= {"set": spec["set"], "what": f"{spec['set']}; {row['what']}"}
    return row


def show(rows: list[dict], columns: dict[str, str]) -> None:
    """Print a table."""
    cells = [list(columns), *([text.format_map(row) for text in columns.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells)]
    for line, words in zip(cells, ["what", *(row["what"] for row in rows)]):
        print0("  ".join(cell.rjust(width) for cell, width in zip(line, widths)) + f"  {words}")


def main():
    names = "|".join(LISTS)
    config = configure(globals(), [re.sub(rf"^--({names})(?==)", r"--\1s", arg) for arg in sys.argv[1:]])
    tables, quiet, every_row = candidates(config), as_json or json, []
    if profile and (not training or not Path(profile).absolute().parent.is_dir()):
        raise UserError(f"profile={profile!r}; accepted: a file in a folder that is there, and training=True")
    if loading and not hasattr(os, "posix_fadvise"):
        raise UserError("loading=True wants Linux, where files can be dropped from the page cache")
    device, world = init_device(device_type), get_dist()[2]
    compiling = any(spec["compile"] for specs in tables.values() for spec in specs)
    obstacle = can_compile(device) if compiling else ""
    say = (lambda *args: None) if quiet else print0
    say(f"{world} x {device_name(device)}, torch {torch.__version__}" + f"; not compiled: {obstacle}" * bool(obstacle))
    for table, specs in tables.items():
        workload, trace = {"training": (train, profile), "sampling": (sample, ""), "loading": (load, "")}[table]
        with tempfile.TemporaryDirectory(prefix="nanodiff_bench_") as folder:
            more = [{"folder": f"{folder}/{i}"} | ({"compile": False} if obstacle else {}) for i in range(len(specs))]
            specs = [spec | extra for spec, extra in zip(specs, more)]
            found, text = measure(workload, specs, world, trace)
        rows = []
        for spec, (times, facts) in zip(specs, found):
            reference = None if spec["reference"] else next((r for r in reversed(rows) if r["reference"]), None)
            rows.append(make_row(table, spec, times, facts, reference, world, device))
        every_row += rows
        if text:
            say(f"\n3 steps of {rows[1]['what']}, in {profile}:\n{text}")
        say(f"\n{table}")
        if not quiet:
            show(rows, TABLES[table])
    if quiet:
        print0(dumps({"device": device_name(device), "torch": torch.__version__, "config": config, "rows": every_row}))
    leave_together()


if __name__ == "__main__":
    main()
