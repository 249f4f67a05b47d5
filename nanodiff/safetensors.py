"""Read and write .safetensors files: 8 bytes of header length, a JSON header, then the tensors' bytes, end to end.

The format is https://github.com/huggingface/safetensors#format. A file may come from anywhere, so nothing in it is
trusted: the header is checked whole before a tensor is made, and any fault is one UserError.
"""

import json
import math
import mmap
import os
import tempfile
from pathlib import Path

import torch

from nanodiff.common import UserError

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2, "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F16": torch.float16, "BF16": torch.bfloat16, "I16": torch.int16, "U16": torch.uint16, "F32": torch.float32,
    "I32": torch.int32, "U32": torch.uint32, "F64": torch.float64, "I64": torch.int64, "U64": torch.uint64,
}  # fmt: skip
CODES = {dtype: code for code, dtype in DTYPES.items()}
MAX_HEADER_BYTES = 100_000_000  # the official library's bound
MAX_DIMS = 64  # torch's own bound


def save_safetensors(tensors: dict[str, torch.Tensor], path: str | Path, metadata: dict[str, str] | None = None):
    """Write named tensors (any device, any strides) and string metadata to `path`, the whole file or nothing.

    One tensor at a time goes through host memory. Tensors that share storage are written once each. Raises UserError
    for a dtype that the format lacks.
    """
    path, metadata = Path(path), dict(metadata or {})
    assert all(isinstance(s, str) for item in metadata.items() for s in item), "metadata maps strings to strings"
    assert all(isinstance(name, str) and name != "__metadata__" for name in tensors), list(tensors)
    for name, tensor in tensors.items():
        if tensor.dtype not in CODES:
            raise UserError(f"{path}: {name!r} is {tensor.dtype}; safetensors files hold {', '.join(DTYPES)}")
    # Widest dtypes first: every tensor then starts at a multiple of its item size.
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    header, offset = {"__metadata__": metadata} if metadata else {}, 0
    for name in names:
        tensor = tensors[name]
        end = offset + tensor.numel() * tensor.itemsize
        header[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise UserError(f"{path}: the header would take {len(text):,} bytes; at most {MAX_HEADER_BYTES:,} are allowed")

    # As common.write_atomic, but streamed: a checkpoint may not fit in host memory twice.
    fd, tmp = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(fd, "wb") as f:
            f.write(len(text).to_bytes(8, "little") + text)
            for name in names:
                # flatten first: a 0-dim tensor cannot be viewed as bytes
                f.write(tensors[name].detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
            f.flush()
            os.fsync(f.fileno())
        os.chmod(tmp, 0o644)
        os.replace(tmp, path)
    except BaseException:
        os.unlink(tmp)
        raise


def load_safetensors(path: str | Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """(tensors, metadata) of a file; the tensors are CPU views of a private memory map, so unused ones cost nothing.

    They may be written to: the file never changes. Raises UserError, one line, for a file that cannot be read or that
    breaks the format in any way (see `parse_header`).
    """
    try:
        with open(path, "rb") as f:
            size = os.fstat(f.fileno()).st_size
            length = int.from_bytes(f.read(8), "little")
            if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
                raise UserError(f"{path}: a header of {length:,} bytes does not fit in a file of {size:,}")
            entries, metadata = parse_header(f.read(length), size - 8 - length, path)
            # Copy on write: torch wants memory that it may write to, and the file must not feel it.
            buffer = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None

    tensors = {}
    for name, (dtype, shape, begin, end) in entries.items():
        if begin == end:
            tensors[name] = torch.empty(shape, dtype=dtype)
            continue
        start = 8 + length + begin
        # A foreign writer may not have aligned its tensors; such a one is copied.
        aligned = start % dtype.itemsize == 0
        source, offset = (buffer, start) if aligned else (bytearray(buffer[start : 8 + length + end]), 0)
        flat = torch.frombuffer(source, dtype=dtype, count=(end - begin) // dtype.itemsize, offset=offset)
        tensors[name] = flat.reshape(shape)
    return tensors, metadata


def parse_header(text: bytes, buffer_bytes: int, path: str | Path) -> tuple[dict, dict[str, str]]:
    """Check a header against the `buffer_bytes` that follow it; ({name: (dtype, shape, begin, end)}, metadata).

    UserError unless: it is a JSON object without duplicate names, every tensor has a known dtype, a shape of
    non-negative ints and offsets that span exactly numel * itemsize, and all of them together tile the buffer from its
    first byte to its last without a hole or an overlap.
    """

    def check(condition, fault, name=None):
        if not condition:
            raise UserError(f"{path}: {fault if name is None else f'tensor {name[:200]!r} {fault}'}")

    def unique(pairs):
        names = set()
        for name, _ in pairs:
            check(name not in names, f"duplicate name {name[:200]!r} in the header")
            names.add(name)
        return dict(pairs)

    try:
        check(text[:1] == b"{", "the header is not a JSON object")
        header = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except UserError:
        raise
    except (ValueError, RecursionError):  # not UTF-8, not JSON, or nested without end
        raise UserError(f"{path}: the header is not a JSON object") from None

    metadata = header.pop("__metadata__", {})
    check(isinstance(metadata, dict), "__metadata__ is not an object")
    check(all(isinstance(value, str) for value in metadata.values()), "__metadata__ has a value that is not a string")

    entries = {}
    for name, info in header.items():
        keys = {"dtype", "shape", "data_offsets"}
        check(isinstance(info, dict) and info.keys() == keys, "needs dtype, shape, data_offsets and nothing else", name)
        code, shape, offsets = info["dtype"], info["shape"], info["data_offsets"]
        check(
            isinstance(code, str) and code in DTYPES, f"has dtype {str(code)[:40]!r}; known: {', '.join(DTYPES)}", name
        )
        check(is_sizes(shape) and len(shape) <= MAX_DIMS, "has a shape that is not a list of sizes >= 0", name)
        # Zeros counted as ones: torch multiplies the other sizes even where the tensor is empty.
        check(math.prod(max(n, 1) for n in shape) < 2**60, "has a shape of more than 2^60 elements", name)
        check(is_sizes(offsets) and len(offsets) == 2, "has data_offsets that are not two sizes >= 0", name)
        dtype, (begin, end) = DTYPES[code], offsets
        need = math.prod(shape) * dtype.itemsize
        check(end - begin == need, f"spans {end - begin:,} bytes; {code} of shape {shape} takes {need:,}", name)
        entries[name] = (dtype, shape, begin, end)

    position = 0
    for name, (_, _, begin, end) in sorted(entries.items(), key=lambda item: item[1][2:]):
        fault = "overlaps its neighbour" if begin < position else "leaves a hole before it"
        check(begin == position, f"{fault}: begins at byte {begin:,}, not {position:,}", name)
        position = end
    check(position == buffer_bytes, f"{buffer_bytes:,} bytes of data follow the header, which describes {position:,}")
    return entries, metadata


def is_sizes(value) -> bool:
    """Whether a JSON value is a list of ints in [0, 2^63); `true` is no int here."""
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)
