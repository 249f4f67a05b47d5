"""The page draws what scripts/sample.py and the run's own grids show, step by step, and says no in one line."""

import base64
import contextlib
import io
import json
import math
import shutil

import numpy as np
import pytest
import torch
from numpy.testing import assert_array_equal
from PIL import Image
from test_server import ask, served
from tiny_runs import RUNS, TINY, decode_png, make_autoencoder, make_data, make_run
from webdriver import CHROMEDRIVER, Browser

from nanodiff.common import UserError
from nanodiff.data.dataset import open_dataset
from nanodiff.data.shapes import CLASS_NAMES
from nanodiff.formats import load
from nanodiff.formats.load import find_run, load_run
from nanodiff.png import encode_png, make_grid
from nanodiff.safetensors import load_safetensors
from nanodiff.sampling.loaded import settings_for
from nanodiff.training.checkpoint import load_meta, save_checkpoint
from scripts.sample_web import MOST_FRAMES, Handler, describe_run, draw, list_runs, read_request


def request(run_dir, **changes):
    """What the page asks for when nothing but `changes` was changed."""
    offered = describe_run(run_dir)
    step, ema = offered["weights"][0]
    asked = {
        "cfg_scale": offered["cfg_scale"],
        "cfg_interval": offered["cfg_interval"],
        "sampler": offered["sampler"],
        "steps": offered["steps"],
        "run": run_dir.name,
        "checkpoint_step": step,
        "ema": ema,
        "classes": [],
        "num_images": 16,
        "seed": 0,
        "from_image": "",
        "strength": 0.6,
    }
    return asked | changes


def drawn(run_dir, **changes):
    events = []
    send = lambda **event: events.append(json.loads(json.dumps(event)))
    asked = read_request(json.dumps(request(run_dir, **changes)).encode())
    draw(asked, list_runs(run_dir), send, torch.device("cpu"), torch.float32)
    return events


def picture(event):
    return decode_png(base64.b64decode(event["picture"]))


@pytest.mark.parametrize(
    "tag, settings",
    [
        ("flow", dict(num_images=6, sampler="sde", classes=[3, 0], cfg_scale=4, cfg_interval="0.2,0.7", ema="raw")),
        ("flow", dict(num_images=2, sampler="euler", checkpoint_step=0, seed=2**40)),
        ("sr", dict(num_images=3)),
    ],
)
def test_the_page_draws_what_the_script_draws(run_dir, draw, tag, settings):
    settings = {"cfg_scale": 1.5} | settings
    *_, last = drawn(find_run(tag), steps=3, **settings)
    classes = ",".join(map(str, settings.pop("classes", [])))
    args = [f"--{name}={value}" for name, value in settings.items()]
    images, labels, _ = draw(*args, f"--model={tag}", f"--classes={classes}")
    grid = make_grid(images.transpose(0, 3, 1, 2), 8)
    assert_array_equal(picture(last), grid)
    assert last["classes"] == [CLASS_NAMES[label] for label in labels]  # fewer images than columns: one row
    told = base64.b64decode(last["picture"])
    assert json.dumps(last["settings"]).encode() in told
    assert last["settings"]["seed"] == settings.get("seed", 0)


