"""The page draws what scripts/sample.py draws, says no in one line, and survives its clients."""

import base64
import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import numpy as np
import pytest
import torch
from conftest import ROOT
from tiny_runs import TIMELESS, make_autoencoder, make_run, make_runs
from webdriver import CHROMEDRIVER, Browser

from nanodiff.common import UserError
from nanodiff.data.shapes import CLASS_NAMES
from nanodiff.metrics import features
from nanodiff.png import decode_png
from nanodiff.training.checkpoint import load_meta, save_checkpoint
from scripts.sample_web import FRAMES, describe_run, describe_runs, draw, list_runs, read_request


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    base = tmp_path_factory.mktemp("made")
    make_runs(base, flow=[], sr=["--low_res_size=8"])
    return base


@pytest.fixture
def flow(base, made):
    shutil.copytree(made, base, dirs_exist_ok=True)
    return base / "runs" / "flow"


def drawn(run_dir, **settings):
    """The events of a drawing."""
    events = []
    request = read_request(json.dumps(settings).encode(), list_runs(run_dir))
    draw(request, lambda **event: events.append(json.loads(json.dumps(event))), torch.device("cpu"), torch.float32)
    return events


def pixels(images):
    return np.stack([decode_png(base64.b64decode(image)) for image in images])


def text_of(png):
    """The protocol in the tEXt chunk of a PNG in base 64."""
    data = base64.b64decode(png)
    at = data.index(b"tEXtprotocol\0")
    return json.loads(data[at + 13 : at + 4 + int.from_bytes(data[at - 4 : at])])


# ---------------------------------------------------------------------------------------------------------------------
# What is drawn


@pytest.mark.parametrize(
    "settings",
    [
        dict(num_images=5, sampler="heun", seed=3),
        dict(num_images=6, sampler="sde", classes="3,0", cfg_scale=4, ema="raw"),
        dict(num_images=2, sampler="euler", checkpoint_step=0, seed=2**40),
        dict(num_images=3, run="sr"),
    ],
)
def test_the_page_draws_what_the_script_draws(flow, run_script, tmp_path, settings):
    settings = {"run": "flow"} | settings
    first, *_, last = (event for event in drawn(flow, steps=3, **settings) if "images" in event)
    if settings["run"] == "sr":  # shows first what it enlarges
        small = pixels(first["images"])
        assert (small[:, ::2, ::2] == small[:, 1::2, 1::2]).all()
    args = [f"--{name}={value}" for name, value in settings.items()]
    run_script("sample", *TIMELESS, "--npz", "--steps=3", f"--out={tmp_path / 'a'}", *args)
    with np.load(tmp_path / "a.npz") as file:
        assert (pixels(last["images"]) == file["arr_0"]).all()
        assert last["classes"] == [CLASS_NAMES[label] for label in file["labels"]]
    assert settings.items() <= last["settings"].items()  # the link, the command and the files say these
    assert drawn(flow, **last["settings"])[-1]["images"] == last["images"]
    for i, png in enumerate(last["images"]):
        facts = {"image": i, "class": last["classes"][i], "dtype": "float32"}
        assert text_of(png) == last["settings"] | facts


@pytest.mark.parametrize("steps, frames", [(1, 0), (2, 1), (7, 6), (50, FRAMES - 1)])
def test_the_denoising_arrives_step_by_step(flow, steps, frames):
    events = drawn(flow, steps=steps, num_images=2, sampler="euler")
    progress = [event for event in events if "progress" in event]
    assert [event["step"] for event in progress] == [*range(1, steps + 1)]
    assert [event["progress"] for event in progress] == pytest.approx([i / steps for i in range(1, steps + 1)])
    previews = [pixels(event["images"]) for event in progress if "images" in event]
    assert len(previews) == frames and all(p.shape == (2, 16, 16, 3) for p in previews)
    end = pixels(events[-1]["images"]).astype(int)
    apart = [np.abs(p - end).mean() for p in previews]
    assert apart[-1:] <= apart[:1]  # the guess comes nearer to what it becomes


def test_batches_are_of_one_drawing(flow, monkeypatch):
    whole = drawn(flow, steps=2, num_images=5)
    monkeypatch.setattr("scripts.sample_web.batch_size", 2)
    events = drawn(flow, steps=2, num_images=5)
    assert [(e["first"], len(e["images"])) for e in events if "first" in e] == [(0, 2), (2, 2), (4, 1)]
    progress = [event["progress"] for event in events if "progress" in event]
    assert progress == sorted(progress) and progress[-1] == 1
    a, b = (pixels(e[-1]["images"]).astype(int) for e in (whole, events))
    assert np.abs(a - b).max() <= 1  # sums in another order


