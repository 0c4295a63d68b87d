"""Finds a base model by built-in name, directory or hub id. No torch here.

`resolve` returns a directory in Hugging Face form. Built-in models are created once in a cache
(`ART_CACHE`, by default `~/.cache/art-cluster`), in a temporary directory that is renamed when
complete. Two processes may therefore race, and a killed one leaves no incomplete model.
"""

import logging
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from trainer.base_model import smollm2, tiny_random
from trainer.base_model.architecture import read_architecture
from trainer.base_model.weight_files import check_weights
from trainer.errors import ModelError

logger = logging.getLogger(__name__)

TINY = "tiny-random"
# Increased when the contents of a built-in model change, so that no stale copy is used.
VERSION = "2"
BUILT_IN: dict[str, Callable[[Path], None]] = {TINY: tiny_random.write, smollm2.NAME: smollm2.write}


def resolve(name: str) -> Path:
    """Return the directory of the base model `name`, after checking that we can load it."""
    directory = _find(name)
    architecture = read_architecture(directory)
    if not list(directory.glob("*.safetensors")):
        raise ModelError(
            f"`{directory}` has no `*.safetensors`", hint="Convert the weights to safetensors"
        )
    if not (directory / "tokenizer.json").is_file():
        raise ModelError(
            f"`{directory}` has no `tokenizer.json`",
            hint="Save the model with its fast tokenizer",
        )
    check_weights(directory, architecture)
    return directory


def cache_directory() -> Path:
    return Path(os.environ.get("ART_CACHE") or Path.home() / ".cache" / "art-cluster")


def _find(name: str) -> Path:
    if name == TINY:
        return _make(name)
    if Path(name).is_dir():
        return Path(name).resolve()
    if name == smollm2.NAME and smollm2.is_installed() and not _in_hub_cache(name):
        return _make(name)
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelError(
            f"There is no model directory `{name}`", hint="Check the path, or use a hub id"
        )
    return _from_hub(name)


def _make(name: str) -> Path:
    """Create a built-in model unless the cache already has it."""
    target = cache_directory() / "models" / f"{name.replace('/', '--')}-{VERSION}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        logger.info("creating `%s` in %s", name, target)
        BUILT_IN[name](temporary)
        temporary.chmod(0o755)
        try:
            temporary.rename(target)
        except OSError:
            # Another process was faster; its copy is the same.
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _in_hub_cache(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, "model.safetensors"), str)


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.jinja"]
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (RepositoryNotFoundError, HFValidationError) as exc:
        raise ModelError(
            f"The hub has no model `{name}`, or it is gated",
            hint="Check the name, and set `HF_TOKEN` for a gated model",
        ) from exc
    except Exception as exc:  # the hub raises its own errors, httpx's and plain OSErrors
        hint = "Use a directory with the model, or check the network and `HF_HUB_OFFLINE`"
        if name == smollm2.NAME:
            hint = f"{smollm2.INSTALL}, or check the network"
        raise ModelError(
            f"The model `{name}` cannot be downloaded from the hub: {type(exc).__name__}", hint=hint
        ) from exc
