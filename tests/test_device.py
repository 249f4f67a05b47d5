"""Devices, dtypes and peaks."""

import ctypes
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, refused
from processes import on_ranks

from nanodiff.common import UserError, get_dist
from nanodiff.device import choose_dtype, init_device, peak_flops, why_not_compiled
from nanodiff.dist import compare_ranks


def init_with_other_settings(rank):
    """The line with which this rank is refused, or ""."""
    config = {
        "model_tag": f"on{rank}",
        "lr": 0.05 if rank else 0.004,
        "dtype": "auto",
        "depth": 4,
    }
    torch.cpu._is_avx512_bf16_supported = lambda: rank == 0
    try:
        init_device("cpu", config=config)
    except UserError as error:
        return str(error)
    return ""


def test_ranks_compare_settings_and_what_auto_means():
    """Each machine reads its own presets and command, and may have another kind of CPU. Tags may differ."""
    line = (
        "rank 1 has lr=0.05, rank 0 0.004; dtype=torch.float32, rank 0 torch.bfloat16; accepted: the same on every rank"
    )
    assert on_ranks(init_with_other_settings) == [line, line]


@pytest.mark.parametrize("difference", ["torch", "code"])
def test_ranks_compare_code_and_torch(monkeypatch, difference):
    monkeypatch.setattr("nanodiff.dist.gather_objects", lambda facts: [facts, facts, facts | {difference: "other"}])
    refused(f"^rank 2 has {difference}=other, rank 0 .*; accepted: the same", compare_ranks, {})


STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "8"}


@pytest.mark.parametrize(
    "environment",
    [
        STEP,
        {"OMPI_COMM_WORLD_SIZE": "8"},
        {"PMI_SIZE": "8"},
        {"SLURM_NTASKS": "8", "SLURM_PROCID": "1"},  # of a launcher that does not tell of its step
    ],
)
def test_tasks_that_nobody_numbered_are_refused(monkeypatch, environment):
    """Else each would train alone. torchrun numbers its workers, also where srun has started it."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    refused("^8 tasks, RANK=0, WORLD_SIZE=1: start them by torchrun or runs/multinode.sh$", init_device, "cpu")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "7")
    assert get_dist() == (7, 0, 8)
    monkeypatch.setenv("RANK", "8")
    refused("RANK=8, WORLD_SIZE=8: start", get_dist)
    monkeypatch.setenv("RANK", "-1")
    refused("RANK=-1, WORLD_SIZE=8: start", get_dist)


@pytest.mark.parametrize(
    "environment",
    [
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8"},  # salloc
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},  # sbatch's own script
        {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},  # srun --ntasks=1, salloc's own step
        {"OMPI_COMM_WORLD_SIZE": "1", "PMI_SIZE": ""},
        {"SLURM_NTASKS": "8", "SLURM_PROCID": "1", "RANK": "0"},  # torchrun's, whatever the job could start
    ],
)
def test_one_task_trains_whatever_its_job_could_start(monkeypatch, environment):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert init_device("cpu").type == "cpu"


def test_the_best_device_is_chosen_and_an_absent_one_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for has_mps in (True, False):
        monkeypatch.setattr(torch.mps, "is_available", lambda there=has_mps: there)
        assert init_device("").type == ("mps" if has_mps else "cpu")
    assert init_device("cpu") == torch.device("cpu")
    for kind in ("cuda", "mps"):
        refused(f"device_type='{kind}' .*available: .*cpu", init_device, kind)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    refused("local rank 2 has no GPU of its own: 2 present", init_device, "cuda")


@pytest.mark.parametrize("told", ["", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_memory_grows_in_segments_unless_the_user_says_otherwise(monkeypatch, told):
    asked = []
    for name, value in (
        ("is_available", True),
        ("device_count", 1),
        ("set_device", None),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *args, value=value: value)
    monkeypatch.setattr(os, "environ", {told: "max_split_size_mb:64"} if told else {})
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", asked.append)
    init_device("cuda")
    torch.backends.cuda.matmul.allow_tf32 = False  # what it set is undone
    assert asked == ([] if told else ["expandable_segments:True"])


def test_what_triton_lacks_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)
    with monkeypatch.context() as no_header:
        no_header.setattr("nanodiff.device.sysconfig.get_path", lambda name: str(tmp_path))
        assert "python3-dev" in why_not_compiled(torch.device("cuda"))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "C compiler" in why_not_compiled(torch.device("cuda"))


def test_scripts_use_the_python3_at_hand_or_the_environment_that_is_named(tmp_path):
    show = "source runs/setup.sh; command -v python3"
    env = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}

    def run(**more):
        return subprocess.run(["bash", "-c", show], cwd=ROOT, env=env | more, capture_output=True, text=True)

    assert "nothing is installed" in run().stdout
    (tmp_path / "bin").mkdir()
    for name in ("pip", "python3"):
        (tmp_path / "bin" / name).touch(mode=0o755)
    shutil.copy(ROOT / "requirements.txt", tmp_path)  # all of it is there
    assert run(NANODIFF_VENV=str(tmp_path)).stdout.split() == [str(tmp_path / "bin" / "python3")]


def test_dtypes(monkeypatch):
    cpu, cuda, mps = map(torch.device, ("cpu", "cuda", "mps"))
    for name in ("bfloat16", "float16", "float32"):
        assert choose_dtype(name, cpu) == getattr(torch, name)
        assert choose_dtype(name, mps) == getattr(torch, name)
    for native, on_cpu, on_cuda in (
        (True, torch.bfloat16, torch.bfloat16),
        (False, torch.float32, torch.float16),
    ):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda there=native: there)
        assert choose_dtype("auto", cpu) == on_cpu
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, there=native: there)
        assert choose_dtype("auto", cuda) == on_cuda
    assert choose_dtype("auto", mps) == torch.float32


@pytest.mark.parametrize(
    "name, tflops",  # names as drivers give them
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA L40S", 362),
        ("NVIDIA H200 NVL", 836),
        ("Some GPU of tomorrow", 0.5),
        ("NVIDIA GeForce RTX 3090", 71),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 5090", 209.5),
        ("Tesla T4", 65),
        ("Tesla V100-SXM2-16GB", 125),
        ("Tesla V100-PCIE-32GB", 112),
        ("NVIDIA A10", 125),
        ("NVIDIA L4", 121),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA RTX A1000", 0.5),
        ("NVIDIA L40", 0.5),
        ("NVIDIA A10G", 0.5),  # no A100, no L40S, no A10
        ("NVIDIA GeForce RTX 3090 Ti", 0.5),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 0.5),
    ],
)
def test_peaks(monkeypatch, capsys, name, tflops):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    monkeypatch.setattr("nanodiff.device.measured_peak", lambda device, dtype: 0.5e12)
    assert peak_flops(torch.device("cuda"), torch.bfloat16) == pytest.approx(tflops * 1e12)
    source = "bfloat16, measured" if tflops == 0.5 else "16 bits, by the datasheet"
    assert capsys.readouterr().out == f"peak: {tflops:.3g} TFLOP/s in {source}; mfu = share of it\n"
    assert peak_flops(torch.device("cpu"), torch.float32) == 0.5e12


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="no glibc")
def test_the_kernel_does_not_hand_out_a_tensors_memory_again_and_again():
    init_device("cpu")

    def page_faults():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for size in (2**21, 2**22, 2**23):  # twice 59 MB: 28,672 pages of 4 KiB
            torch.ones(size) + 1
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    assert min([page_faults() for _ in range(5)]) < 5000