def test_latents_are_watched_as_they_are_and_decoded_at_the_end(flow, run_script, tmp_path):
    encoder = make_autoencoder(tmp_path / "vae")
    run_dir = make_run(run_script, "latent", f"--autoencoder={encoder}", "--patch_size=1")
    events = drawn(run_dir, steps=2, num_images=2)
    previews = [pixels(event["images"]) for event in events if "first" in event]
    assert [p.shape for p in previews] == [(2, 4, 4, 3)]
    assert pixels(events[-1]["images"]).shape == (2, 16, 16, 3) and not events[-1]["warning"]
    encoder.rename(tmp_path / "elsewhere")
    os.utime(run_dir / "checkpoints" / "step_000001")  # as if it were new: what is loaded is kept otherwise
    *_, last = drawn(run_dir, steps=1, num_images=1)
    assert "--autoencoder" in last["warning"] and pixels(last["images"]).shape == (1, 4, 4, 3)


# ---------------------------------------------------------------------------------------------------------------------
# What is offered, and what is refused


def test_runs_are_offered_as_they_can_be_drawn_from(flow, run_script):
    names = load_meta(flow / "checkpoints" / "step_000001")["data"]["class_names"]
    assert describe_run(flow) == {
        "checkpoint_steps": [1, 0], "emas": ["0.999", "raw"], "classes": names, "guided": True, "max_steps": 1000,
        "samplers": ["auto", "euler", "heun", "sde"], "enlarges": False, "sizes": [""],
    }  # fmt: skip
    eps = make_run(run_script, "eps", "--objective=eps", "--num_timesteps=50", "--class_cond=False")
    facts = {"samplers": ["auto", "ddpm", "ddim", "dpm++"], "max_steps": 50, "classes": [], "guided": False}
    assert facts.items() <= describe_run(eps).items()
    assert not describe_run(make_run(run_script, "always", "--label_drop=0"))["guided"]
    broken = eps.parent / "broken"
    (broken / "checkpoints" / "step_000001").mkdir(parents=True)
    (eps.parent / "not a run").mkdir()
    runs = list_runs(eps)
    assert next(iter(runs)) == "eps" and {*describe_runs(runs)} == {"eps", "flow", "always", "sr"}
    assert "not a run" not in runs
    for tag in ("eps", "always"):  # unconditional, and without a null class: no guidance
        assert drawn(eps, run=tag, steps=2, num_images=2, cfg_scale=4)[-1]["settings"]["cfg_scale"] == 1


def test_images_that_are_not_finite_are_told(flow, monkeypatch):
    draw_them = features.sample_images
    monkeypatch.setattr(features, "sample_images", lambda *args: draw_them(*args).log())
    *_, last = drawn(flow, steps=1, num_images=2)
    assert last["warning"] == "2 of the images are not finite (NaN)"


def test_a_run_of_adapters_is_offered_too(flow, run_script):
    args = ("--base=flow", "--data=tiny", "--num_iterations=1", "--total_batch_size=8", "--compile=False")
    tuned = run_script("lora_train", *TIMELESS, *args, "--model_tag=tuned")["run_dir"]
    facts = describe_run(tuned)
    assert facts["classes"] == describe_run(flow)["classes"] and facts["emas"] == ["raw"]
    *_, last = drawn(flow, run="tuned", steps=2, num_images=2, sampler="auto")
    assert last["settings"]["sampler"] == "heun" and len(last["images"]) == 2
    with pytest.raises(UserError, match="flow matching"):  # known only now
        drawn(flow, run="tuned", steps=2, num_images=2, sampler="ddim")


def test_a_new_run_of_the_same_name_is_loaded_anew(flow):
    images = lambda: drawn(flow, steps=1, num_images=1)[-1]["images"]
    first = images()
    checkpoint = flow / "checkpoints" / "step_000001"
    tensors = {p.stem: torch.load(p, weights_only=True) for p in checkpoint.glob("*.pt")}
    tensors["ema_0.999"] = {name: 2 * x for name, x in tensors["ema_0.999"].items()}
    save_checkpoint(flow, 1, tensors, load_meta(checkpoint))
    assert images() != first


