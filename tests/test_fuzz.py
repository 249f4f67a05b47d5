"""Corrupt and hostile input: one line that says what is wrong, or the truth; in bounded memory and time.

Each case is a valid input with a few changes: bits flipped, parts cut or moved, numbers made extreme, types exchanged.
Checksums are made right again, so that the changes get through. Almost 6,000 cases, the same in every run.
"""

import copy
import gzip
import io
import json
import os
import random
import resource
import shutil
import signal
import warnings
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from image_helpers import archive, idx, make_folder, noise, prepare
from test_load import CLASSIC, DIT, LATENTS, STATES, UNET, describe
from test_mistakes import forge

import configurator
from nanodiff.common import UserError
from nanodiff.data.codec import load_codec
from nanodiff.data.dataset import open_dataset, verify
from nanodiff.data.decode import decode_chunk
from nanodiff.formats.adapters import identity, save_adapters
from nanodiff.formats.load import build, load_run
from nanodiff.formats.published import to_improved_diffusion, to_meta
from nanodiff.models.lora import add_lora
from nanodiff.safetensors import load_safetensors, save_safetensors
from nanodiff.training.checkpoint import save_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")]
MAX_BYTES = 2**29  # of memory, beyond what the process has at the start
MAX_SECONDS = 10  # of CPU for one case


class TooLong(BaseException):
    """Not an Exception, which a reader might take for a fault of the file."""


@pytest.fixture(scope="module", autouse=True)
def bounds():
    """Bound the address space: memory asked for is refused even if it is never touched."""

    def stop(number, frame):
        raise TooLong(f"more than {MAX_SECONDS} s of CPU")

    old = signal.signal(signal.SIGPROF, stop)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MAX_BYTES, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    signal.signal(signal.SIGPROF, old)


@pytest.fixture(autouse=True)
def folder(tmp_path_factory, monkeypatch):
    """A folder for the cases of one test, also its base folder; nothing waits for the disk."""
    path = tmp_path_factory.mktemp("fuzz")
    monkeypatch.setenv("NANODIFF_BASE_DIR", str(path / "base"))
    monkeypatch.chdir(path)
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    return path


def cases(count, **strategies):
    """@given for `count` cases."""
    limits = settings(max_examples=count, derandomize=True, deadline=None, database=None,
                      suppress_health_check=list(HealthCheck))  # fmt: skip
    return lambda test: limits(given(**strategies)(test))


@contextmanager
def one_line_or_the_truth():
    """The body may raise UserError, with one printable line, and nothing else."""
    signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except UserError as error:
        assert str(error) and str(error).isprintable(), repr(str(error))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


# ---------------------------------------------------------------------------------------------------------------------
# Changes; each is a function of one integer, because drawing integers is fast

NASTY_BYTES = (b"\0", b"\xff" * 4, b"\x7f\xff\xff\xff", b"\0\0\0\x80", b"\0" * 8, b"9" * 12, b"-1", b"[", b"{",
               b'"', b"\n", b"../", b"\xc3\x28", b"(" * 300)  # fmt: skip
NASTY_VALUES = (0, -1, 3, 16, 10**5, 10**9, 2**63, 10**400, 0.5, 1e308, float("nan"), float("inf"), True, None, "", "x",
                "4", "../x", "/etc/passwd", "a" * 5000, "a\nb", "\x1b[2J", "\ud800", "\0", [], {}, [[]], [-1, 2], ["x"],
                {"x": 1}, [10**400], [None] * 300)  # fmt: skip
changes = st.lists(st.integers(0, 2**40), max_size=4)


def change_bytes(data: bytes, changes) -> bytes:
    data = bytearray(data)
    for number in changes:
        draw = random.Random(number)
        at, other, size = draw.randint(0, len(data)), draw.randint(0, len(data)), draw.randint(0, 64)
        kind = draw.choice(("flip", "cut", "drop", "put", "put", "insert", "move"))
        nasty = draw.choice(NASTY_BYTES)
        if kind == "flip" and at < len(data):
            data[at] ^= 1 << draw.randint(0, 7)
        elif kind == "cut":
            del data[at:]
        elif kind == "drop":
            del data[at : at + size]
        elif kind == "put":
            data[at : at + len(nasty)] = nasty
        elif kind == "insert":
            data[at:at] = nasty
        else:
            data[at:at] = data[other : other + size]
    return bytes(data)


