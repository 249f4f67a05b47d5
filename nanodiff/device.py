"""The device: choice, dtype, torch.compile, memory, peak FLOP/s."""

import contextlib
import ctypes
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
import timeit
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from nanodiff.common import Tensors, UserError, get_dist, print0
from nanodiff.dist import compare_ranks, join_ranks


def init_device(device_type: str, timeout_s: float = 0, config: dict | None = None) -> torch.device:
    """Choose the device ("" = the best present) and, under torchrun, join the process group.

    The run aborts when a rank is silent for `timeout_s`; see join_ranks for 0.
    `config`: a script's settings, which must be equal on all ranks. With "deterministic", CUDA repeats every sum bit
    for bit.
    """
    config = config or {}
    present = [name for name in ("cuda", "mps", "cpu") if getattr(torch, name).is_available()]
    device_type = device_type or present[0]
    if device_type not in present:
        raise UserError(f"device_type={device_type!r} is not available here; available: {', '.join(present)}")
    _, local_rank, world = get_dist()
    if world > 1 and device_type == "mps":
        raise UserError("several ranks cannot share mps; accepted: one, or --device_type=cpu")
    device = torch.device(device_type)
    if device_type == "cpu":
        keep_freed_memory()
    if device_type == "cuda":
        if local_rank >= torch.cuda.device_count():
            raise UserError(f"local rank {local_rank} has no GPU of its own: {torch.cuda.device_count()} present")
        device = torch.device("cuda", local_rank)
        if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
            # Growing segments fragment less memory
            torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
        if config.get("deterministic"):
            repeat_bits()
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = True  # as cuDNN's is by default
        # NCCL's watchdog ends a rank after `timeout_s` of waiting; by default it tries to dump a trace first
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
    if world > 1:
        if not dist.is_initialized():
            join_ranks(device, timeout_s)
        # "auto" may mean another dtype on another machine
        compare_ranks(config | {"dtype": choose_dtype(config.get("dtype", "auto"), device)})
    return device


def keep_freed_memory() -> None:
    """Have glibc keep freed tensor memory for reuse. By default it goes back to the kernel, which hands it out again
    page by page, zeroed: a tenth of a training step's CPU time. Does nothing without glibc."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option:
        set_option(-4, 0)  # M_MMAP_MAX: no large block gets its own mapping, unmapped when freed
        set_option(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: the heap does not shrink
        set_option(-2, 2**27)  # M_TOP_PAD: grow in large steps


def repeat_bits() -> None:
    """Call before CUDA is used: forbids kernels that sum in order of arrival (the class table's gradient, cuDNN's
    attention), and the choice of kernels by timing."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ["TORCHINDUCTOR_DETERMINISTIC"] = "1"
    torch.use_deterministic_algorithms(True)  # also obeyed by Inductor, flash and efficient attention
    torch.utils.deterministic.fill_uninitialized_memory = False  # a debugger's aid, which costs time
    torch.backends.cuda.enable_cudnn_sdp(False)


def choose_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """The autocast dtype; "auto" = bf16 where that is native, else fp16 on CUDA, fp32 elsewhere."""
    if dtype != "auto":
        return getattr(torch, dtype)
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    # Without AVX512-BF16 a CPU emulates bf16, slower than fp32
    if device.type == "cpu" and torch.cpu._is_avx512_bf16_supported():
        return torch.bfloat16
    return torch.float32


def autocast_to(device: torch.device, dtype: torch.dtype):
    """A reusable context that runs matrix products in `dtype`."""
    if dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=dtype)


@contextlib.contextmanager
def full_float32(device: torch.device):
    """No autocast, and no TF32 on CUDA: TF32 would change a judge's features by a thousandth."""
    cudnn = torch.backends.cudnn
    matmul = torch.backends.cuda.matmul
    past_flags = cudnn.allow_tf32, matmul.allow_tf32
    cudnn.allow_tf32 = matmul.allow_tf32 = False
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        cudnn.allow_tf32, matmul.allow_tf32 = past_flags


