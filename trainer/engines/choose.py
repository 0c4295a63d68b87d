"""Choose and build the engine: vLLM if a CUDA GPU and vLLM are found, else the embedded one.

Checks for both without importing torch or vLLM, because the server imports neither.
"""

import asyncio
import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from kit.errors import ConfigError, NotInstalled
from kit.package_data import how_to_install
from kit.types import Json
from trainer.config import ServerConfig
from trainer.engines import vllm_args
from trainer.engines.embedded import EmbeddedEngine
from trainer.engines.engine import Engine
from trainer.engines.gpus import assign_gpus, gpus_are_shared, has_cuda
from trainer.engines.vllm import VllmEngine
from trainer.processes.worker import gpu_environment


def with_gpus_assigned(
    config: ServerConfig, directory: Path, client_args: Json, *, trains: bool = True
) -> ServerConfig:
    """Return `config` with GPUs for engine and learner; `client_args` are a client's."""
    return assign_gpus(
        config,
        directory,
        {**vllm_arguments(config), **client_args},
        multi_gpu_engine=engine_kind(config) == "vllm",
        trains=trains,
    )


def create_engine(
    config: ServerConfig,
    directory: Path,
    logs: Path,
    *,
    trains: bool = True,
    environment: Mapping[str, str] | None = None,
    reserved: asyncio.Event | None = None,
) -> Engine:
    """Build the engine that `config` selects, without starting it.

    Pass a client's `engine_args` to its `configure`, before or after `start`. `trains` is whether
    this machine also runs a learner. `environment` is added to that of the engine's process, and
    `reserved` is set when the engine has all of its GPU memory.
    """
    reserved = reserved or asyncio.Event()
    variables = {**gpu_environment(config.engine_devices), **(environment or {})}
    log = logs / "engine.log"
    _check_quantization(config)
    if engine_kind(config) == "embedded":
        if config.engine_args:
            names = ", ".join(f"`{name}`" for name in config.engine_args)
            raise ConfigError(
                f"`engine_args` sets {names}, but this server uses the embedded engine",
                hint="Remove them, or use `--engine vllm`",
            )
        if config.engine_nodes > 1:
            raise ConfigError(
                f"`engine_nodes` is {config.engine_nodes}, but the engine is the embedded one",
                hint="Only vLLM divides a model over machines: use `--engine vllm`",
            )
        reserved.set()  # it takes what it needs, whatever others have
        return EmbeddedEngine(directory, log=log, environment=variables)
    return VllmEngine(
        directory,
        program=vllm_program(config.vllm),
        log=log,
        rank=config.lora.rank,
        cuda=has_cuda(),
        arguments=vllm_arguments(config),
        devices=config.engine_devices,
        environment=variables,
        reserved=reserved,
        shared=trains and gpus_are_shared(config),
        nodes=config.engine_nodes,
    )


def vllm_arguments(config: ServerConfig) -> Json:
    """Return the vLLM settings of this server and of every machine that joins it."""
    return {**vllm_args.quantization(config.quantization), **config.engine_args}


def _check_quantization(config: ServerConfig) -> None:
    if config.quantization is None:
        return
    if engine_kind(config) == "embedded" or not has_cuda():
        raise ConfigError(
            f"`quantization` is `{config.quantization}`, which needs vLLM on a CUDA GPU",
            hint="Remove it, or use `--engine vllm` on a GPU machine",
        )
    if "quantization" in config.engine_args:
        raise ConfigError(
            "`quantization` and `engine_args.quantization` are both set",
            hint="Remove the second: the first applies to both engine and learner",
        )


def engine_kind(config: ServerConfig) -> Literal["vllm", "embedded"]:
    """Return the engine that `config` selects, with `auto` resolved."""
    if config.engine != "auto":
        return config.engine
    return "vllm" if has_cuda() and (config.vllm or _is_installed("vllm")) else "embedded"


def has_stream_priority(config: ServerConfig, more: Json) -> bool:
    """Return whether this engine loads what gives its streams a priority.

    A user's own extension of vLLM's workers takes the place of ours.
    """
    extension = {**config.engine_args, **more}.get(vllm_args.EXTENSION, vllm_args.KERNELS)
    ours = (vllm_args.KERNELS, vllm_args.WITHOUT_KERNELS)
    return engine_kind(config) == "vllm" and extension in ours


def vllm_program(setting: str | None) -> list[str]:
    """Return the command that starts vLLM, without vLLM's arguments.

    `setting` is the path of a Python, an environment or a `vllm` program; None means this Python.
    """
    if setting is None:
        if not _is_installed("vllm"):
            raise NotInstalled(
                "The vLLM engine needs `vllm`, which is not installed",
                hint=f"{how_to_install('cluster')} on a GPU machine, set `ART_VLLM` to the "
                "Python of an environment that has it, or use `--engine embedded`",
            )
        return [sys.executable, *vllm_args.START]
    path = Path(setting).expanduser()
    if path.is_dir():
        path = path / "bin" / "python"
    if not os.access(path, os.X_OK):
        raise NotInstalled(
            f"`ART_VLLM` is `{setting}`, but there is no program `{path}`",
            hint="Set it to the Python of an environment with vLLM, or to its `vllm`",
        )
    # Do not resolve the link: Python finds its virtual environment by the link's path.
    path = path.absolute()
    if path.name.startswith("python"):
        return [str(path), *vllm_args.START]
    return [str(path), "serve"]


def _is_installed(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None