def places(tree) -> list:
    """(container, key) of everything inside a JSON value."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [place for key, value in items for place in ((tree, key), *places(value))]


def change_json(tree, changes):
    """The same tree with a few values replaced, deleted, added or copied from elsewhere."""
    tree = copy.deepcopy(tree)
    for number in changes:
        draw = random.Random(number)
        found = places(tree)
        if not found:
            break
        container, key = draw.choice(found)
        other, name = draw.choice(found)
        kind = draw.choice(("set", "set", "set", "delete", "add", "copy"))
        nasty = copy.deepcopy(draw.choice(NASTY_VALUES))
        if kind == "delete":
            del container[key]
        elif kind == "add" and isinstance(container, dict):
            container[str(nasty)[:10]] = nasty
        elif kind == "copy":
            container[key] = copy.deepcopy(other[name])
        else:
            container[key] = nasty
    return tree


# ---------------------------------------------------------------------------------------------------------------------
# Settings

SCRIPT = """
depth = 12  # >= 1: layers
lr = 0.1  # (0, 10]: rate
dtype = "auto"  # auto|bfloat16
compile = True
tag = "x"  # any text
limit: int | None = None  # > 0: at most
config = configure(globals())
"""
DEFAULTS = dict(depth=12, lr=0.1, dtype="auto", compile=True, tag="x", limit=None)
RUNS = "open('executed', 'w')"
EXPRESSIONS = ("1", "-1", "0.5", "1e999", "nan", "'a'", "None", "True", "...", "1j", "(0.9, 0.99)", "{1: 2}",
               "10**10**10", "'a'*10**12", "1" * 6000, RUNS, f"[{RUNS} for _ in 'a']", f"f'{{{RUNS}}}'",
               f"(lambda: {RUNS})()", "'\\ud800'", "'a\\nb'", "[" * 150 + "1" + "]" * 150, "(" * 300, "-" * 5000 + "1",
               "a" + ".a" * 5000, "0777", "*a")  # fmt: skip
STATEMENTS = ("{n} = {e}", "{n} = {e}", "{n}: {e} = 1", "{n} += {e}", "{n}, lr = {e}", "{e}", "import os",
              "def f(x={e}): pass", "\t{n} = {e}", "\0", "# coding: utf-16", "{n} = ({e}", "\\")  # fmt: skip
TEXTS = ("", "1", "0", "-1", "1.5", "1e3", "nan", "1e999", "auto", "None", "True", "x.py", "\ud800", "a\nb",
         "9" * 5000, "0x10", "１", "1_0", "(1,)", f"{RUNS}", "\x1b[2J", "../../x", "--", "²")  # fmt: skip
names = st.sampled_from([*DEFAULTS, "dept", "__class__", "configure", "é", ""])
lines = st.builds(lambda form, n, e: form.format(n=n, e=e), st.sampled_from(STATEMENTS), names,
                  st.sampled_from(EXPRESSIONS))  # fmt: skip
arguments = st.builds("{}{}{}{}".format, st.sampled_from(["--", "--", "-", ""]), names, st.sampled_from(["=", ""]),
                      st.sampled_from(TEXTS) | st.text(max_size=6))  # fmt: skip


def configured(folder, argv):
    """configure refuses with one line and exit code 2, or gives values that every rule accepts; nothing is executed."""
    (folder / "program.py").write_text(SCRIPT)
    globals_ = dict(DEFAULTS, __file__=str(folder / "program.py"), __name__="program")
    with one_line_or_the_truth(), redirect_stderr(io.StringIO()) as err, redirect_stdout(io.StringIO()):
        try:
            config = configurator.configure(globals_, argv)
        except SystemExit as stop:
            line = err.getvalue()
            assert stop.code == 2 and line.startswith("error: ") and line[:-1].isprintable(), line
            assert {key: globals_[key] for key in DEFAULTS} == DEFAULTS
        else:
            assert config["depth"] >= 1 and 0 < config["lr"] <= 10 and config["dtype"] in ("auto", "bfloat16")
            assert type(config["tag"]) is str and (config["limit"] is None or config["limit"] > 0)
    assert not Path("executed").exists()


@cases(500, argv=st.lists(arguments, max_size=2), lines=st.lists(lines, max_size=3), changes=st.just([]) | changes)
def test_settings(folder, argv, lines, changes):
    text = "\n".join(lines).encode(errors="surrogatepass")
    (folder / "preset.py").write_bytes(change_bytes(text, changes))
    configured(folder, [str(folder / "preset.py"), *argv])


@cases(1000, changes=changes, in_header=st.booleans())
def test_safetensors(folder, changes, in_header):
    valid, path = folder / "valid.safetensors", folder / "x.safetensors"
    if not valid.exists():
        save_safetensors({"a": torch.ones(2, 3), "é": torch.ones(3), "0": torch.empty(0, 4)}, valid, {"k": "v"})
    data = valid.read_bytes()
    if in_header:
        end = 8 + int.from_bytes(data[:8], "little")
        header = json.dumps(change_json(json.loads(data[8:end]), changes)).encode()
        data = len(header).to_bytes(8, "little") + header + data[end:]
    else:
        data = change_bytes(data, changes)
    path.write_bytes(data)
    with one_line_or_the_truth():
        tensors, metadata = load_safetensors(path)
        length = int.from_bytes(data[:8], "little")
        assert sum(t.clone().numel() * t.itemsize for t in tensors.values()) == len(data) - 8 - length
        assert all(isinstance(value, str) for value in metadata.values())


# ---------------------------------------------------------------------------------------------------------------------
# Archives and images


def write_archive(path, source):
    if source == "npz":
        np.savez(path, arr_0=np.zeros((6, 4, 4, 3), np.uint8), labels=np.arange(6) % 3)
    elif source == "idx":
        path.write_bytes(idx(np.zeros((6, 4, 4), np.uint8)))
    else:
        make_folder(path.with_name("images"))
        archive(path.with_name("images"), source, path)


def mend_tar(data: bytes) -> bytes:
    """The same with right checksums in its headers."""
    data = bytearray(data)
    for at in range(0, len(data) - 511, 512):
        if data[at + 257 : at + 262] == b"ustar":
            data[at + 148 : at + 156] = b" " * 8
            data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + 512])
    return bytes(data)


@pytest.mark.parametrize("source, suffix", [("npz", ".npz"), ("zip", ".zip"), ("tar", ".tar"), ("tar", ".tar.gz"),
                                            ("idx", "-idx3-ubyte.gz")])  # fmt: skip
@cases(500, changes=changes)
def test_archives(folder, source, suffix, changes):
    """scripts.prepare_data makes a whole set that verifies, or nothing at all."""
    valid, path = folder / f"valid.{source}", folder / f"train-images{suffix}"
    if not valid.exists():
        write_archive(valid, source)
    data = change_bytes(valid.read_bytes(), changes)
    data = mend_tar(data) if source == "tar" else data
    path.write_bytes(gzip.compress(data, 1) if suffix.endswith("gz") else data)
    with one_line_or_the_truth():
        prepare(path, source=source, val_fraction=0.3)
    sets = folder / "base" / "data"
    if (sets / "toy").exists():
        verify(open_dataset("toy"))
    assert not sets.exists() or {p.name for p in sets.iterdir()} <= {".toy.lock", "toy"}


@cases(750, kind=st.sampled_from(["PNG", "JPEG", "GIF", "TIFF", "BMP", "WEBP"]), changes=changes)
def test_images(kind, changes):
    Image = pytest.importorskip("PIL.Image", reason="Pillow reads image files")
    Image.fromarray(noise(9, 8)).save(file := io.BytesIO(), kind)
    with one_line_or_the_truth():
        [(_, image, _)] = decode_chunk((4, [("a.png", change_bytes(file.getvalue(), changes))]), 4)
        assert isinstance(image, str) or image.shape == (3, 4, 4)


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints


def use(loaded):
    """One prediction, as a script would make it."""
    model, process = loaded.model, loaded.process
    codec = load_codec(loaded.data, torch.device("cpu"))
    x = torch.zeros(1, *codec.shape)
    y = torch.zeros(1, dtype=torch.int64) if model.config.num_classes else None
    with torch.no_grad():
        out = model(x, torch.zeros(1), y, x if model.config.low_res else None)
    assert out.shape == (1, process.out_channels(x.shape[1]), *x.shape[2:])
    assert codec.to_pixels(x).dtype == torch.uint8


def change_meta(meta, changes):
    """Most changes are to the model's config, whose numbers are sizes."""
    part = ("model_config", "model_config", "config", "data", None)[sum(changes) % 5]
    return meta | {part: change_json(meta[part], changes)} if part else change_json(meta, changes)


