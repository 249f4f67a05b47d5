"""
A page on this machine to sample from trained models: choose, watch the denoising, keep what is worth keeping.

    python -m scripts.sample_web                                # http://127.0.0.1:8000, the newest run first
    python -m scripts.sample_web --run=shapes_dit_d4 --port=0   # any port that is free

Image i is the one that scripts/sample.py draws with the same settings. The page is nanodiff/web/ui.html; others can
ask as it does, with any of the settings in DEFAULTS, and read the server-sent events that come back:

    curl -N -H "Content-Type: application/json" -d '{"classes": "0,3", "num_images": 4}' http://127.0.0.1:8000/api/sample
"""

import base64
import functools
import hashlib
import json
import re
import signal
import threading
import time
import traceback
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F

import nanodiff
from configurator import configure
from nanodiff.common import UserError, base_dir, print0
from nanodiff.data.latents import load_codec
from nanodiff.device import choose_dtype, device_name, init_device
from nanodiff.diffusion.process import SAMPLERS, choose_sampler, make_process
from nanodiff.diffusion.sampling import SampleSettings, sample_images
from nanodiff.formats.load import find_run, load_run, parse_classes
from nanodiff.png import encode_png
from nanodiff.training.checkpoint import list_checkpoints, load_meta
from nanodiff.web.server import Job, LocalHandler, LocalServer

run = ""  # tag or folder of the run that the page shows first; "" = the run that was written to last
port = 8000  # [0, 65535]: of 127.0.0.1; 0 = any that is free
max_images = 64  # >= 1: in one request
max_steps = 1000  # >= 1: of the sampler, in one request
max_queue = 4  # >= 1: requests that wait while one is drawn
batch_size = 64  # >= 1: images at a time
autoencoder = ""  # path of that of latent models; "" = where it was when their latents were made
device_type = ""  # ""|cuda|cpu|mps: "" = the best that is present
dtype = "auto"  # auto|bfloat16|float16|float32: of the matrix products

# What a request may say, in the names of scripts/sample.py's settings; run and ema "", checkpoint_step -1: the first
DEFAULTS = dict(
    run="", checkpoint_step=-1, ema="", classes="", cfg_scale=2.0, sampler="auto", steps=50, seed=0, num_images=16
)  # fmt: skip
MAX_TEXT = 1000  # characters of a string
KINDS = {int: "an integer", float: "a number", str: "a string"}
FRAMES, PREVIEW_SIZE = 20, 64  # most pictures of the denoising of an image, the last one included; pixels a side

PAGE = (Path(nanodiff.__file__).parent / "web" / "ui.html").read_bytes()
INLINE = {kind: re.search(rf"<{kind}>(.*?)</{kind}>".encode(), PAGE, re.DOTALL)[1] for kind in ("script", "style")}
HASHES = {kind: base64.b64encode(hashlib.sha256(text).digest()).decode() for kind, text in INLINE.items()}
POLICY = "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
POLICY += "frame-ancestors 'none'; " + "; ".join(f"{kind}-src 'sha256-{hash}'" for kind, hash in HASHES.items())


def describe_run(path: Path) -> dict:
    """What the page must know of a run to offer what it can do. UserError for one that it cannot draw from."""
    checkpoints = list_checkpoints(path)
    if not checkpoints:
        raise UserError(f"{path} holds no checkpoint")
    meta = load_meta(checkpoints[-1][1])
    try:
        if meta["model_config"]["low_res"]:
            raise UserError(f"{path} is of a super-resolution model: its training run shows samples of it")
        if "lora" in meta:  # adapters to another run, or to a file: which process that is is known when it is loaded
            samplers, most_steps, guided = SAMPLERS, max_steps, True
        else:
            process = make_process(meta["config"], meta["data"])
            samplers, most_steps = process.samplers, min(max_steps, process.num_timesteps or max_steps)
            guided = meta["config"]["label_drop"] > 0
        return {
            "checkpoint_steps": [step for step, _ in reversed(checkpoints)],
            "emas": [*map(str, meta["ema_rates"]), "raw"],
            "classes": meta["data"]["class_names"] if meta["model_config"]["num_classes"] else [],
            "samplers": ["auto", *samplers],
            "max_steps": most_steps,
            "guided": guided and meta["model_config"]["num_classes"] > 0,
        }
    except (KeyError, TypeError) as e:
        raise UserError(f"{path}: settings that this version does not know: {e}") from e


