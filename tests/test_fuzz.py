"""Broken and hostile input by the thousand: what is documented is raised, quickly, in little memory; nothing is left.

Most cases are valid files with a few changes: bits flipped, parts cut, doubled or put elsewhere, numbers made extreme,
types exchanged; where a format has checksums of its own they are made right again, so that the change gets through.
The table BUDGET says how many cases each property has, 10,100 in all; they are the same in every run.
"""

import binascii
import copy
import gzip
import io
import json
import os
import random
import resource
import signal
import struct
import sys
import tarfile
import warnings
import zipfile
from collections import Counter
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from image_helpers import idx, noise, prepare, write_cifar

import configurator
from nanodiff.common import UserError
from nanodiff.data.dataset import DatasetWriter, open_dataset, verify
from nanodiff.data.decode import decode_chunk
from nanodiff.data.latents import load_codec
from nanodiff.data.sources import CIFAR10_BATCHES
from nanodiff.formats.adapters import identity, save_adapters
from nanodiff.formats.load import load_run, restore
from nanodiff.formats.published import to_improved_diffusion, to_meta
from nanodiff.models.build import build_model
from nanodiff.models.dit import DiTConfig
from nanodiff.models.lora import add_lora
from nanodiff.models.unet import UNetConfig
from nanodiff.png import encode_png
from nanodiff.safetensors import load_safetensors, save_safetensors
from nanodiff.training import checkpoint
from nanodiff.training.checkpoint import find_checkpoint, save_checkpoint, why_corrupt

Image = pytest.importorskip("PIL.Image", reason="Pillow reads image files")
pytestmark = pytest.mark.slow

BUDGET = {
    "arguments": 700, "presets": 1200, "safetensors": 900, "safetensors header": 800,
    "idx": 400, "npz header": 500, "npz": 500, "zip": 400, "dataset.json": 200, "tar": 800, "cifar": 200,
    "images": 1200, "data set": 500, "latent set": 400, "manifest": 400, "checkpoint": 200,
    "dit": 400, "unet": 200, "published": 200,
}  # fmt: skip
RAN = Counter()
MAX_BYTES = 2**29  # of memory, more than there was at the start
MAX_SECONDS = 10  # of CPU for one case


def cases(name, **strategies):
    """@given with the share of the budget of that name."""

    def decorate(test):
        limits = dict(max_examples=BUDGET[name], derandomize=True, deadline=None, database=None)
        return settings(**limits, suppress_health_check=list(HealthCheck))(given(**strategies)(test))

    return decorate


class TooLong(BaseException):
    """Not an Exception, which a reader might take for a fault of the file."""


@pytest.fixture(scope="module", autouse=True)
def bounds():
    """No more address space than MAX_BYTES above what there is: memory asked for is refused, though never touched."""

    def stop(number, frame):
        raise TooLong(f"more than {MAX_SECONDS} s of CPU")

    old = signal.signal(signal.SIGPROF, stop)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MAX_BYTES, hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    signal.signal(signal.SIGPROF, old)