def test_the_page_starts_from_the_settings_of_the_runs_grids(base, run_script):
    """Nothing changed but the classes, which a grid shows by row: the run's grid, but for the batch's rounding."""
    make_data()
    args = ["--cfg_scale=30", "--cfg_interval=0.2,0.9", "--sampler=euler", "--sample_steps=3", "--lr=0.01"]
    args += ["--num_iterations=4", "--sample_every=4", "--ema_rates=0.5", "--model_tag=guided"]
    run_dir = run_script("base_train", *TINY, *args)["run_dir"]
    grid = decode_png((run_dir / "samples" / "step_000004.png").read_bytes()).astype(int)
    by_row = [i // 8 for i in range(64)]
    *_, last = drawn(run_dir, classes=by_row, num_images=64)
    assert np.abs(picture(last) - grid).max() <= 1
    own = settings_for(load_run(str(run_dir), "cpu")).named  # in Python, sample and base_eval
    assert own == {"sampler": "euler", "steps": 3, "cfg_scale": 30, "cfg_interval": "0.2,0.9"}
    for name, value in (
        ("cfg_scale", 1),
        ("cfg_interval", "0,1"),
        ("steps", 4),
        ("seed", 1),
        ("sampler", "heun"),
    ):
        *_, other = drawn(run_dir, classes=by_row, num_images=64, **{name: value})
        assert np.abs(picture(other) - grid).max() > 2, name


@pytest.mark.parametrize("steps", [1, 7, 3 * MOST_FRAMES])
def test_the_guess_at_each_step_arrives(run_dir, steps):
    events = drawn(run_dir, steps=steps, num_images=2, sampler="euler")
    frames = [event for event in events if "step" in event and "picture" in event]
    if steps <= 7:
        assert [event["step"] for event in frames] == [*range(1, steps)]
    assert len(frames) <= MOST_FRAMES
    end = picture(events[-1]).astype(int)
    apart = [np.abs(picture(event) - end).mean() for event in frames]
    assert apart[-1:] <= apart[:1]  # the guess comes nearer to what it becomes


def test_latents_are_watched_as_they_are_and_decoded_at_the_end(base, run_script, tmp_path):
    make_data()
    encoder = make_autoencoder(tmp_path / "vae")
    run_dir = make_run(run_script, "latent", f"--autoencoder={encoder}", "--patch_size=1")
    frame, last = (event for event in drawn(run_dir, steps=2, num_images=1) if "picture" in event)
    assert picture(frame).shape == (4 * 12 + 4, 4 * 12 + 4, 3)  # 4 latents a side, made 48 pixels wide
    assert picture(last).shape == (16 * 3 + 4, 16 * 3 + 4, 3)
    assert not last["warning"]


def test_shipped_weights_are_offered_too_and_draw_what_their_run_draws(run_dir, run_script, tmp_path, monkeypatch):
    run_script("export", "--model=flow", f"--out={tmp_path}/ours.safetensors")
    monkeypatch.setattr(load, "WEIGHTS", tmp_path)
    assert [*list_runs(run_dir)] == [*reversed(RUNS), "ours"]  # newest first
    *_, last = drawn(run_dir, steps=3, num_images=2)
    expected = picture(last)
    shutil.rmtree(run_dir.parent)
    ours = find_run("")
    assert ours == tmp_path / "ours.safetensors"
    assert find_run("ours") == ours
    assert [*list_runs(ours)] == ["ours"]
    assert describe_run(ours)["weights"] == [(1, "0.999")]
    *_, last = drawn(ours, steps=3, num_images=2, run="ours")
    assert (picture(last) == expected).all()


def test_runs_are_offered_as_they_can_be_drawn_from(run_dir, server):
    offered = describe_run(run_dir)
    assert offered["weights"] == [(1, "0.999"), (1, "raw"), (0, "0.999"), (0, "raw")]
    assert offered["samplers"] == ["euler", "heun", "ralston", "sde"]
    assert offered["is_guided"]
    assert offered["classes"] == list(CLASS_NAMES)
    plain = describe_run(run_dir.with_name("plain"))
    eps = describe_run(run_dir.with_name("eps"))
    assert {"classes": [], "is_guided": False, "cfg_scale": 1}.items() <= plain.items()
    assert eps["samplers"] == ["ddpm", "ddim", "dpm++"]
    for name, meta in (
        ("broken", "{"),
        ("odd", '{"config": {}, "data": {}, "step": 1}'),
    ):
        checkpoint = run_dir.parent / name / "checkpoints" / "step_000001"
        checkpoint.mkdir(parents=True)
        (checkpoint / "meta.json").write_text(meta)
    (run_dir.parent / "not a run").mkdir()
    runs = list_runs(find_run("plain"))
    assert next(iter(runs)) == "plain"
    assert "not a run" not in runs
    _, answer = ask(server, path="/runs")
    assert json.loads(answer.read()).keys() - load.shipped().keys() == RUNS.keys()
    *_, last = drawn(find_run("plain"), steps=2, num_images=2, cfg_scale=4)
    assert last["settings"]["cfg_scale"] == 1


def test_a_new_run_of_the_same_name_is_loaded_anew(run_dir):
    *_, first = drawn(run_dir, steps=1)
    checkpoint = run_dir / "checkpoints" / "step_000001"
    tensors = {p.stem: load_safetensors(p)[0] for p in checkpoint.glob("*.safetensors")}
    tensors["ema_0.999"] = {name: 2 * x for name, x in tensors["ema_0.999"].items()}
    save_checkpoint(run_dir, 1, tensors, load_meta(checkpoint))
    *_, second = drawn(run_dir, steps=1)
    assert (picture(first) != picture(second)).any()


def test_mistakes_get_one_line(run_dir):
    for name, value, told in (
        ("num_images", 65, r"num_images=65 .*an integer, \[1, 64\]"),
        ("steps", None, "steps=None"),
        ("seed", 2**53, "seed"),
        ("cfg_scale", math.nan, "cfg_scale=nan"),
        ("classes", "9" * 5000, "is unknown"),
        ("classes", ["hexagon"], "'hexagon' is unknown"),
        ("run", "gone", "'gone' is gone"),
        ("from_image", "no base64!", "base64"),
        ("sampler", "ddim", "euler"),
        ("checkpoint_step", 7, "step 7"),
        ("ema", "0.9", "0.999"),
        ("cfg_interval", "0.9,0.1", "0.3,0.8"),
    ):
        with pytest.raises((UserError, ValueError), match=told):
            drawn(run_dir, **{name: value})


@pytest.fixture
def server(run_dir):
    with served(Handler) as server:
        server.first_run = run_dir
        server.device = torch.device("cpu")
        server.compute_dtype = torch.float32
        yield server


def post(server, content, **headers):
    return ask(server, "POST", "/sample", content, **headers)[1]


def test_malformed_requests_get_one_line(run_dir, server, capsys):
    for size in ("10000000", "-1", "two"):
        assert post(server, b"{}", **{"Content-Length": size}).status == 413
    unknown = json.dumps(request(run_dir, from_image="no base64!")).encode()
    unasked = json.dumps(request(run_dir) | {"mask": 1}).encode()
    for content in (b"", b"{", b"{}", b"7", b"null", b"[]", b"\xff", b"[" * 99_999, unknown, unasked):
        answer = post(server, content)
        assert answer.status == 400
        assert json.loads(answer.read())["error"].startswith("request refused: ")
    assert capsys.readouterr().err == ""


def test_samples_start_from_a_picture(run_dir, server):
    """At strength 0 they are the picture; other strengths: tests/test_given.py."""
    image = open_dataset("tiny", "val").images([0])[0]  # (3, 16, 16)

    def last(**changes):
        asked = request(run_dir, steps=3, num_images=2, **changes)
        *_, event = post(server, json.dumps(asked).encode()).read().splitlines()
        return json.loads(event)

    png = encode_png(image.transpose(1, 2, 0))
    unchanged = last(from_image=base64.b64encode(png).decode(), strength=0)
    assert_array_equal(picture(unchanged), make_grid([image, image], 8))
    settings = unchanged["settings"]
    assert "SHA-256" in settings["from_image"]
    assert settings["strength"] == 0
    assert unchanged["warning"] == ""
    clear = io.BytesIO()
    Image.new("RGBA", (16, 16)).save(clear, "PNG")
    assert last(from_image=base64.b64encode(clear.getvalue()).decode())["warning"] == "transparency became white"
    for content, told in (
        (b"no image", "no image"),
        (b"P5 13300 13300 255\n", "67,108,864"),  # a header, no pixels
    ):
        error = last(from_image=base64.b64encode(content).decode(), strength=1)["error"]
        assert told in error
        assert "\n" not in error
        assert "/tmp" not in error


@pytest.mark.skipif(not CHROMEDRIVER, reason="chromedriver is not installed (Debian: chromium-driver)")
def test_the_page_in_a_browser(run_dir, server, tmp_path):
    with contextlib.closing(Browser(tmp_path / "profile", size=(360, 700))) as browser:
        browser.open(f"http://127.0.0.1:{server.server_port}/")
        browser.wait("document.querySelectorAll('.chip').length == 8")
        assert browser.run("return document.documentElement.scrollWidth") == 360  # nothing sticks out of a phone
        assert browser.run("return field.cfg_scale.value + field.sampler.value") == "2.5ralston"
        bounds = {name: browser.run(f"return [field.{name}.min, field.{name}.max]") for name in ("seed", "strength")}
        assert bounds == {"seed": ["0", "9007199254740991"], "strength": ["0", "1"]}  # form.py's
        assert browser.run("return field.num_images.value + ' ' + field.strength.value") == "16 0.6"
        browser.wait("frames.at(-1)?.place == 'at the end'")  # it opens with sixteen images
        # by keyboard: circle and triangle, six images in five steps
        for number in (0, 3):
            browser.run(f"document.querySelectorAll('.chip input')[{number}].focus()")
            browser.press(" ")
        browser.run("field.num_images.value = 6; field.steps.value = 5; field.steps.focus()")
        browser.press("\ue007")  # Enter
        browser.wait("!$('download').hidden")
        places = [*(f"at step {i} of 5" for i in range(1, 5)), "at the end"]
        assert browser.run("return frames.map(frame => frame.place)") == places
        assert browser.run("return $('names').textContent") == "circletriangle" * 3
        *_, last = drawn(run_dir, classes=[0, 3], num_images=6, steps=5)
        data = browser.run("return $('download').href").removeprefix("data:image/png;base64,")
        assert (decode_png(base64.b64decode(data)) == picture(last)).all()
        browser.run("$('frame').focus()")
        browser.press("\ue012")  # left
        assert browser.run("return $('picture').src == frames.at(-2).src")
        # a second request while the first draws, then Stop
        browser.run("field.num_images.value = 64; field.steps.value = 1000; form.requestSubmit()")
        browser.wait("frames.length")
        with contextlib.closing(Browser(tmp_path / "other")) as other:
            other.open(f"http://127.0.0.1:{server.server_port}/")
            other.wait("$('error').textContent.startsWith('busy')")
        browser.run("form.requestSubmit()")
        browser.wait("$('status').textContent == 'Stopped'")
        # what the server refuses
        browser.run("field.num_images.value = 6; field.cfg_interval.value = '0.9,0.1'; form.requestSubmit()")
        browser.wait("$('error').textContent.includes('0.3,0.8')")
        # a dropped file that is no image, one that is too large, and back to plain samples
        browser.run("field.cfg_interval.value = '0.3,0.7'; field.steps.value = 5")
        for size, told in (
            (9, "start from"),
            (7e6, "7.0 MB"),
        ):
            browser.run(
                f"const files = new DataTransfer(); files.items.add(new File(['x'.repeat({size})], '<b>.png'));"
                "document.dispatchEvent(new DragEvent('drop', {dataTransfer: files})); form.requestSubmit()"
            )
            browser.wait(f"!drawing && $('error').textContent.includes('{told}')")
        assert browser.run("return !$('thumbnail').hidden && field.run.selectedOptions[0].text").startswith("flow, ")
        browser.run("$('remove').click(); form.requestSubmit()")
        browser.wait("!$('download').hidden")
        assert browser.run("return $('remove').hidden && frames.at(-1).src").endswith(data)
        for line in browser.logs():  # that it was busy; no error of the script's
            assert "/sample" in line