def list_runs(first: Path) -> dict[str, Path]:
    """{tag: folder} of runs with checkpoints: `first`, then the others, those written to last before the rest."""
    others = (p for p in (base_dir() / "runs").glob("*") if (p / "checkpoints").is_dir())
    newest = sorted(others, key=lambda p: p.stat().st_mtime, reverse=True)
    return {first.name: first} | {p.name: p for p in newest if p.name != first.name}


def describe_runs(runs: dict[str, Path]) -> dict[str, dict]:
    """{tag: facts} of those that can be drawn from."""
    known = {}
    for tag, path in runs.items():
        try:
            known[tag] = describe_run(path)
        except UserError:
            pass
    return known


def read_request(body: bytes, runs: dict[str, Path]) -> dict:
    """The settings of a request, complete and checked; `path` is the run's folder. Raises UserError, in one line."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as e:
        raise UserError(f"the request is not JSON: {e}") from None
    accepted = f"accepted: an object with any of {', '.join(DEFAULTS)}"
    if not isinstance(given, dict):
        raise UserError(f"the request is {str(given)[:40]!r}; {accepted}")
    for name, value in given.items():
        if name not in DEFAULTS:
            raise UserError(f"the request has {name[:40]!r}; {accepted}")
        kind = type(DEFAULTS[name])
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise UserError(f"{name}={str(value)[:40]!r} is not accepted; accepted: {KINDS[kind]}")
        if kind is str and len(value) > MAX_TEXT:
            raise UserError(f"{name} has {len(value):,} characters; accepted: {MAX_TEXT:,}")
    s = DEFAULTS | given
    s["run"] = s["run"] or next(iter(runs))
    if s["run"] not in runs:
        raise UserError(f"run={s['run'][:80]!r} is not one of those here: {', '.join(runs)}")
    facts = describe_run(runs[s["run"]])
    if s["checkpoint_step"] == -1:
        s["checkpoint_step"] = facts["checkpoint_steps"][0]
    s["ema"] = s["ema"] or facts["emas"][0]
    for name in ("checkpoint_step", "ema", "sampler"):
        choice = [str(value) for value in facts[f"{name}s"]]
        if str(s[name]) not in choice:
            raise UserError(f"{name}={str(s[name])[:40]!r} is none of this run's; accepted: {', '.join(choice)}")
    limits = {"steps": (1, facts["max_steps"]), "num_images": (1, max_images), "cfg_scale": (0, 100)}
    for name, (low, high) in (limits | {"seed": (0, 2**53 - 1)}).items():  # the integers that JavaScript counts by
        if not low <= s[name] <= high:
            raise UserError(f"{name}={str(s[name])[:40]} is not accepted; accepted: {low} to {high}")
    parse_classes(s["classes"], len(facts["classes"]))
    return s | {"cfg_scale": float(s["cfg_scale"]) if facts["guided"] else 1.0, "path": runs[s["run"]]}


@functools.lru_cache(maxsize=1)  # the old one goes when the new one is there: there are two at most
def load(path: Path, step: int, ema: str, mtime_ns: int, device):
    """(model and what belongs to it, codec) of a checkpoint. `mtime_ns` tells it from an older one of its name."""
    loaded = load_run(str(path), device, step, ema)
    codec = load_codec(loaded.data, device, autoencoder)
    codec.keep_loaded()
    return loaded, codec


def encode_images(images, texts) -> list[str]:
    """(N, C, H, W) uint8 -> PNG files in base 64, each with its text chunks."""
    pngs = (encode_png(image.permute(1, 2, 0).numpy(), text) for image, text in zip(images, texts))
    return [base64.b64encode(png).decode() for png in pngs]


class ClientLeft(Exception):
    """Nobody waits for these images any more."""


def draw(job: Job, device, compute_dtype) -> None:
    """Draw what a job asks for; its events are documented by the calls of job.send.

    Raises UserError for a checkpoint that is broken, or gone since the request was checked; ClientLeft.
    """
    s, start = job.request, time.perf_counter()
    path, step, n = s["path"], s["checkpoint_step"], s["num_images"]
    job.send(note=f"Loading {path.name} at step {step:,}")
    folder = dict(list_checkpoints(path)).get(step)
    loaded, codec = load(path, step, s["ema"], folder.stat().st_mtime_ns if folder else 0, device)
    num_classes, class_names = loaded.num_classes, loaded.data["class_names"]
    chosen = parse_classes(s["classes"], num_classes)
    labels = [chosen[i % len(chosen)] for i in range(n)]
    sampler = choose_sampler(loaded.process, s["sampler"], s["steps"])
    cfg_scale = s["cfg_scale"] if loaded.has_null_class else 1.0
    autocast = nullcontext() if compute_dtype == torch.float32 else torch.autocast(device.type, dtype=compute_dtype)
    drawn = []  # sizes of the batches that are done

    def on_step(i, steps, x0):
        if job.gone.is_set():
            raise ClientLeft
        first, event = sum(drawn), {"step": i, "steps": steps}
        if i < steps and i * FRAMES // steps > (i - 1) * FRAMES // steps:
            small = codec.preview(F.avg_pool2d(x0, -(-x0.shape[-1] // PREVIEW_SIZE)))
            event |= {"first": first, "images": encode_images(small, [None] * len(small))}
        job.send(progress=(first + len(x0) * i / steps) / n, **event)

    how = SampleSettings(s["steps"], sampler, cfg_scale)
    seeds, cond = [(s["seed"] << 32) + i for i in range(n)], {"y": torch.tensor(labels)} if num_classes else {}
    with autocast:
        x0 = sample_images(
            loaded.model, loaded.process, seeds, cond, codec.shape, how, batch_size, drawn.append, on_step
        )
    settings = {name: s[name] for name in DEFAULTS} | {"sampler": sampler, "cfg_scale": cfg_scale}
    classes = [class_names[label] if num_classes else "" for label in labels]
    facts = settings | {"dtype": str(compute_dtype)[6:]}
    texts = [{"protocol": json.dumps(facts | {"image": i, "class": name})} for i, name in enumerate(classes)]
    images, seconds = encode_images(codec.to_pixels(x0), texts), time.perf_counter() - start
    job.send(settings=settings, classes=classes, images=images, seconds=seconds, warning=codec.undecodable)
    print0(f"{n} images of {path.name} at step {step:,} in {seconds:.1f} s")


class Handler(LocalHandler):
    """The page, what it must know, and its requests."""

    def do_GET(self):
        if self.path == "/":
            self.reply(200, PAGE, "text/html; charset=utf-8", Content_Security_Policy=POLICY)
        elif self.path == "/api/runs":
            runs = describe_runs(list_runs(self.server.first_run))
            self.reply(200, {"runs": runs, "defaults": DEFAULTS, "max_images": max_images})
        else:
            self.refuse(404, "there is no such page; accepted: /")

    def do_POST(self):
        if self.path != "/api/sample":
            self.refuse(404, "there is no such service; accepted: /api/sample")
            return
        if (body := self.read_body()) is None:
            return
        try:
            job = Job(read_request(body, list_runs(self.server.first_run)))
        except UserError as e:
            self.refuse(400, str(e))
        else:
            self.stream(job)


def main():
    first_run = find_run(run)
    if first_run.is_file():
        raise UserError(f"run={run!r} is a file, and the page draws from runs: use scripts.sample")
    describe_run(first_run)  # refuses what cannot be shown
    device = init_device(device_type)
    compute_dtype = choose_dtype(dtype, device)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)  # also where a shell has put us in the background
    server = LocalServer(port, Handler, max_queue)
    server.first_run = first_run
    threading.Thread(target=server.serve_forever, daemon=True).start()
    print0(f"device: {device_name(device)}, {str(compute_dtype)[6:]}, torch {torch.__version__}")
    print0(f"open {server.origins[0]}/ in a browser; Ctrl-C ends it")
    try:
        while True:  # models stay in this thread: torch keeps threads of its own for every one that computes
            job = server.next_job()
            try:
                draw(job, device, compute_dtype)
            except ClientLeft:
                print0("a client left: its images are not drawn")
            except UserError as e:
                job.send(error=str(e))
            except torch.OutOfMemoryError:
                job.send(error=f"out of memory with {job.request['num_images']} images; accepted: fewer")
            except Exception:
                traceback.print_exc()
                job.send(error="internal fault: the terminal in which the server runs shows what it was")
            finally:
                job.finish()
    except KeyboardInterrupt:
        print0("\nstopped")


if __name__ == "__main__":
    config = configure(globals())
    main()
