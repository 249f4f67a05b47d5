"""
A local page to sample from trained models: choose, watch the denoising, download the picture.

    python3 -m scripts.sample_web                                # http://127.0.0.1:8000, the newest run first
    python3 -m scripts.sample_web --model=shapes_dit_d4 --port=0   # any free port

The page starts from the settings of the run's own grids. With the same settings, image i is the one that
scripts/sample.py draws.
"""

import base64
import functools
import json
import os
import signal
import time
import traceback
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F

from configurator import check, configure, read_settings
from nanodiff.common import UserError, count, print0
from nanodiff.device import autocast_to, choose_dtype, device_name, init_device
from nanodiff.files import reading
from nanodiff.formats.load import Loaded, find_run, known_runs, load_run, read_file, shipped
from nanodiff.png import encode_png, make_grid
from nanodiff.prepare.decode import decode
from nanodiff.sampling.draw import ModelSamples
from nanodiff.sampling.inputs import start_from
from nanodiff.sampling.loaded import open_samples, parse_classes, settings_for
from nanodiff.training.checkpoint import list_checkpoints, load_meta
from nanodiff.web import form
from nanodiff.web.server import LocalHandler, LocalServer

model = ""  # the run (tag or folder) or file that the page shows first; "" = the run written to last
port = 8000  # [0, 65535]: on 127.0.0.1; 0 = any free one
low_res = ""  # images that super-resolution models enlarge: .npz, folder or val; "" = val, if there is one
autoencoder = ""  # path of the VAE of latent models; "" = where it was when their latents were made
device_type = ""  # ""|cuda|cpu|mps: "" = the best present
dtype = "auto"  # auto|bfloat16|float16|float32: dtype of the matrix products

MOST_FRAMES = 50  # pictures of the denoising; the page keeps all
FRAME_SIZE = 64  # pixels per image in these pictures

# ---------------------------------------------------------------------------------------------------------------------
# The runs on offer


def list_runs(first: Path) -> dict[str, Path]:
    """{tag: folder or file}: `first`, then the other runs, newest first, then the shipped weights."""
    runs = {}
    for path in [first, *known_runs(), *shipped().values()]:
        runs.setdefault(path.name.removesuffix(".safetensors"), path)
    return runs


def describe_run(path: Path) -> dict:
    """Describe a run or a file of weights: the choices that the page offers, and the settings of the run's grids.

    Raises UserError if the model cannot be sampled.
    """
    with reading(path, "was trained by another version"):
        if path.is_file():
            meta, _ = read_file(path, {})
            weights = [(meta["step"], meta["ema"])]
        else:
            checkpoints = list_checkpoints(path)
            if not checkpoints:
                raise UserError(f"{path} holds no checkpoint")
            newest = checkpoints[-1][1]
            meta, _ = read_file(newest / "model.safetensors", {})
            emas = [*map(str, load_meta(newest)["ema_rates"]), "raw"]
            weights = [(step, ema) for step, _ in reversed(checkpoints) for ema in emas]
        model = SimpleNamespace(config=meta["model_config"])  # only a model's config is needed here
        loaded = Loaded(model, meta["process"], meta["config"], meta["data"], meta["step"], "", "", path)
        return {
            "weights": weights,
            "classes": loaded.class_names,
            "is_guided": not loaded.why_unguided,
            "samplers": [*loaded.process.samplers],
            "time": path.stat().st_mtime,
        } | settings_for(loaded).named


# ---------------------------------------------------------------------------------------------------------------------
# Drawing


@functools.lru_cache(1)
def load(run_dir: Path, step: int, ema: str, time_ns: int, device) -> tuple[Loaded, ModelSamples]:
    """The model and its samples. `time_ns`: the weights' mtime, so that new ones of the same name are reloaded."""
    choice = () if run_dir.is_file() else (step, ema)
    loaded = load_run(str(run_dir), device, *choice)
    small_images = low_res if loaded.model.config.low_res else ""
    return loaded, open_samples(loaded, low_res=small_images, autoencoder=autoencoder)


def read_request(body: bytes) -> dict:
    """The fields of form.py from a request's JSON, checked as settings are; from_image as bytes."""
    request = json.loads(body)
    settings = read_settings(vars(form))
    if unknown := request.keys() - settings:
        raise ValueError(f"{', '.join(unknown)}; accepted: {', '.join(settings)}")
    request = {name: check(settings, name, request.get(name)) for name in settings}
    return request | {"from_image": base64.b64decode(request["from_image"], validate=True)}


