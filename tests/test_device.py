"""Devices, dtypes and peaks."""

import pytest
import torch

from nanodiff.common import UserError
from nanodiff.device import choose_dtype, init_device, peak_flops


@pytest.mark.parametrize("kind", ["cuda", "mps"])
def test_an_absent_device(monkeypatch, kind):
    module = torch.cuda if kind == "cuda" else torch.backends.mps
    monkeypatch.setattr(module, "is_available", lambda: False)
    with pytest.raises(UserError, match=f"device_type='{kind}' .*available: .*cpu"):
        init_device(kind)


def test_the_best_device_is_chosen(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for has_mps in (True, False):
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda there=has_mps: there)
        assert init_device("").type == ("mps" if has_mps else "cpu")
    assert init_device("cpu") == torch.device("cpu")


def test_more_local_ranks_than_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(UserError, match="local rank 2 has no GPU of its own: 2 present"):
        init_device("cuda")


def test_dtypes(monkeypatch):
    cpu, cuda, mps = map(torch.device, ("cpu", "cuda", "mps"))
    for name in ("bfloat16", "float16", "float32"):
        assert choose_dtype(name, cpu) == choose_dtype(name, mps) == getattr(torch, name)
    for native in (True, False):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda there=native: there)
        assert choose_dtype("auto", cpu) == (torch.bfloat16 if native else torch.float32)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, there=native: there)
        assert choose_dtype("auto", cuda) == (torch.bfloat16 if native else torch.float16)
    assert choose_dtype("auto", mps) == torch.float32


@pytest.mark.parametrize(
    "name, tflops",  # names as drivers give them
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA A10G", 70),
        ("NVIDIA L40S", 362),
        ("NVIDIA RTX A4000", 0),  # neither an A40
        ("NVIDIA RTX A1000", 0),  # nor an A100
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 0),
        ("Some GPU of tomorrow", 0),
    ],
)
def test_peaks(monkeypatch, name, tflops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda")) == pytest.approx(tflops * 1e12)
    assert peak_flops(torch.device("cpu")) == peak_flops(torch.device("mps")) == 0
