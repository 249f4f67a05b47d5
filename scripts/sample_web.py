"""
A page on this machine to sample from trained models: choose, watch the denoising, save the good ones.

    python -m scripts.sample_web                                # http://127.0.0.1:8000, the newest run first
    python -m scripts.sample_web --run=shapes_dit_d4 --port=0   # any free port

Image i is the one that scripts/sample.py draws with the same settings. Programs can post as the page does, with any of
the settings in DEFAULTS; the reply is a stream of server-sent events:

    curl -N -H "Content-Type: application/json" -d '{"classes": "0,3", "num_images": 4}' http://127.0.0.1:8000/api/sample
"""

import base64
import functools
import hashlib
import json
import os
import re
import shlex
import signal
import time
import traceback
from contextlib import suppress
from pathlib import Path

import torch
import torch.nn.functional as F

import nanodiff
from configurator import KINDS, cast, configure, satisfies
from nanodiff.common import UserError, base_dir, print0
from nanodiff.data.codec import load_codec
from nanodiff.device import autocast_to, choose_dtype, device_name, init_device
from nanodiff.diffusion.guidance import choose_guidance
from nanodiff.diffusion.process import SAMPLERS, choose_sampler, make_process
from nanodiff.formats.load import find_run, load_run
from nanodiff.png import encode_png
from nanodiff.sampling.draw import ModelSamples, SampleSettings, parse_classes, parse_size
from nanodiff.sampling.low_res import open_low_res
from nanodiff.training.checkpoint import list_checkpoints, load_meta
from nanodiff.web.server import LocalHandler, LocalServer

run = ""  # tag or folder of the run that the page shows first; "" = the one written to last
port = 8000  # [0, 65535]: on 127.0.0.1; 0 = any free one
max_images = 64  # >= 1: images in one request
max_steps = 1000  # >= 1: sampler steps in one request
max_queue = 4  # >= 1: requests that may wait
batch_size = 64  # >= 1: images drawn at a time
low_res = ""  # what super-resolution models enlarge: .npz, folder or val; "" = val, if there is one
autoencoder = ""  # path of the VAE of latent models; "" = where it was when their latents were made
device_type = ""  # ""|cuda|cpu|mps: "" = the best one present
dtype = "auto"  # auto|bfloat16|float16|float32: dtype of the matrix products

# Request defaults, named as in scripts/sample.py. run "", checkpoint_step -1 and ema "" select the first on offer
DEFAULTS = {"run": "", "checkpoint_step": -1, "ema": "", "classes": "", "cfg_scale": 2.0, "sampler": "auto"}
DEFAULTS |= {"steps": 10, "seed": 0, "num_images": 16, "size": ""}
FRAMES = 20  # pictures of an image's denoising at most, the last included
PREVIEW_SIZE = 64  # their size in pixels

# Content security policy: only the page's own inline script and style, by hash
PAGE = (Path(nanodiff.__file__).parent / "web" / "ui.html").read_bytes()
POLICY = "default-src 'none'; connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
POLICY += "frame-ancestors 'none'"
for kind in ("script", "style"):
    inline = re.search(rf"<{kind}>(.*?)</{kind}>".encode(), PAGE, re.DOTALL)[1]
    POLICY += f"; {kind}-src 'sha256-{base64.b64encode(hashlib.sha256(inline).digest()).decode()}'"

# ---------------------------------------------------------------------------------------------------------------------
# The runs on offer, and requests


def describe_run(path: Path) -> dict:
    """The page's options for a run. Raises UserError if it cannot be sampled."""
    checkpoints = list_checkpoints(path)
    if not checkpoints:
        raise UserError(f"{path} holds no checkpoint")
    meta = load_meta(checkpoints[-1][1])
    try:
        num_classes = meta["model_config"]["num_classes"]
        # An adapter has its base's process, known once that is loaded
        process = None if "lora" in meta else make_process(meta["config"], meta["data"])
        return {
            "checkpoint_steps": [step for step, _ in reversed(checkpoints)],
            "emas": [*map(str, meta["ema_rates"]), "raw"],
            "classes": meta["data"]["class_names"] if num_classes else [],
            "sizes": list_sizes(meta["data"]),
            "samplers": ["auto", *(process.samplers if process else SAMPLERS)],
            "max_steps": min(max_steps, getattr(process, "num_timesteps", 0) or max_steps),
            "guided": num_classes > 0 and (process is None or meta["config"]["label_drop"] > 0),
            "enlarges": meta["model_config"]["low_res"] > 0,  # small images, which have classes of their own
        }
    except KeyError as e:
        raise UserError(f"{path}: this version needs {e} in its settings") from None


