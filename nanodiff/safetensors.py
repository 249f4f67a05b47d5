"""Read and write .safetensors files: 8 bytes of header length, a JSON header, then the tensors' bytes, end to end.

Format: https://github.com/huggingface/safetensors#format
"""

import json
import math
import mmap
import os
from pathlib import Path

import torch

from nanodiff.common import UserError
from nanodiff.files import FAULTS, writing

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F16": torch.float16, "BF16": torch.bfloat16, "I16": torch.int16, "U16": torch.uint16, "F32": torch.float32,
    "I32": torch.int32, "U32": torch.uint32, "F64": torch.float64, "I64": torch.int64, "U64": torch.uint64,
}  # fmt: skip
CODES = {dtype: code for code, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000  # the official library's bound


def save_safetensors(tensors: dict[str, torch.Tensor], path: str | Path, metadata: dict[str, str] | None = None):
    """Write named tensors (any device, any strides), one at a time, and string metadata: the whole file or nothing."""
    header = {"__metadata__": metadata} if metadata else {}
    # Widest dtypes first: every tensor starts at a multiple of its item size
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    offset = 0
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in CODES:
            raise UserError(f"{path}: {name!r} is {tensor.dtype}; safetensors files hold {', '.join(DTYPES)}")
        end = offset + tensor.numel() * tensor.itemsize
        header[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with writing(Path(path)) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            flat = tensors[name].detach().cpu().contiguous().flatten()  # a 0-dim tensor has no view as bytes
            file.write(flat.view(torch.uint8).numpy())


def load_safetensors(path: str | Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """(tensors, metadata). The tensors are CPU views of a private memory map: unused ones cost nothing.

    The header's offsets must tile the data from the first byte to the last, and fit the shapes.
    """
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if length > min(size - 8, MAX_HEADER_BYTES):
                raise UserError(f"{path}: a header of {length:,} bytes does not fit in a file of {size:,}")
            text = file.read(length)
            # Copy on write: torch wants writable memory, and the file must not change
            buffer = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    tensors = {}
    begin = 8 + length
    try:
        header = json.loads(text)
        metadata = header.pop("__metadata__", {})
        if not all(isinstance(value, str) for value in metadata.values()):
            raise TypeError("__metadata__ holds a value that is not a string")
        for name, info in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            dtype = DTYPES[info["dtype"]]
            end = begin + math.prod(info["shape"]) * dtype.itemsize
            if info["data_offsets"] != [begin - 8 - length, end - 8 - length] or end > size:
                raise ValueError(f"{name!r} takes bytes {begin:,} to {end:,}: bad data_offsets, or cut at {size:,}")
            data = buffer[begin:end]
            if begin % dtype.itemsize:
                data = bytearray(data)  # unaligned: copy
            flat = torch.frombuffer(data, dtype=dtype) if begin < end else torch.empty(0, dtype=dtype)
            tensors[name] = flat.reshape(info["shape"])
            begin = end
    except FAULTS as error:
        raise UserError(f"{path}: bad safetensors header: {type(error).__name__}: {str(error)[:200]}") from None
    if begin != size:
        raise UserError(f"{path}: {size - begin:,} bytes follow the last tensor")
    return tensors, metadata