MISTAKES = [  # a request, and what its line names
    ("", "JSON"), ("[" * 10_000, "JSON"), ("{'run': 1}", "JSON"), ("[]", "object"), ('{"out": "/tmp/x"}', "'out'"),
    ('{"run": "../flow"}', "run"), ('{"run": "/"}', "run"), ('{"run": {}}', "a string"),
    ('{"checkpoint_step": "1"}', "an integer"),
    ('{"steps": 0}', "[1, 1000]"), ('{"steps": 1001}', "[1, 1000]"), ('{"steps": true}', "an integer"),
    ('{"num_images": 65}', "[1, 64]"), ('{"seed": 9007199254740992}', "seed"), ('{"cfg_scale": NaN}', "[0, 100]"),
    ('{"cfg_scale": "2"}', "a finite number"),
    # those that the model refuses
    ('{"ema": "0.9"}', "0.999"), ('{"checkpoint_step": 7}', "step 7"), ('{"sampler": "ddim"}', "auto, euler"),
    ('{"classes": "8"}', "8 classes"), ('{"classes": "1,,2"}', "classes"),
]  # fmt: skip


def test_mistakes_in_a_request_get_one_line(flow):
    runs = list_runs(flow)
    for body, named in MISTAKES:
        with pytest.raises(UserError) as error:
            draw(read_request(body.encode(), runs), lambda **event: None, torch.device("cpu"), torch.float32)
        line = str(error.value)
        assert named in line and "\n" not in line and len(line) < 300, body


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")  # it is imported here, and run as a script
def test_what_cannot_be_served_is_told_at_the_start(flow, run_script):
    for name, message in (("no", "known tags: flow"), (flow / "config.json", "is a file")):
        with pytest.raises(UserError, match=message):
            run_script("sample_web", f"--run={name}")
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(UserError, match="port.*0 for any"):
        run_script("sample_web", "--device_type=cpu", f"--port={taken.getsockname()[1]}")


# ---------------------------------------------------------------------------------------------------------------------
# The server as a user would start it