def why_not_compiled(device: torch.device) -> str:
    """Why torch.compile cannot work here, or "". What else fails, models/checked.py finds, except with dropout."""
    if device.type == "mps":
        return "torch.compile supports little of MPS"
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        if not has_triton():
            return "Triton is missing, or this GPU is too old for it"
        if not any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))):
            return "Triton needs a C compiler: found none of $CC, cc, gcc, clang"
        header = Path(sysconfig.get_path("include"), "Python.h")
        if not header.exists():
            return f"Triton needs Python's headers: no {header}; on Debian and Ubuntu, apt install python3-dev"
    return ""


def run_uncompiled() -> bool:
    """Run eager code from now on, also where a model was compiled. Returns False if nothing compiled is in use."""
    if "torch._dynamo" not in sys.modules or torch._dynamo.eval_frame._stance.stance == "force_eager":
        return False
    torch.compiler.set_stance("force_eager")
    return True


def to_host(x: Tensor) -> Tensor:
    """A copy in CPU memory. Before reading a copy from a GPU, which is pinned, wait for the GPU, or for an event
    recorded now."""
    return x.detach().to("cpu", non_blocking=x.is_cuda, copy=True)


def host_copy(tensors: Tensors) -> Tensors:
    """Copies in CPU memory. GPU tensors go to pinned memory without waits in between: several times as fast."""
    copies = {name: to_host(x) for name, x in tensors.items()}
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return copies


def free_host_memory() -> None:
    """Return unused pinned memory to the system: torch would keep it, rounded up to powers of two."""
    if torch.cuda.is_available():
        free = getattr(torch._C, "_host_emptyCache", None) or torch.accelerator.empty_host_cache  # public since 2.13
        free()


def synchronize(device: torch.device) -> None:
    """Wait for all queued work, so that a clock can be read."""
    getattr(torch, device.type).synchronize()


def peak_memory_gb(device: torch.device) -> float:
    """Peak GiB allocated on the GPU, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 2**30 if sys.platform == "darwin" else 2**20  # ru_maxrss is in bytes on macOS, in KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


# Dense peak in FLOP/s of products of bf16 (T4, V100: fp16) summed in fp32, the denominator of MFU. From NVIDIA's
# datasheets and, for GeForce, whitepapers (GA102, Ada, RTX Blackwell). The first pattern in the device's name wins; "$"
# leaves out a Ti, D or Laptop GPU, which is faster or slower
PEAK_FLOPS = {
    "GB[23]00": 2.5e15,
    "B[23]00": 2.25e15,
    "H200 NVL": 836e12,
    "H100 NVL": 835e12,
    "H[18]00 PCIe": 756e12,
    "G?H[128]00": 989e12,
    "A[18]00": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "A10": 125e12,
    "V100-SXM2": 125e12,
    "V100-PCIE": 112e12,
    "T4": 65e12,
    "RTX 5090$": 209.5e12,
    "RTX 4090$": 165.2e12,
    "RTX 3090$": 71e12,
}


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Print and return the peak FLOP/s of one device: by the datasheet, or for other devices (CPU, MPS) measured in
    `dtype` with a large matrix product."""
    for key, flops in PEAK_FLOPS.items():
        if re.search(rf"\b{key}\b", device_name(device)):  # whole words: an RTX A1000 is no A100
            peak = flops
            source = "16 bits, by the datasheet"
            break
    else:
        peak = measured_peak(device, dtype)
        source = f"{dtype}, measured".removeprefix("torch.")
    print0(f"peak: {peak / 1e12:.3g} TFLOP/s in {source}; mfu = share of it")
    return peak


def measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Best FLOP/s of five matrix products."""
    n = 1024 if device.type == "cpu" else 4096
    a = torch.randn(n, n, device=device).to(dtype)

    def multiply():
        # a a^T, like a layer's x W^T: without AVX512-FP16 a CPU takes six times as long for a a in fp16
        torch.nn.functional.linear(a, a)
        synchronize(device)

    return 2 * n**3 / min(timeit.repeat(multiply, number=1, repeat=6))  # the first warms up


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({os.cpu_count()} cores, {torch.get_num_threads()} threads)"


def environment(device: torch.device) -> dict:
    """Versions, commit and hardware, for config.json and the report."""
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    commit = ""
    with contextlib.suppress(OSError):  # no git here
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    return {
        "command": sys.argv,
        "commit": commit,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": device_name(device),
        "world_size": get_dist()[2],
    }