@cases(500, model_config=st.sampled_from([DIT, DIT, UNET]), changes=changes, latent=st.booleans())
def test_descriptions(model_config, changes, latent):
    """What a checkpoint or an export says of its weights."""
    facts = {"data.kind": "latents", "data.latents": LATENTS} if latent else {}
    with one_line_or_the_truth():
        meta = change_meta(describe(model_config, **facts), changes)
        use(build(meta, dict(STATES[model_config]), "cpu", "x", "raw", Path("x")))


def write_runs():
    """Run "a", and "l" with adapters for it."""
    runs = Path(os.environ["NANODIFF_BASE_DIR"]) / "runs"
    save_checkpoint(runs / "a", 1, {"model": STATES[DIT]}, describe(DIT, ema_rates=[]))
    loaded = load_run("a", "cpu")
    origin = identity(loaded)
    add_lora(loaded.model, 1, 1.0, "qkv")
    save_adapters(runs / "l" / "adapters" / "step_000001.safetensors", loaded.model, 1, 1.0, "qkv", [], origin)
    save_checkpoint(runs / "l", 1, {"model": {}}, describe(DIT, ema_rates=[], lora=origin, arch="lora"))
    for tag in "al":
        shutil.copy(runs / tag / "checkpoints" / "step_000001" / "meta.json", runs / f"{tag}.json")
    return runs


