"""Writes an export: the weights in one of four forms, a model card and a manifest.

It is written to a temporary directory and then renamed. Its `manifest.json` names the checkpoint
and the sha256 of every file.
"""

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kit.manifest import damage, read_manifest, write_manifest
from kit.version import version
from trainer import checkpoint
from trainer.base_model.architecture import read_architecture
from trainer.base_model.resolve import resolve
from trainer.errors import Conflict, storage_faults
from trainer.export import gguf_files
from trainer.export.card import public_name, write_card
from trainer.export.gguf_tokenizer import adds_bos
from trainer.export.merge import lora_tensors, merged, write_lora, write_merged
from trainer.export.modelfile import write_modelfile
from trainer.learner.state import ADAPTER, FULL


@dataclass(frozen=True)
class Form:
    """What is written: by default the merged model, in Hugging Face's form."""

    lora: bool = False
    """The LoRA alone."""
    gguf: str | None = None
    """One of `gguf_files.TYPES`."""
    dtype: str | None = None
    """`float32`, `bfloat16` (the default) or `float16`, of a merged Hugging Face model."""


def export(
    checkpoint_path: Path,
    output: Path,
    *,
    base_model: str | None = None,
    form: Form | None = None,
    reuse: bool = False,
) -> Path:
    """Write the model of a checkpoint to the new directory `output`, and return it.

    `base_model` defaults to the name in the checkpoint; give a directory if, for example, another
    machine trained it from a hub id. LoRA and weights are added in fp32 and rounded once. With
    `reuse`, an undamaged export of the same checkpoint in the same form is left as it is.
    """
    form = form or Form()
    manifest = checkpoint.verify(checkpoint_path)
    directory = resolve(base_model or manifest["base_model"])
    about = _about(manifest, form)
    if output.exists():
        if reuse and _is_export_of(output, about):
            return output
        raise Conflict(f"`{output}` already exists", hint="Choose a new directory")
    if form.gguf:
        gguf_files.check(form.gguf, read_architecture(directory), lora=form.lora)
    with storage_faults():
        output.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
        try:
            _write(directory, checkpoint_path, temporary, output.name, form)
            write_card(temporary, output.name, checkpoint_path, manifest, directory, lora=form.lora)
            write_manifest(temporary, about)
            temporary.chmod(0o755)
            temporary.rename(output)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    return output


def _write(directory: Path, checkpoint_path: Path, output: Path, name: str, form: Form) -> None:
    if form.gguf is None:
        if form.lora:
            write_lora(directory, checkpoint_path, output)
        else:
            write_merged(directory, checkpoint_path, output, form.dtype or "bfloat16")
        return
    architecture = read_architecture(directory)
    if form.lora:
        file = output / f"{name}-LoRA-{form.gguf.upper()}.gguf"
        tensors = lora_tensors(checkpoint_path)
        gguf_files.write_lora(
            file, tensors, architecture, checkpoint_path, kind=form.gguf, name=name
        )
        return
    file = output / f"{name}-{form.gguf.upper()}.gguf"
    weights = merged(directory, checkpoint_path)
    gguf_files.write_model(file, weights, architecture, directory, kind=form.gguf, name=name)
    write_modelfile(output / "Modelfile", file.name, directory, adds_bos=adds_bos(directory))


def _about(manifest: dict[str, Any], form: Form) -> dict[str, Any]:
    """What an export is of; two with the same are interchangeable."""
    files = manifest["files"]
    weights = files.get(ADAPTER) or files[FULL]
    return {
        "checkpoint": {
            "base_model": public_name(manifest["base_model"]),
            **{key: manifest.get(key) for key in ("step", "parent")},
            "sha256": weights["sha256"],
        },
        "form": vars(form),
        "version": version(),
    }


def _is_export_of(directory: Path, about: dict[str, Any]) -> bool:
    found = read_manifest(directory) or {}
    return all(found.get(key) == value for key, value in about.items()) and not damage(directory)