@pytest.fixture(autouse=True)
def folder(tmp_path_factory):
    """A folder of the property's own, also its base folder; nothing waits for the disk."""
    path = tmp_path_factory.mktemp("fuzz")
    (path / "program.py").write_text(SCRIPT)
    described = configurator.read_settings(dict(DEFAULTS, __file__=str(path / "program.py")))
    save_safetensors(TENSORS, path / "valid.safetensors", {"step": "5"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(configurator, "read_settings", lambda globals_: described)  # the same each time
        patch.setenv("NANODIFF_BASE_DIR", str(path / "base"))
        patch.setattr(os, "fsync", lambda fd: None)
        yield path


@contextmanager
def told(name):
    """The body may raise UserError, with one line that can be shown anywhere, and nothing else; in bounded time."""
    RAN[name] += 1
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
# Changes

NASTY_BYTES = (
    b"\0", b"\xff", b"\0\0\0\0", b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\x80\0\0\0", b"\0\0\0\x80", b"\xff" * 8,
    b"\0" * 8, b"\1\0\0\0\0\0\0\0", b"9" * 12, b"-1", b"1e999", b"[", b"{", b'"', b"\n", b"../", b"\xc3\x28",
    b"(" * 300,
)  # fmt: skip
NASTY_VALUES = (
    0, -1, 1, 2, 3, 7, 10**6, 2**31, 2**53, 2**63 - 1, 2**63, 10**30, -(10**30), 10**400, 0.5, -0.0, 1e308, -1e308,
    float("nan"), float("inf"), True, False, None, "", "x", "4", "../x", "/etc/passwd", "a" * 300, "a" * 5000, "a\nb",
    "\x1b[2J", "\ud800", "\0", "é", [], {}, [[]], [1], [-1, 2], ["x"], {"x": 1}, [10**400], ["\ud800"], [None] * 300,
)  # fmt: skip
MOVES = ("flip", "cut", "drop", "put", "put", "insert", "copy", "swap")
EDITS = ("number", "number", "number", "set", "set", "delete", "rename", "add", "copy")
NUMBERS = (0, -1, 3, 16, 10**5, 10**9, 2**63, 10**400, 0.5, float("nan"), float("inf"))
numbers = st.integers(0, 2**40)  # one for all that a change is made of: drawing takes the most time here
moves = st.lists(numbers, max_size=4)
edits = st.lists(numbers, min_size=1, max_size=3)


def pick(number: int, *options):
    """One of each of several things to choose from, all as likely: hypothesis alone prefers small numbers."""
    draw = random.Random(number)
    return [draw.choice(option) for option in options]


def change_bytes(data: bytes, moves, span=2**16) -> bytes:
    """The same with a few changes, all in the first `span` bytes."""
    data = bytearray(data)
    for number in moves:
        move, at, arg = pick(number, MOVES, range(min(len(data), span) + 1), range(2**16))
        nasty, size = NASTY_BYTES[arg % len(NASTY_BYTES)], arg % 64
        other = arg % (len(data) + 1)
        if move == "flip" and at < len(data):
            data[at] ^= 1 << arg % 8
        elif move == "cut":
            del data[at:]
        elif move == "drop":
            del data[at : at + size]
        elif move == "put":
            data[at : at + len(nasty)] = nasty
        elif move == "insert":
            data[at:at] = nasty
        elif move == "copy":
            data[at:at] = data[other : other + 64]
        elif move == "swap":
            data[at : at + size], data[other : other + size] = data[other : other + size], data[at : at + size]
    return bytes(data)


def places(tree) -> list:
    """(container, key) of everything within a JSON value."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [place for key, value in items for place in ((tree, key), *places(value))]


def change_json(tree, edits):
    """The same with a few things in it replaced, deleted, added, copied from elsewhere, or made larger."""
    tree = copy.deepcopy(tree)
    for number in edits:
        found = places(tree)
        if not found:
            break
        edit, arg = pick(number, EDITS, range(2**16))
        if edit == "number":  # one in place of another
            found = [(c, k) for c, k in found if type(c[k]) in (int, float)] or found
        (container, key), extreme = pick(arg, found, NUMBERS)
        nasty = copy.deepcopy(NASTY_VALUES[arg % len(NASTY_VALUES)])
        if edit == "delete":
            del container[key]
        elif edit == "add" and isinstance(container, dict):
            container[str(nasty)[:10]] = nasty
        elif edit == "rename" and isinstance(container, dict):
            container[str(nasty)] = container.pop(key)
        elif edit == "copy":
            other, name = found[arg % len(found)]
            container[key] = copy.deepcopy(other[name])
        elif edit == "number":
            container[key] = extreme
        else:
            container[key] = nasty
    return tree


def drain(source):
    """All blocks of a Source, each of which must be what is promised."""
    for images, labels, is_val in source.blocks:
        assert images.dtype == np.uint8 and images.ndim == 4 and len(images) == len(labels) == len(is_val)
        if len(images) and source.class_names:
            assert 0 <= labels.min() <= labels.max() < len(source.class_names)


def prepare_all(name, path, **settings):
    """scripts.prepare_data on a file: a whole set that opens and verifies, or nothing at all."""
    data = Path(os.environ["NANODIFF_BASE_DIR"]) / "data"
    done = False
    with told(name):
        prepare(path, val_fraction=0.3, **settings)
        assert all(len(open_dataset("toy", split)) for split in open_dataset("toy").meta["splits"])
        verify(open_dataset("toy"))
        done = True
    if not done and (data / "toy").exists():  # of an earlier case
        verify(open_dataset("toy"))
    assert not data.exists() or {p.name for p in data.iterdir()} <= {".toy.lock", "toy"}


# ---------------------------------------------------------------------------------------------------------------------
# Settings

SCRIPT = """
depth = 12  # >= 1: layers
lr = 0.1  # (0, 10]: rate
dtype = "auto"  # auto|bfloat16
compile = True
tag = "x"  # any text
rates = "0.9"
limit: int | None = None  # > 0: at most
config = configure(globals())
"""
DEFAULTS = dict(depth=12, lr=0.1, dtype="auto", compile=True, tag="x", rates="0.9", limit=None)
KINDS = dict(depth=int, lr=float, dtype=str, compile=bool, tag=str, rates=str, limit=int | None)
TRACE = "executed"
RUNS = f"open({TRACE!r}, 'w')"
EXPRESSIONS = [
    "1", "-1", "0.5", "1e999", "nan", "'a'", "None", "True", "...", "b'a'", "1j", "'é'", "(0.9, 0.99)", "[1, 'a']",
    "{}",
    "{1: 2}", "set()", "10**10**10", "'a'*10**12", "9**9**9", "1<<10**12", "[0]*10**12", "0x" + "f" * 6000, "1" * 6000,
    "1_000", f"{RUNS}", f"[{RUNS} for _ in 'a']", f"(x := {RUNS})", f"f'{{{RUNS}}}'", f"lambda: {RUNS}",
    "__import__('os').mkdir('executed')", f"eval({RUNS!r})", "().__class__.__base__.__subclasses__()", f"{{{RUNS}: 1}}",
    f"1 if {RUNS} else 2", f"not {RUNS}", "-'a'", "'\\ud800'", "'a\\nb'", "'" + "a" * 5000 + "'", "await x", "yield",
    "*a",
    "(" * 60 + "1" + ",)" * 60, "[" * 150 + "1" + "]" * 150, "(" * 300, "-" * 5000 + "1", "1" + "+1" * 5000,
    "a" + ".a" * 5000, "'\\x'", "'\\N{x}'", "0777", "1 2", "'\\d'", "'''", "# only a comment", "1if 1else 2", "{*()}",
]  # fmt: skip
STATEMENTS = [
    "{n} = {e}", "{n} = {e}", "{n} = {e}", "{n} = {e}", "{n}: {e} = 1", "{n} += {e}", "{n} = {n} = {e}",
    "{n}, lr = {e}", "{e}",
    "{n}.x = {e}", "{n}[0] = {e}", "import os", "from os import *", "if {e}: pass", "def f(x={e}): pass", "del {n}",
    "class A({e}): pass", "@{e}\ndef f(): pass", "with {e}: pass", "for {n} in {e}: pass", "assert {e}", "\t{n} = {e}",
    "global {n}", "{n} = {e};{n} = {e}", "match {n}:\n case {e}: pass", "\0", "# coding: utf-16", "\x0c",
    "{n} = ({e}", "\\",
]  # fmt: skip
names = st.sampled_from([*DEFAULTS, *DEFAULTS, "dept", "__class__", "configure", "print", "é", ""])
expressions = st.sampled_from(EXPRESSIONS)
nested = st.tuples(st.sampled_from(["({}, 1)", "[{}]", "-{}", "({})", "{{'a': {}}}", "{} + {}", "{}.x"]), expressions)
nested = nested.map(lambda pair: pair[0].format(pair[1], pair[1]))
lines = st.builds("{} = {}".format, names, expressions) | st.builds(
    lambda form, n, e: form.format(n=n, e=e), st.sampled_from(STATEMENTS), names, expressions | expressions | nested
)
texts = st.sampled_from(
    ["", "1", "0", "-1", "1.5", "1e3", "nan", "inf", "-inf", "1e999", "auto", "None", "True", "x.py", "\ud800",
    "\udcff",
     "a\nb", "9" * 5000, "a" * 10_000, "0x10", "１", "1_0", "(1,)", "__import__('os')", "\x1b[2J", "../../x", "--", "=",
     "\u2028", "1e-400", "²"]
)  # fmt: skip
arguments = st.one_of(
    st.builds("{}{}{}{}".format, st.sampled_from(["--", "--", "-", ""]), names, st.sampled_from(["=", "=", ""]), texts),
    st.builds("--{}={}".format, names, st.text(max_size=6)),
    st.builds("{}.py".format, texts),
    texts,
)


def configured(name, folder, argv):
    """configure refuses in one line and with exit code 2, or gives values that every rule accepts."""
    globals_ = dict(DEFAULTS, __file__="program.py", __name__="program")
    with told(name), redirect_stderr(io.StringIO()) as err, redirect_stdout(io.StringIO()):
        try:
            config = configurator.configure(globals_, argv)
        except SystemExit as stop:
            line = err.getvalue()
            if stop.code == 2:
                assert line.startswith("error: ") and line.endswith("\n") and line[:-1].isprintable(), line
            else:
                assert stop.code == 0 and {"-h", "--help"} & set(argv)
            assert {key: globals_[key] for key in DEFAULTS} == DEFAULTS
        else:
            assert all(isinstance(config[key], kind) for key, kind in KINDS.items()), config
            assert config["depth"] >= 1 and 0 < config["lr"] <= 10 and config["dtype"] in ("auto", "bfloat16")
            assert config["limit"] is None or config["limit"] > 0


@cases("arguments", argv=st.lists(arguments, min_size=1, max_size=3))
def test_arguments(folder, argv):
    configured("arguments", folder, argv)


@cases("presets", lines=st.lists(lines, min_size=1, max_size=3), moves=moves, whole=st.booleans())
def test_presets(folder, lines, moves, whole):
    text = "\n".join(lines).encode(errors="surrogatepass")
    (folder / "preset.py").write_bytes(text if whole else change_bytes(text, moves))
    configured("presets", folder, [str(folder / "preset.py")])
    assert not Path(TRACE).exists()


# ---------------------------------------------------------------------------------------------------------------------
# Safetensors

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b.é": torch.ones(3, dtype=torch.int16), "empty": torch.empty(0, 4)}


def check_safetensors(name, path, data):
    path.write_bytes(data)
    with told(name):
        tensors, metadata = load_safetensors(path)
        length = int.from_bytes(data[:8], "little")
        assert sum(t.numel() * t.itemsize for t in tensors.values()) == len(data) - 8 - length
        assert all(isinstance(x, str) for item in metadata.items() for x in item)
        for tensor in tensors.values():
            tensor.clone()  # its memory is there
    assert path.read_bytes() == data


@cases("safetensors", moves=moves)
def test_safetensors_bytes(folder, moves):
    valid = (folder / "valid.safetensors").read_bytes()
    check_safetensors("safetensors", folder / "x.safetensors", change_bytes(valid, moves))


@cases("safetensors header", edits=edits, spare=st.integers(-1, 1))
def test_safetensors_header(folder, edits, spare):
    valid = (folder / "valid.safetensors").read_bytes()
    length = int.from_bytes(valid[:8], "little")
    header = json.dumps(change_json(json.loads(valid[8 : 8 + length]), edits)).encode()
    data = (len(header) + spare).to_bytes(8, "little") + header + valid[8 + length :]
    check_safetensors("safetensors header", folder / "x.safetensors", data)


# ---------------------------------------------------------------------------------------------------------------------
# Arrays

IMAGES = np.stack([noise(4, 4, seed) for seed in range(6)])
LABELS = np.arange(6) % 3


SIDES = (4, 6, 1, 10**8, 10**8, 2**32 - 1)


@cases("idx", number=numbers, moves=moves)
def test_idx(folder, number, moves):
    """Of images or of labels, packed or not: the sizes in the header changed, or bytes before or after packing."""
    (folder / "idx").mkdir(exist_ok=True)
    labels, packed, outer, sizes, alone, *shape = pick(number, *[(False, True)] * 5, *[SIDES] * 3)
    pack = gzip.compress if packed else bytes
    files = {"train-images-idx3-ubyte": idx(IMAGES[..., 0]), "train-labels-idx1-ubyte": idx(LABELS.astype(np.uint8))}
    for i, (name, data) in enumerate(files.items()):
        if i == labels:
            header = np.array(shape[: data[3]], ">u4").tobytes()
            if sizes:
                data = pack(data[:4] + header + data[4 + len(header) :])
            else:
                data = change_bytes(pack(data), moves) if outer else pack(change_bytes(data, moves))
        (folder / "idx" / name).write_bytes(pack(data) if i != labels else data)
    if alone:
        (folder / "idx" / name).unlink()  # the labels
    prepare_all("idx", folder / "idx", source="idx")


def npz(**members) -> bytes:
    with zipfile.ZipFile(file := io.BytesIO(), "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(f"{name}.npy", data)
    return file.getvalue()


def npy(array, **changed) -> bytes:
    np.lib.format.write_array(file := io.BytesIO(), array)
    if not changed:
        return file.getvalue()
    fields = {"descr": array.dtype.str, "fortran_order": False, "shape": array.shape} | changed
    header = (repr(fields) + "\n").encode()
    return b"\x93NUMPY\x01\0" + struct.pack("<H", len(header)) + header + array.tobytes()


sides = st.sampled_from([0, 1, 3, 4, 6, -1, 10**8, 2**31, 2**63, 10**30, True, 4.0])
descrs = st.sampled_from(
    ["|u1", "<f4", "|O", "<U3", "|V3", ">i8", "|b1", "x", "", [("a", "|u1")], "<M8[s]", 3, "(2,)u1"]
)


@cases(
    "npz header",
    shape=st.none() | st.lists(sides, max_size=5).map(tuple) | sides,
    descr=st.none() | st.none() | descrs,
    order=st.sampled_from([False, False, False, True, 0, "x"]),
    labels=st.booleans(),
    moves=moves,
)
def test_npz_header(folder, shape, descr, order, labels, moves):
    array = LABELS if labels else IMAGES
    changed = npy(
        array, shape=array.shape if shape is None else shape, descr=descr or array.dtype.str, fortran_order=order
    )
    changed = changed if shape or descr else change_bytes(npy(array), moves)
    (folder / "a.npz").write_bytes(
        npz(arr_0=npy(IMAGES), labels=changed) if labels else npz(arr_0=changed, labels=npy(LABELS))
    )
    prepare_all("npz header", folder / "a.npz")


@cases("npz", moves=moves)
def test_npz_bytes(folder, moves):
    (folder / "a.npz").write_bytes(change_bytes(npz(arr_0=npy(IMAGES), labels=npy(LABELS)), moves))
    prepare_all("npz", folder / "a.npz", source="npz")


# ---------------------------------------------------------------------------------------------------------------------
# Archives of images

PNGS = [encode_png(image) for image in IMAGES]


@cases("zip", moves=moves)
def test_zip_bytes(folder, moves):
    with zipfile.ZipFile(file := io.BytesIO(), "w") as archive:
        for i, name in enumerate(["cat/a.png", "dog/é.png", "dog/b.png"]):
            archive.writestr(name, PNGS[i])
    (folder / "a.zip").write_bytes(change_bytes(file.getvalue(), moves))
    prepare_all("zip", folder / "a.zip", source="zip")


@cases("dataset.json", edits=edits, moves=moves)
def test_dataset_json(folder, edits, moves):
    table = {"labels": [["0/a.png", 1], ["0/b.png", 0], ["0/c.png", 2]]}
    text = json.dumps(change_json(table, edits)).encode()
    with zipfile.ZipFile(folder / "edm.zip", "w") as archive:
        for name, png in zip("abc", PNGS):
            archive.writestr(f"0/{name}.png", png)
        archive.writestr("dataset.json", change_bytes(text, moves if len(edits) == 1 else []))
    prepare_all("dataset.json", folder / "edm.zip")


TAR_NAMES = (
    "cat/0.png", "cat/1.png", "dog/2.png", "../../x/3.png", "/etc/cat/4.png", "cat/../../5.png", "a\nb/6.png",
    "\udcff/7.png",
     "-x/8.png", ".x/9.png", "😀/10.png", "a" * 300 + "/11.png", "CAT/0.png", "12.png", "", "cat/", "cat//13.png",
     "a\x1b[2J/14.png", "train/cat/15.png", "val/cat/16.png", "/17.png", "a/b/c/d/18.png", "cat/19.PNG", "a,b/20.png",
)  # fmt: skip
TAR_TYPES = (tarfile.REGTYPE,) * 6 + tuple(map(bytes, zip(b"\x0012345678LKSxgX?")))
HEADER_FIELDS = (
    (100, 8),
    (124, 12),
    (124, 12),
    (136, 12),
    (156, 1),
    (257, 8),
    (386, 48),
    (345, 155),
)  # mode, size, ...
NASTY_FIELDS = (
    b"77777777777", b"\x80" + b"\xff" * 11, b"\xff" * 12, b"\xff" * 11 + b"\0", b"-1", b"", b"9", b"x",
    b"\x80" + b"\0" * 6 + b"\1" + b"\0" * 4,
    b"\xc3\x28",
)  # fmt: skip
pax = st.dictionaries(
    st.sampled_from(
        ["path", "size", "mtime", "linkpath", "GNU.sparse.map", "GNU.sparse.size", "GNU.sparse.major",
        "GNU.sparse.name",
         "GNU.sparse.realsize", "GNU.sparse.minor", "hdrcharset", "uid"]
    ),
    st.sampled_from(["-1", "0", "1", "nan", "x", "1e999", "9" * 30, "9" * 5000, "0,1,2", "../x.png", "\0", "é",
    "BINARY"]),
    max_size=2,
)  # fmt: skip


def tar(numbers, pax_headers, format) -> bytes:
    """A member for each number, which tells its name and type and which field of a header changes how, if any; the
    checksums are made right."""
    members = [pick(number, TAR_NAMES, TAR_TYPES, (False, False, True)) for number in numbers]
    with tarfile.open(fileobj=(file := io.BytesIO()), mode="w", format=format, pax_headers=pax_headers) as archive:
        for i, (name, kind, _) in enumerate(members):
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.size = kind, "../../etc/passwd", len(PNGS[i])
            archive.addfile(info, io.BytesIO(PNGS[i]))
    data = bytearray(file.getvalue())
    starts = [at for at in range(0, len(data), 512) if data[at + 257 : at + 262] == b"ustar"]
    for number in (number for number, (_, _, changed) in zip(numbers, members) if changed):
        (start, size), nasty, at = pick(number + 1, HEADER_FIELDS, NASTY_FIELDS, starts)
        data[at + start : at + start + size] = nasty[:size].ljust(size, b"\0")
        data[at + 148 : at + 156] = b" " * 8
        data[at + 148 : at + 156] = b"%06o\0 " % sum(data[at : at + 512])
    return bytes(data)


@cases(
    "tar",
    members=st.lists(numbers, min_size=1, max_size=4),
    pax_headers=st.just({}) | st.just({}) | pax,
    format=st.sampled_from([tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]),
    packed=st.booleans(),
    moves=st.just([]) | moves,
)
def test_tar(folder, members, pax_headers, format, packed, moves):
    data = change_bytes(tar(members, pax_headers, format), moves)
    (folder / "a.tar").write_bytes(gzip.compress(data, 1) if packed else data)
    before = sorted(os.listdir(folder))
    prepare_all("tar", folder / "a.tar", source="tar")
    assert sorted({*os.listdir(folder), "base"}) == sorted({*before, "base"})


@cases("cifar", number=numbers, moves=moves)
def test_cifar(folder, number, moves):
    """A batch of another size, then bytes changed before or after packing."""
    name, size, outer = pick(number, CIFAR10_BATCHES, (None, None, 0, 1, 3072, 3073, 6145), (False, True))
    write_cifar(path := folder / "c.tar.gz", num=2, damage={name: size})
    data = path.read_bytes()
    data = change_bytes(data, moves) if outer else gzip.compress(change_bytes(gzip.decompress(data), moves), 1)
    path.write_bytes(data)
    prepare_all("cifar", path, source="cifar10", sha256="")


# ---------------------------------------------------------------------------------------------------------------------
# Image files


def encoded() -> dict[str, bytes]:
    """One image in every format, with the parts that readers stumble over."""
    image, out = Image.fromarray(noise(9, 8)), {}
    exif = image.getexif()
    exif[0x0112], exif[0x010E] = 6, "text"
    variants = {
        "png": (image, dict(exif=exif, icc_profile=b"icc" * 40)), "palette png": (image.quantize(7),
        dict(format="PNG")),
        "gray png": (image.convert("I;16"), dict(format="PNG")), "jpg": (image, dict(format="JPEG", exif=exif)),
        "progressive": (image, dict(format="JPEG", progressive=True)), "cmyk": (image.convert("CMYK"),
        dict(format="JPEG")),
        "gif": (image, dict(save_all=True, append_images=[image.rotate(90)])), "tif": (image, dict(format="TIFF",
        compression="tiff_lzw")),
        "bmp": (image, {}), "webp": (image, dict(exif=exif)), "ppm": (image, {}),
    }  # fmt: skip
    for name, (picture, options) in variants.items():
        picture.save(file := io.BytesIO(), **{"format": name.upper()} | options)
        out[name] = file.getvalue()
    return out


def mend_png(data: bytes) -> bytes:
    """Every chunk's length kept as it is, its checksum made right."""
    out, at = bytearray(data[:8]), 8
    while at + 12 <= len(data):
        size = min(int.from_bytes(data[at : at + 4], "big"), len(data) - at - 12)
        body = data[at + 4 : at + 8 + size]
        out += data[at : at + 4] + body + struct.pack(">I", binascii.crc32(body))
        at += 12 + size
    return bytes(out)


ENCODED = encoded()


@cases("images", number=numbers, moves=moves)
def test_images(number, moves):
    kind, head, size = pick(number, (*ENCODED, "png", "png", "jpg"), (True, False), (0, 4, 64))
    data = ENCODED[kind]
    data = change_bytes(data, moves, 80 if head else 2**16)
    data = mend_png(data) if "png" in kind else data
    with told("images"):
        ((_, _, image),) = decode_chunk([(0, "a.png", data)], size)
        assert isinstance(image, str) or (image.dtype == np.uint8 and image.shape[0] == 3)
        assert isinstance(image, str) or size == 0 or image.shape == (3, size, size)


# ---------------------------------------------------------------------------------------------------------------------
# Data sets


def write_set(name, kind="images"):
    latent = kind == "latents"
    images = np.ones((6, 4, 4, 4), np.float16) if latent else IMAGES.transpose(0, 3, 1, 2)
    with DatasetWriter(name, ["a", "b", "c"], kind=kind, source="x", overwrite=True) as writer:
        if latent:
            facts = dict(
                autoencoder="kl", sha256="0" * 64, path="/nowhere/vae", source="x", downsample=8, parts=2, copies=1
            )
            writer.meta["latents"] = facts | dict(offset=[0.0] * 2, scale=[1.0] * 2, mean=[0.5] * 2, std=[1.0] * 2)
        writer.append("train", images[:4], LABELS[:4])
        writer.append("val", images[4:], LABELS[4:])
    return writer.path


def check_set(name, kind, folder, edits, moves, split):
    path = Path(os.environ["NANODIFF_BASE_DIR"]) / "data" / kind
    if not path.exists():
        write_set(kind, kind)
        (path / "valid.json").write_bytes((path / "meta.json").read_bytes())
    text = json.dumps(change_json(json.loads((path / "valid.json").read_text()), edits)).encode()
    (path / "meta.json").write_bytes(change_bytes(text, moves if len(edits) == 1 else []))
    with told(name):
        data = open_dataset(kind, split)
        everything = np.arange(len(data))
        assert data.images(everything).shape[1:] == (data.channels, data.resolution, data.resolution)
        labels = data.labels(everything)
        assert not data.num_classes or 0 <= labels.min() <= labels.max() < data.num_classes
        assert "".join(data.class_names).encode() is not None
        verify(data)


@cases("data set", edits=edits, moves=moves, split=st.sampled_from(["train", "val"]))
def test_data_set(folder, edits, moves, split):
    check_set("data set", "images", folder, edits, moves, split)


@cases("latent set", edits=edits, moves=moves, split=st.sampled_from(["train", "val"]))
def test_latent_set(folder, edits, moves, split):
    check_set("latent set", "latents", folder, edits, moves, split)


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints

FACTS = dict(name="toy", kind="images", channels=3, resolution=8, num_classes=2, class_names=["a", "b"])
CONFIG = dict(objective="eps", noise_schedule="cosine", num_timesteps=10, variance="fixed_small", loss="mse")
CONFIG |= dict(rescale_timesteps=True, label_drop=0.1, low_res_size=0, flow_prediction="v")
DIT = DiTConfig.from_depth(1, 8, 3, 3, 2, width=8, heads=1)
UNET = UNetConfig(8, 3, 3, 32, 1, (4,), (1, 1), 1, num_classes=2)
LATENT = dict(autoencoder="kl", sha256="0" * 64, path="", source="x", downsample=8, parts=2, copies=1)
LATENT |= dict(offset=[0.0] * 3, scale=[1.0] * 3)


def described(model_config, **facts):
    fields = copy.deepcopy(vars(model_config))
    arch = "unet" if isinstance(model_config, UNetConfig) else "dit"
    meta = dict(step=3, config=CONFIG, arch=arch, model_config=fields, data=FACTS | facts, ema_rates=[0.99], loop={})
    return json.loads(json.dumps(meta))


STATES = {config: build_model(config, "cpu", 0).state_dict() for config in (DIT, UNET)}


def use(loaded):
    """What a script would do next: one prediction, of the shape that it says."""
    codec = load_codec(loaded.data, torch.device("cpu"))
    x = torch.zeros(1, *codec.shape)
    label = torch.zeros(1, dtype=torch.int64) if loaded.num_classes else None
    low_res = x if loaded.model.config.low_res else None
    out = loaded.model(x, torch.zeros(1), label, low_res)
    assert out.shape == (1, loaded.process.out_channels(x.shape[1]), *x.shape[2:])
    assert codec.to_pixels(x).dtype == torch.uint8
    assert loaded.has_null_class in (True, False) and f"{loaded.step:06d}"
    assert len(loaded.data["class_names"]) in (0, loaded.data["num_classes"])


def change_part(meta, edits):
    """Most often of the model's config, whose numbers are what memory is taken for."""
    (part,) = pick(edits[0] + 1, ("model_config", "model_config", "config", "data", None))
    return meta | {part: change_json(meta[part], edits)} if part else change_json(meta, edits)


@cases("dit", edits=edits, latent=st.booleans())
def test_dit_from_meta(edits, latent):
    facts = dict(kind="latents", latents=LATENT) if latent else {}
    with told("dit"), torch.no_grad():
        meta = change_part(described(DIT, **facts), edits)
        use(restore(meta, dict(STATES[DIT]), "cpu", source="x", weights="raw", weights_path=Path("x")))


@cases("unet", edits=edits)
def test_unet_from_meta(edits):
    with told("unet"), torch.no_grad():
        meta = change_part(described(UNET), edits)
        use(restore(meta, dict(STATES[UNET]), "cpu", source="x", weights="raw", weights_path=Path("x")))


PUBLISHED = (
    to_meta(
        build_model(DiTConfig(8, 3, 3, 2, 8, 1, 1, 2, "classic"), "cpu", 0).state_dict(),
        DiTConfig(8, 3, 3, 2, 8, 1, 1, 2, "classic"),
    ),
    to_improved_diffusion(STATES[UNET], UNET),
)
NASTY_NAMES = (
    "blocks.99999999999.x",
    "blocks.x.y",
    "input_blocks.99999999999.0.x",
    "input_blocks.x",
    "",
    "pos_embed",
    "ema",
    "label_emb.weight",
)


@cases("published", number=numbers, moves=moves)
def test_published_weights(folder, number, moves):
    """Weights alone, whose names and shapes tell the model: tensors renamed, left out, of other shapes, of stride 0."""
    weights = dict(pick(number, (PUBLISHED[0], *PUBLISHED))[0])
    for move in moves:
        name, other, change = pick(move, [*weights], (next(iter(weights)), *NASTY_NAMES), range(8))
        x = weights[name]
        if not isinstance(x, torch.Tensor) or x.is_meta or x.is_sparse or not x.numel():
            continue  # changed already, into what cannot be changed further
        sizes = pick(move + 1, *[(1, 3, 10**4)] * 4)
        if change == 0:
            del weights[name]
        elif change == 1:
            weights[other] = weights.pop(name)
        elif change == 2:
            weights[name] = x.flatten()[0].expand(sizes[: x.ndim])  # of any size, but one number in the file
        elif change == 3:
            weights[name] = x[..., None]
        elif change == 4:
            weights[name] = x[:1]
        elif change == 5:
            weights[name] = x.to((torch.complex64, torch.int64, torch.float16)[move % 3])
        elif change == 6:
            weights[name] = ({}, [x], "x", None, x.to_sparse(), x.to("meta"), torch.nn.Parameter(x))[move % 7]
        weights = weights or {"x": x}
    torch.save(weights, folder / "x.pt")
    with told("published"), torch.no_grad():
        use(load_run(str(folder / "x.pt"), "cpu"))


def write_run(folder, tag="r") -> Path:
    """A run to be changed; "l" is one of adapters for the unchanged run "b"."""
    run = folder / "base" / "runs" / tag
    if not run.exists():
        meta = described(DIT)
        if tag == "l":
            write_run(folder, "b")
            loaded = load_run("b", "cpu", ema="raw")
            origin = identity(loaded)
            add_lora(loaded.model, 1, 1.0, "qkv")
            save_adapters(run / "adapters" / "step_000003.safetensors", loaded.model, 1, 1.0, "qkv", [], origin)
            meta |= dict(lora=origin, arch="lora", ema_rates=[])
        path = save_checkpoint(run, 3, {"model": STATES[DIT], "ema_0.99": STATES[DIT]}, meta)
        for name in ("meta", "manifest"):
            (path / f"{name}.valid").write_bytes((path / f"{name}.json").read_bytes())
    return run / "checkpoints" / "step_000003"


@cases("manifest", edits=edits, moves=moves)
def test_manifest(folder, edits, moves):
    path = write_run(folder)
    text = json.dumps(change_json(json.loads((path / "manifest.valid").read_text()), edits)).encode()
    (path / "manifest.json").write_bytes(change_bytes(text, moves if len(edits) == 1 else []))
    (path / "meta.json").write_bytes((path / "meta.valid").read_bytes())
    with told("manifest"), redirect_stdout(io.StringIO()) as out:
        fault = why_corrupt(path)
        assert fault.isprintable()
        assert (find_checkpoint(path.parents[1]) == path) == (fault == "")
    assert all(line.isprintable() for line in out.getvalue().split("\n"))


@cases("checkpoint", edits=edits, moves=moves, tag=st.sampled_from("rl"), ema=st.sampled_from(["", "raw", "0.99"]))
def test_checkpoint(folder, edits, moves, tag, ema):
    """meta.json changed, the manifest made right."""
    path = write_run(folder, tag)
    text = json.dumps(change_json(json.loads((path / "meta.valid").read_text()), edits)).encode()
    text = change_bytes(text, moves if len(edits) == 1 else [])
    (path / "meta.json").write_bytes(text)
    manifest = json.loads((path / "manifest.valid").read_text())
    manifest["meta.json"] = {"size": len(text), "sha256": checkpoint.hashlib.sha256(text).hexdigest()}
    (path / "manifest.json").write_text(json.dumps(manifest))
    with told("checkpoint"), torch.no_grad():
        use(load_run(tag, "cpu", ema=ema))


def test_all_cases_ran():
    """Those of the properties that ran in this process, which may be one of several that share the file."""
    assert sum(BUDGET.values()) >= 10_000
    assert not {name: n for name, n in RAN.items() if n < 0.99 * BUDGET[name]}
