"""Writes a safetensors file and hashes it at the same time, because training waits for it.

The format is a length, a JSON header and the bytes of the tensors; `safetensors` can read it.
"""

import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

TYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
}


def write_tensors(tensors: Mapping[str, Tensor], path: Path) -> str:
    """Write CPU tensors to `path` and return the sha256 of the file."""
    # The widest types come first, so that every tensor is aligned to its element size.
    ranked = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in ranked:
        end = at + tensor.nbytes
        entry = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape)}
        header[name] = {**entry, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    parts: list[bytes | memoryview] = [len(text).to_bytes(8, "little") + text]
    parts += [tensor.reshape(-1).view(torch.uint8).numpy().data for _, tensor in ranked]
    digest = hashlib.sha256()
    with ThreadPoolExecutor(1) as pool, path.open("wb") as file:
        hashing = pool.submit(lambda: list(map(digest.update, parts)))
        for part in parts:
            file.write(part)
        hashing.result()
    return digest.hexdigest()