def draw(request: dict, runs: dict[str, Path], send, device, compute_dtype) -> None:
    """Draw the samples of a request; send(**event) streams the steps, and up to MOST_FRAMES pictures of them."""
    start = time.perf_counter()
    path = runs.get(request["run"])
    if not path:
        raise UserError(f"run={request['run']!r} is gone: reload the page")
    send(note=f"Loading {request['run']}")
    step = request["checkpoint_step"]
    weights = dict(list_checkpoints(path)).get(step, path)
    loaded, samples = load(path, step, request["ema"], weights.stat().st_mtime_ns, device)
    classes = parse_classes(request["classes"], loaded.class_names)
    settings = settings_for(loaded, **request)
    samples = replace(samples, settings=settings, seed=request["seed"], classes=classes, not_finite=0)
    codec = samples.codec
    n = request["num_images"]
    facts = request | settings.named | {"from_image": None}
    notes = []
    if request["from_image"]:
        with reading("the picture to start from", "is no image"):
            picture, notes = decode(request["from_image"], [(codec.image_size, codec.image_size)])
        start_from(samples, picture[None], "a picture", request["strength"])
        facts["from_image"] = samples.start_images.description["from_images"]
    columns = samples.columns

    def send_picture(images, protocol="", **event):  # (C, H, W) uint8 each
        png = encode_png(make_grid(images, columns), protocol=protocol)
        send(picture=base64.b64encode(png).decode(), **event)

    def on_step(i, steps, x0):
        send(step=i, steps=steps)
        every = -(-steps // MOST_FRAMES)
        if i < steps and i % every == 0:
            x0 = F.avg_pool2d(x0, -(-x0.shape[-1] // FRAME_SIZE))
            send_picture(codec.preview(x0), step=i, steps=steps)

    if second_images := samples.second_images(range(n)):
        send_picture(second_images)
    images = []
    for ids in samples.batches(np.arange(n), n):
        with autocast_to(device, compute_dtype):
            images += samples.images(ids, on_step)
    if samples.not_finite:
        notes.append(f"{samples.not_finite} of the images are not finite (NaN)")
    classes = []  # classes of the grid's columns
    if loaded.num_classes and (n <= columns or columns % len(samples.turns.labels) == 0):
        classes = [loaded.class_names[label] for label in samples.labels(range(min(n, columns)))]
    seconds = time.perf_counter() - start
    send_picture(images, json.dumps(facts), settings=facts, classes=classes, seconds=seconds, warning="; ".join(notes))
    print0(f"{count(n, 'image', 'images')} of {request['run']} at step {loaded.step:,}")


# ---------------------------------------------------------------------------------------------------------------------
# Serving


class Handler(LocalHandler):
    def do_GET(self):
        if self.path == "/":
            page = Path(form.__file__).with_name("ui.html").read_text(encoding="utf-8")
            fields = {name: setting[:2] for name, setting in read_settings(vars(form)).items()}  # default, rule
            page = page.replace("$fields", json.dumps(fields))
            self.reply(page.encode(), "text/html; charset=utf-8")
        elif self.path == "/runs":
            choices = {}
            for tag, path in list_runs(self.server.first_run).items():
                with suppress(UserError, OSError):  # not offered if it cannot be sampled
                    choices[tag] = describe_run(path)
            self.reply(json.dumps(choices).encode(), "application/json")
        else:
            self.send_error(404)

    def do_POST(self):
        if self.path != "/sample":
            self.send_error(404)
            return
        try:
            request = read_request(self.body())
        except (ValueError, AttributeError, RecursionError) as e:
            self.refuse(400, f"request refused: {e}"[:500])
        else:
            self.stream(functools.partial(self.work, request))

    def work(self, request: dict, send) -> None:
        try:
            draw(request, list_runs(self.server.first_run), send, self.server.device, self.server.compute_dtype)
        except UserError as e:
            send(error=str(e))
        except (ConnectionError, TimeoutError):
            print0("a client left; its images were not drawn")
        except Exception as e:
            traceback.print_exc()
            send(error=f"{type(e).__name__}: {e}; the terminal that runs the server says more")


def main():
    first_run = find_run(model).resolve()
    describe_run(first_run)  # refuses a run that cannot be sampled
    device = init_device(device_type)
    compute_dtype = choose_dtype(dtype, device)
    server = LocalServer(port, Handler)
    server.first_run = first_run
    server.device = device
    server.compute_dtype = compute_dtype
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells make background jobs ignore it
    print0(f"device: {device_name(device)}, {str(compute_dtype).removeprefix('torch.')}, torch {torch.__version__}")
    print0(f"open http://{server.hosts[0]}/ in a browser; Ctrl-C ends it")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print0("\nstopped")
        os._exit(0)  # even while drawing: there is nothing to finish


if __name__ == "__main__":
    configure(globals())
    main()
