"""The .safetensors format: the official library and ours read each other's files; corrupt headers are refused."""

import json
import math

import pytest
import torch
from conftest import refused

from nanodiff.files import load_tensors
from nanodiff.safetensors import DTYPES, load_safetensors, read_tensors, save_safetensors


def one_of_each() -> dict[str, torch.Tensor]:
    """A tensor of every dtype that we read, odd shapes, awkward strides, 0-dim and empty ones."""
    g = torch.Generator().manual_seed(0)
    tensors = {}
    for code, dtype in DTYPES.items():
        tensors[f"layer.{code}"] = (torch.randn(3, 5, generator=g).abs() * 9).to(dtype)
    tensors["0-dim"] = torch.tensor(math.pi)
    tensors["empty"] = torch.empty(4, 0, 2, dtype=torch.int32)
    tensors["transposed"] = torch.randn(4, 6, generator=g).t()
    tensors["strided"] = torch.randn(8, generator=g)[::2]
    tensors["ünïcode \n"] = torch.arange(3)
    return tensors


def bits_of(tensor):
    return tensor.contiguous().flatten().view(torch.uint8)


def assert_same(a: dict, b: dict):
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype, name
        assert a[name].shape == b[name].shape, name
        assert torch.equal(bits_of(a[name]), bits_of(b[name])), name


def write(path, header, data):
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)
    return path


def test_the_official_library_and_we_read_each_other(tmp_path):
    official = pytest.importorskip("safetensors.torch", reason="the official library")
    assert set(official._TYPES.items()) <= set(DTYPES.items())
    tensors = one_of_each()
    save_safetensors(tensors, tmp_path / "ours", {"step": "500"})
    assert_same(official.load_file(tmp_path / "ours"), tensors)
    with official.safe_open(tmp_path / "ours", "pt") as f:
        assert f.metadata() == {"step": "500"}
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    official.save_file(tensors, tmp_path / "theirs", {"format": "pt"})
    loaded, metadata = load_safetensors(tmp_path / "theirs")
    assert_same(loaded, tensors)
    assert metadata == {"format": "pt"}


def test_tensors_are_writable_and_outlive_the_file(tmp_path):
    """Writing to a tensor does not change the file; a new file is renamed over the old one, still mapped."""
    path = tmp_path / "x.safetensors"
    save_safetensors({"w": torch.zeros(4)}, path)
    w = lambda: load_safetensors(path)[0]["w"]
    w().add_(1)
    old = w()
    save_safetensors({"w": torch.ones(4)}, path)
    assert old.sum() == 0
    assert w().sum() == 4


@pytest.mark.parametrize("name", ["a.safetensors", "a.sft", "a.pt", "a"])
def test_the_first_bytes_decide_whatever_the_name(tmp_path, name):
    tensors = {"w": torch.arange(3.0)}
    header = json.dumps({"__metadata__": None, "w": dict(dtype="F32", shape=[3], data_offsets=[0, 12])})
    path = write(tmp_path / name, header.encode(), tensors["w"].numpy().tobytes())
    assert_same(read_tensors(path)[0], tensors)
    for zipped in (True, False):
        torch.save(tensors, path, _use_new_zipfile_serialization=zipped)
        saved, metadata = read_tensors(path)
        assert_same(saved, tensors)
        assert metadata == {}


def test_a_dtype_that_torch_lacks_and_an_index_are_named(tmp_path):
    header = json.dumps({"w": dict(dtype="F6_E2M3", shape=[4], data_offsets=[0, 3])})
    path = write(tmp_path / "a.safetensors", header.encode(), bytes(3))
    refused("a.safetensors cannot be read as .safetensors: KeyError: 'F6_E2M3'", read_tensors, path)
    index = tmp_path / "a.safetensors.index.json"
    index.write_text('{"weight_map": {}}')
    refused("index.json holds no weights; if it is an index of shards, join them", read_tensors, index)


def test_unaligned_tensors(tmp_path):
    data = b"\x01" + torch.tensor([1.5, -2.5]).numpy().tobytes()
    header = {
        "a": dict(dtype="U8", shape=[1], data_offsets=[0, 1]),
        "b": dict(dtype="F32", shape=[2], data_offsets=[1, 9]),
    }
    for spaces in (b"", b"   "):
        path = write(tmp_path / "x", json.dumps(header).encode() + spaces, data)
        tensors, _ = load_safetensors(path)
        assert tensors["a"].tolist() == [1]
        assert tensors["b"].tolist() == [1.5, -2.5]


def test_a_file_cut_anywhere_or_of_another_kind_is_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    save_safetensors(one_of_each(), path)
    data = path.read_bytes()
    too_long = b'{"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}'
    for size in (0, 8, 100, len(data) - 1):
        path.write_bytes(data[:size])
        refused(r"a\.safetensors cannot be read as", load_safetensors, path)
    path.write_bytes((2**40).to_bytes(8, "little") + b"{}")
    refused(r"a\.safetensors cannot be read as", load_safetensors, path)
    for header in (too_long, b"{hello"):
        refused(r"a\.safetensors cannot be read as", load_safetensors, write(path, header, bytes(8)))
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n")
    for read in (load_safetensors, load_tensors):
        refused("git lfs pull$", read, path)
    refused("no such file: .*absent", load_safetensors, tmp_path / "absent")
    refused("cannot be read: Is a directory", load_safetensors, tmp_path)
