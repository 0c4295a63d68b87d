"""A safetensors file that is hashed while it is written: everybody waits for a checkpoint.

The format is a length, a header in JSON and the bytes of the tensors: `safetensors` reads it.
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
    """Write tensors that are on the CPU; returns the sha256 of the file."""
    # The widest numbers first, so that all of them lie where their width wants it.
    ranked = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in ranked:
        end = at + tensor.nbytes
        about = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape)}
        header[name] = {**about, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    parts: list[bytes | memoryview] = [len(text).to_bytes(8, "little") + text]
    parts += [tensor.reshape(-1).view(torch.uint8).numpy().data for _, tensor in ranked]
    digest = hashlib.sha256()
    with ThreadPoolExecutor(1) as beside, path.open("wb") as file:
        hashing = beside.submit(lambda: list(map(digest.update, parts)))
        for part in parts:
            file.write(part)
        hashing.result()
    return digest.hexdigest()
