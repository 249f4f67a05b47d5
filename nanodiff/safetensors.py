"""Read and write .safetensors files: 8 bytes of header length, a JSON header, then the tensors' bytes, end to end.

Format: https://github.com/huggingface/safetensors#format
"""

import hashlib
import json
import mmap
import re
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nanodiff.common import Tensors, UserError
from nanodiff.files import known_fields, load_tensors, reading, writing

# All of the format's but those below 8 bits, which torch stores otherwise
TABLE = """
    BOOL=bool U8=uint8 U16=uint16 U32=uint32 U64=uint64 I8=int8 I16=int16 I32=int32 I64=int64
    F16=float16 BF16=bfloat16 F32=float32 F64=float64 C64=complex64
    F8_E4M3=float8_e4m3fn F8_E5M2=float8_e5m2 F8_E8M0=float8_e8m0fnu
    F8_E4M3FNUZ=float8_e4m3fnuz F8_E5M2FNUZ=float8_e5m2fnuz
    """
DTYPES = {code: getattr(torch, name) for code, name in re.findall(r"(\w+)=(\w+)", TABLE)}
CODES = {dtype: code for code, dtype in DTYPES.items()}


DESCRIPTION = "step ema arch config model_config data lora sha256".split()


def described(meta: dict) -> dict[str, str]:
    """The metadata by which a file of weights (a checkpoint's, an export, adapters) describes itself."""
    texts = {key: json.dumps(meta[key], default=known_fields) for key in DESCRIPTION if key in meta}
    return {"format": "pt"} | texts


def fingerprint(tensors: Tensors) -> str:
    """SHA-256 of names, shapes, dtypes and values. A file describes itself by that of its tensors in fp32."""
    digest = hashlib.sha256()
    for name, x in sorted(tensors.items()):
        digest.update(f"{name} {tuple(x.shape)} {x.dtype}\n".encode())
        digest.update(as_bytes(x))
    return digest.hexdigest()


def as_bytes(tensor: Tensor) -> np.ndarray:
    # ravel, which is contiguous: a 0-dim tensor has no view as bytes
    return tensor.detach().cpu().ravel().view(torch.uint8).numpy()


def save_safetensors(
    tensors: Tensors,
    path: str | Path,
    metadata: dict[str, str] | None = None,
    manifest: dict | None = None,
):
    """Write named tensors (any device, any strides) and string metadata: the whole file or none.

    Tensors are copied to the CPU one at a time. `manifest` gets the file's size and hash.
    """
    header = {"__metadata__": metadata or {}}
    # Widest dtypes first, so that every tensor starts at a multiple of its item size
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    begin = 0
    for name in names:
        tensor = tensors[name]
        end = begin + tensor.nbytes
        header[name] = {"dtype": CODES[tensor.dtype], "shape": tensor.shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % 64)  # on some CPUs a product's rounding depends on its factors' alignment
    with writing(Path(path), manifest) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            file.write(as_bytes(tensors[name]))


def load_safetensors(path: str | Path) -> tuple[Tensors, dict[str, str]]:
    """(tensors, metadata). The tensors are CPU views of a private memory map: unused tensors cost nothing."""
    tensors = {}
    with reading(path, "cannot be read as .safetensors"), open(path, "rb") as file:
        # Copy on write: torch wants writable memory, and the file must not change
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        content = torch.frombuffer(data, dtype=torch.uint8)
        start = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:start])
        metadata = header.pop("__metadata__", None) or {}
        num_bytes = max([0, *(info["data_offsets"][1] for info in header.values())])
        if start + num_bytes != len(data):
            raise ValueError("its length is not what its header says")
        for name, info in header.items():
            dtype = DTYPES[info["dtype"]]
            begin, end = info["data_offsets"]
            part = content[start + begin : start + end]
            if (start + begin) % dtype.itemsize:
                part = part.clone()  # unaligned
            tensors[name] = part.view(dtype).reshape(info["shape"])
    return tensors, metadata


def read_tensors(path: Path) -> tuple[Tensors, dict]:
    """(tensors, metadata) of a .safetensors file, whatever its suffix, or (tensors, {}) of a file by torch.save."""
    if path.suffix == ".json":
        raise UserError(f"{path} holds no weights; if it is an index of shards, join them: only whole files are read")
    with open(path, "rb") as file:
        start = file.read(9)
    if start[8:] == b"{":  # behind the header's length; never so in a zip or a pickle
        return load_safetensors(path)
    return load_tensors(path), {}