def list_sizes(facts: dict) -> list[str]:
    """HEIGHTxWIDTH in pixels for a model trained on aspect buckets, most common first; [""] for square images."""
    pixels = facts.get("latents", {}).get("downsample", 1)
    sizes = sorted(facts.get("sizes", []), key=lambda size: -size[2])
    return [f"{height * pixels}x{width * pixels}" for height, width, _ in sizes] or [""]


def list_runs(first: Path) -> dict[str, Path]:
    """{tag: folder} of the runs with checkpoints: `first`, then the others, newest first."""
    others = [path for path in (base_dir() / "runs").glob("*") if (path / "checkpoints").is_dir()]
    others.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    return {first.name: first} | {path.name: path for path in others if path.name != first.name}


def describe_runs(runs: dict[str, Path]) -> dict[str, dict]:
    """{tag: options} of the runs that the page can sample."""
    offered = {}
    for tag, path in runs.items():
        with suppress(UserError):
            offered[tag] = describe_run(path)
    return offered


def read_request(body: bytes, runs: dict[str, Path]) -> dict:
    """A request's settings, checked for type and range, and the run's folder as `path`. `draw` checks the rest."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError) as e:
        raise UserError(f"the request is not JSON: {e}") from None
    if not isinstance(given, dict) or not given.keys() <= DEFAULTS.keys():
        raise UserError(f"the request is {str(given)[:40]!r}; accepted: an object with any of {', '.join(DEFAULTS)}")
    rules = {"steps": f"[1, {max_steps}]", "num_images": f"[1, {max_images}]", "cfg_scale": "[0, 100]"}
    rules["seed"] = f"[0, {2**53 - 1}]"  # JavaScript counts no further
    s = {}
    for name, value in (DEFAULTS | given).items():
        kind = type(DEFAULTS[name]).__name__
        s[name] = cast(kind, value)
        if s[name] is None or (name in rules and not satisfies(s[name], rules[name])):
            accepted = f"{KINDS[kind]} {rules.get(name, '')}"
            raise UserError(f"{name}={str(value)[:40]!r} is not accepted; accepted: {accepted}")
    s["run"] = s["run"] or next(iter(runs))
    if s["run"] not in runs:
        raise UserError(f"run={s['run'][:80]!r} is unknown; known runs: {', '.join(runs)}")
    return s | {"path": runs[s["run"]]}


# ---------------------------------------------------------------------------------------------------------------------
# Drawing


@functools.lru_cache(maxsize=1)  # the old model is dropped when the new one is loaded: two in memory at most
def load(run_dir: Path, step: int, ema: str, checkpoints: tuple, device):
    """(Loaded, codec, LowRes). `checkpoints`, with their times, change when a run continues or restarts."""
    loaded = load_run(str(run_dir), device, step, ema)
    codec = load_codec(loaded.data, device, autoencoder)
    return loaded, codec, open_low_res(loaded.model.config.low_res and low_res, loaded, device, autoencoder)


def encode_images(images, texts=None) -> list[str]:
    """(N, C, H, W) uint8 -> PNG files in base 64, each with its text."""
    texts = texts or [None] * len(images)
    pngs = [encode_png(image.permute(1, 2, 0).numpy(), text) for image, text in zip(images, texts)]
    return [base64.b64encode(png).decode() for png in pngs]


def draw(s: dict, send, device, compute_dtype) -> None:
    """Draw the images of a request `s`; send(**event) streams them as they form."""
    start = time.perf_counter()
    n = s["num_images"]
    send(note=f"Loading {s['run']}")
    checkpoints = tuple((path, path.stat().st_mtime_ns) for _, path in list_checkpoints(s["path"]))
    loaded, codec, small = load(s["path"], s["checkpoint_step"], s["ema"], checkpoints, device)
    s["size"] = s["size"] or list_sizes(loaded.data)[0]
    shape = parse_size(s["size"], loaded.model.config, codec) or codec.shape
    class_names = loaded.data["class_names"][: loaded.num_classes]
    chosen = parse_classes(s["classes"], class_names)
    sampler = choose_sampler(loaded.process, s["sampler"], s["steps"])
    cfg_scale, interval = choose_guidance(s["cfg_scale"], "0,1", loaded.has_null_class)
    how = SampleSettings(s["steps"], sampler, cfg_scale, interval)
    samples = ModelSamples(loaded.model, loaded.process, codec, how, s["seed"], small, chosen)
    first = 0  # image of the batch

    def on_step(i, steps, x0):
        nonlocal first
        event = {"step": i, "steps": steps, "progress": (first + len(x0) * i / steps) / n}
        if i == steps:
            first += len(x0)
        elif i * FRAMES // steps > (i - 1) * FRAMES // steps:
            preview = codec.preview(F.avg_pool2d(x0, -(-x0.shape[-1] // PREVIEW_SIZE)))
            event |= {"first": first, "images": encode_images(preview)}
        send(**event)

    if small:
        send(images=encode_images(small.pixels(range(n))))  # the first frames: the inputs
    with autocast_to(device, compute_dtype):
        x0 = samples.draw(range(n), shape, batch_size, on_step)
    settings = {name: s[name] for name in DEFAULTS} | {"checkpoint_step": loaded.step, "ema": loaded.weights}
    settings |= {"sampler": sampler, "cfg_scale": cfg_scale}
    classes = [class_names[label] if class_names else "" for label in samples.labels(range(n))]
    command = [f"--{name}={shlex.quote(str(value))}" for name, value in settings.items() if value != ""]
    command = ["python -m scripts.sample", *command]
    facts = settings | {"dtype": str(compute_dtype).removeprefix("torch.")}
    texts = [{"protocol": json.dumps(facts | {"image": i, "class": name})} for i, name in enumerate(classes)]
    images = encode_images(codec.to_pixels(x0), texts)
    seconds = time.perf_counter() - start
    bad = samples.not_finite
    warning = f"{bad} of the images are not finite (NaN)" if bad else codec.undecodable
    send(settings=settings, classes=classes, images=images, command=command, seconds=seconds, warning=warning)
    print0(f"{n} images of {s['run']} at step {loaded.step:,} in {seconds:.1f} s")


# ---------------------------------------------------------------------------------------------------------------------
# Serving


class Handler(LocalHandler):
    def do_GET(self):
        if self.path == "/":
            self.reply(200, PAGE, {"Content-Type": "text/html; charset=utf-8", "Content-Security-Policy": POLICY})
        elif self.path == "/api/runs":
            runs = describe_runs(list_runs(self.server.first_run))
            defaults = DEFAULTS | {"num_images": min(DEFAULTS["num_images"], max_images)}
            self.reply(200, json.dumps({"runs": runs, "defaults": defaults, "max_images": max_images}).encode())
        else:
            self.refuse(404, "unknown address; accepted: /")

    def do_POST(self):
        if self.path != "/api/sample":
            self.refuse(404, "unknown address; accepted: /api/sample")
        elif (body := self.read_body()) is not None:
            try:
                request = read_request(body, list_runs(self.server.first_run))
            except UserError as e:
                self.refuse(400, str(e))
            else:
                self.stream(functools.partial(self.work, request))

    def work(self, request, send) -> None:
        try:
            draw(request, send, self.server.device, self.server.compute_dtype)
        except (ConnectionError, TimeoutError):
            print0("a client left: its images are not drawn")
        except (UserError, torch.OutOfMemoryError) as e:
            send(error=str(e))
        except Exception:
            traceback.print_exc()
            send(error="internal error: see the terminal that runs the server")


def main():
    first_run = find_run(run)
    if first_run.is_file():
        raise UserError(f"run={run!r} is a file, and the page samples runs: use scripts.sample")
    describe_run(first_run)  # refuses a run that cannot be sampled
    device = init_device(device_type)
    compute_dtype = choose_dtype(dtype, device)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)  # shells make background jobs ignore SIGINT
    server = LocalServer(port, Handler, max_queue)
    server.first_run, server.device, server.compute_dtype = first_run, device, compute_dtype
    print0(f"device: {device_name(device)}, {str(compute_dtype).removeprefix('torch.')}, torch {torch.__version__}")
    print0(f"open http://{server.hosts[0]}/ in a browser; Ctrl-C ends it")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print0("\nstopped")
        os._exit(0)  # even while drawing: there is nothing to finish


if __name__ == "__main__":
    config = configure(globals())
    main()
