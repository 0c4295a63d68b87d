"""The learner's own writer of safetensors files."""

import hashlib
from pathlib import Path

import torch
from safetensors.torch import load_file

from trainer.learner.tensor_file import TYPES, write_tensors


def test_safetensors_reads_the_tensors_that_were_written(tmp_path: Path) -> None:
    tensors = {f"a.{kind}": torch.arange(6).view(2, 3).to(kind) for kind in TYPES}
    tensors |= {"odd": torch.arange(5, dtype=torch.uint8), "one": torch.tensor(7.0)}
    tensors["none"] = torch.zeros(0, 4)
    path = tmp_path / "file.safetensors"
    digest = write_tensors(tensors, path)
    assert digest == hashlib.sha256(path.read_bytes()).hexdigest()
    found = load_file(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
