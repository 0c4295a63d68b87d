"""Which engine samples: vLLM where there is a CUDA card and vLLM, else the embedded one.

Looks for both without importing either, since the server holds no torch.
"""

import importlib.util
import os
import sys
from pathlib import Path
from typing import Literal

from kit.errors import ConfigError, NotInstalled
from kit.types import Json
from trainer.config import ServerConfig
from trainer.engines import vllm_args
from trainer.engines.embedded import EmbeddedEngine
from trainer.engines.engine import Engine
from trainer.engines.gpus import assign_gpus, gpus_are_shared, has_cuda
from trainer.engines.vllm import VllmEngine


def with_gpus_assigned(
    config: ServerConfig, directory: Path, asked: Json, *, trains: bool = True
) -> ServerConfig:
    """`config` with the GPUs of engine and learner; `asked` are a client's `engine_args`."""
    return assign_gpus(
        config,
        directory,
        {**vllm_arguments(config), **asked},
        several=engine_kind(config) == "vllm",
        trains=trains,
    )


def create_engine(
    config: ServerConfig, directory: Path, logs: Path, *, trains: bool = True
) -> Engine:
    """Build the engine that `config` selects, without starting it.

    A client's `engine_args` go to its `configure`, before or after the start. `trains` says
    whether a learner runs on this machine too.
    """
    log = logs / "engine.log"
    _check_quantization(config)
    if engine_kind(config) == "embedded":
        if config.engine_args:
            names = ", ".join(f"`{name}`" for name in config.engine_args)
            raise ConfigError(
                f"`engine_args` sets {names}, and this server samples with the embedded engine",
                hint="Remove them, or use `--engine vllm`",
            )
        return EmbeddedEngine(directory, log=log, devices=config.engine_devices)
    return VllmEngine(
        directory,
        program=vllm_program(config.vllm),
        log=log,
        rank=config.lora.rank,
        cuda=has_cuda(),
        arguments=vllm_arguments(config),
        devices=config.engine_devices,
        shared=trains and gpus_are_shared(config),
    )


def vllm_arguments(config: ServerConfig) -> Json:
    """What this server's vLLM is started with, and that of every machine that joins it."""
    return {**vllm_args.quantization(config.quantization), **config.engine_args}


def _check_quantization(config: ServerConfig) -> None:
    if config.quantization is None:
        return
    if engine_kind(config) == "embedded" or not has_cuda():
        raise ConfigError(
            f"`quantization` is `{config.quantization}`, which needs vLLM on a CUDA card",
            hint="Leave it out, or use `--engine vllm` on a GPU machine",
        )
    if "quantization" in config.engine_args:
        raise ConfigError(
            "`quantization` and `engine_args.quantization` are both set",
            hint="Leave the second out: the first one sets engine and learner alike",
        )


def engine_kind(config: ServerConfig) -> Literal["vllm", "embedded"]:
    if config.engine != "auto":
        return config.engine
    return "vllm" if has_cuda() and (config.vllm or _is_installed("vllm")) else "embedded"


def vllm_program(given: str | None) -> list[str]:
    """The command before vLLM's arguments; `given` is a Python, an environment or a `vllm`."""
    if given is None:
        if not _is_installed("vllm"):
            raise NotInstalled(
                "The vLLM engine needs `vllm`, not installed here",
                hint="On a GPU machine `scripts/install --only cluster`, or name the Python "
                "of an environment that has it in `ART_VLLM`, or use `--engine embedded`",
            )
        return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
    path = Path(given).expanduser()
    if path.is_dir():
        path = path / "bin" / "python"
    if not os.access(path, os.X_OK):
        raise NotInstalled(
            f"`ART_VLLM` names `{given}`, and there is no program `{path}`",
            hint="Name the Python of an environment with vLLM, or its `vllm`",
        )
    # Not resolved: a virtual environment's Python is a link, and the link is what makes it one.
    path = path.absolute()
    if path.name.startswith("python"):
        return [str(path), "-m", "vllm.entrypoints.cli.main", "serve"]
    return [str(path), "serve"]


def _is_installed(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None