@cases(400, tag=st.sampled_from("al"), changes=changes, right_hash=st.booleans())
def test_checkpoints(folder, tag, changes, right_hash):
    """meta.json of a run, or of a fine-tune, changed; with its hash in the manifest made right, or not."""
    runs = folder / "base" / "runs"
    runs = runs if runs.exists() else write_runs()
    text = json.dumps(change_json(json.loads((runs / f"{tag}.json").read_text()), changes)).encode()
    forge(runs / tag, "meta.json", text)
    if not right_hash:
        (runs / tag / "checkpoints" / "step_000001" / "meta.json").write_bytes(text + b" ")
    with one_line_or_the_truth(), redirect_stdout(io.StringIO()):
        use(load_run(tag, "cpu"))


@cases(250, unet=st.booleans(), changes=changes)
def test_published_weights(folder, unet, changes):
    """Weights alone, whose names and shapes tell the model: renamed, left out, reshaped, expanded, of other types."""
    valid = to_improved_diffusion(STATES[UNET], UNET) if unet else to_meta(STATES[CLASSIC], CLASSIC)
    weights = dict(valid)
    for number in changes:
        draw = random.Random(number)
        name = draw.choice([*valid])
        other = draw.choice(["blocks.99999999999.x", "blocks.x.y", "input_blocks.99999999999.0.x", "", "ema", *valid])
        x = valid[name]
        endless = x.flatten()[:1].expand(10**4, 10**4)
        changed = (endless, x[None], x[:1], x.to(torch.int64), x.to(torch.float16), x.to("meta"), [x], "x", None)
        weights[draw.choice([name, name, other])] = draw.choice(changed)
        if draw.random() < 0.2:
            weights.pop(draw.choice([*valid]), None)
    torch.save(weights, folder / "x.pt")
    with one_line_or_the_truth():
        use(load_run(str(folder / "x.pt"), "cpu"))