class Server:
    """The script in a process of its own."""

    def __init__(self, *args):
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        args = [sys.executable, "-m", "scripts.sample_web", "--port=0", *TIMELESS, *args]
        self.process = subprocess.Popen(args, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
        self.url = re.search(r"http://127\.0\.0\.1:\d+/", self.line("open"))[0]

    def line(self, containing):
        """The next line that it prints with this in it."""
        lines = []
        for line in self.process.stdout:
            lines.append(line)
            if containing in line:
                return line
        raise AssertionError("".join(lines))

    def ask(self, **settings):
        """The answer to a request for images, of which nothing has been read yet."""
        client = http.client.HTTPConnection(self.url.split("/")[2], timeout=30)
        client.request("POST", "/api/sample", json.dumps(settings), {"Content-Type": "application/json"})
        return client.getresponse()

    def draw(self, **settings):
        """(status, events or what else is answered) of a request."""
        with self.ask(**settings) as answer:
            parts = answer.read().decode().strip().split("\n\n")
        return answer.status, [json.loads(part.removeprefix("data: ")) for part in parts]


@pytest.fixture
def server(flow):
    server = Server("--run=flow", "--max_queue=2")
    yield server
    server.process.kill()
    server.process.wait()
    server.process.stdout.close()


def test_a_server_and_its_clients(flow, server):
    url = server.url
    with urllib.request.urlopen(url) as answer:
        page, policy = answer.read().decode(), answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and policy.count("sha256-") == 2 and "unsafe" not in policy
    foreign = r"""(src|href)\s*=\s*["'](?!data:,"|#)|@import|url\(|//(?! )\S+\.\w"""
    assert not re.search(foreign, page)
    with urllib.request.urlopen(url + "api/runs") as answer:
        told = answer.read().decode()
    assert json.loads(told)["runs"].keys() == {"flow", "sr"} and str(flow.parent) not in told

    status, events = server.draw(num_images=2, steps=2)
    assert status == 200 and len(events[-1]["images"]) == 2
    assert server.draw(num_images=0)[0] == 400
    forge = flow / "checkpoints" / "step_000000" / "model.pt"
    forge.write_bytes(forge.read_bytes()[:-1])
    status, events = server.draw(num_images=1, steps=1, checkpoint_step=0)
    assert status == 200 and "corrupt" in events[-1]["error"]

    # a closed tab: others need not wait for what nobody will see
    with contextlib.ExitStack() as clients:
        for waits_for in ("Loading", '"ahead": 1', '"ahead": 2'):
            answer = clients.enter_context(server.ask(num_images=64, steps=1000))
            while waits_for not in answer.readline().decode():
                pass
        assert server.draw(num_images=1, steps=1)[0] == 503
    server.line("a client left")
    while (answer := server.draw(num_images=1, steps=1))[0] == 503:
        time.sleep(0.1)  # until it is seen that those two have left as well
    assert answer[0] == 200

    server.process.send_signal(signal.SIGINT)
    server.line("stopped")
    assert server.process.wait(30) == 0


@pytest.mark.slow
@pytest.mark.skipif(not CHROMEDRIVER, reason="chromedriver is not installed (Debian: chromium-driver)")
def test_the_page_in_a_browser(flow, server, tmp_path):
    with contextlib.closing(Browser(tmp_path / "profile", size=(360, 700), dark=True)) as browser:
        browser.open(server.url)
        assert browser.wait("document.querySelectorAll('.chip').length") == 8
        assert browser.run("return document.documentElement.scrollWidth") == 360  # nothing sticks out of a phone
        # by keyboard alone: the classes triangle and circle, six images, 40 steps
        browser.run("document.querySelectorAll('.chip input')[3].focus()")
        browser.press(" ")
        browser.run("document.querySelector('.chip input').focus()")
        browser.press(" ")
        browser.run("field.num_images.value = 6; field.steps.value = 40; field.steps.focus()")
        browser.press("\ue007")  # Enter
        browser.wait("result")
        frames = browser.run("return tiles.map(tile => tile.frames.length)")
        assert frames == [FRAMES] * 6
        assert browser.run("return result.classes") == ["triangle", "circle"] * 3
        images = browser.run("return tiles.map(tile => tile.frames.at(-1).src)")
        shown = "tiles.map(tile => tile.picture.src)"
        browser.run("$('frame').focus()")
        browser.press("\ue011")  # Home: back to the first guess
        assert browser.run(f"return {shown}") == browser.run("return tiles.map(tile => tile.frames[0].src)") != images
        browser.press("\ue010")  # End
        assert browser.run(f"return {shown}") == images

        browser.run("tiles[4].button.focus()")
        browser.press("\ue007", "\ue014")  # Enter opens it, the right arrow goes to the next
        assert browser.run("return [$('dialog').open, $('title').textContent]") == [True, "circle, image 5"]
        assert browser.run("return [$('download').href, $('large').src]") == [images[5]] * 2
        assert "--classes=3,0 --cfg_scale=2.0 --sampler=heun --steps=40" in browser.run("return $('command').innerText")
        link = browser.run("return location.href")
        browser.press("\ue00c")  # Escape
        assert not browser.run("return $('dialog').open")

        # two settings side by side; the back button returns to the first, without drawing
        browser.click("#compare")
        browser.run("field.steps.value = 10; draw()")
        browser.wait("result && result.settings.steps == 10")
        assert "40 steps" in browser.run("return $('kept').textContent")
        assert "10 steps" in browser.run("return $('what').textContent")
        clicked = "const click = HTMLAnchorElement.prototype.click; window.files = [];"
        clicked += "HTMLAnchorElement.prototype.click = function() { files.push([this.download, this.href]); };"
        browser.run(clicked + "downloadAll();")
        files = browser.wait("files.length == 6 && files")
        assert [href for _, href in files] == browser.run(f"return {shown}") != images
        assert [name for name, _ in files] == [f"flow_1_seed0_{i}.png" for i in range(6)]
        browser.call("POST", "/back", {})
        browser.wait("result.settings.steps == 40")
        assert browser.run(f"return {shown}") == images
        assert browser.run("return [drawing, field.steps.value]") == [None, "40"]
        browser.call("POST", "/refresh", {})  # fills in the form, and draws nothing unasked
        browser.wait("info && field.steps.value == 40")
        assert browser.run("return [drawing, result]") == [None, None]

        browser.open(link)  # draws again, and shows the image
        browser.wait("result && $('dialog').open")
        assert browser.run("return tiles.map(tile => tile.frames.at(-1).src)") == images
        assert browser.run("return shown") == 5

        browser.open(link.replace("classes=3%2C0", "classes=99"))
        assert "8 classes" in browser.wait("$('error').textContent")
        browser.run("field.num_images.value = 64; field.steps.value = 1000; chooseClasses([])")
        browser.run("document.activeElement.blur(); draw()")
        browser.wait("$('steps').textContent.match(/step \\d+ of 1000, \\d+ s left/)")
        browser.press("\ue00c")
        assert browser.wait("!drawing && $('status').textContent") == "Stopped"
        server.line("a client left")
        server.process.send_signal(signal.SIGINT)
        server.process.wait(30)
        browser.run("draw()")
        assert "server" in browser.wait("!drawing && $('error').textContent")
        blocked = [line for line in browser.logs() if "/api/sample" not in line]
        assert blocked == []  # no error of the script's, nothing that the policy forbids
