"""Loads the environment that a config names.

Up to `verifiers` 0.3 an environment is a module with `load_environment`. From 0.2 on it may also be
a taskset, and 0.4 has only these.
"""

import importlib
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from kit.errors import ConfigError, NotInstalled
from trainer.harness.environments.environment import Environment
from trainer.harness.environments.gymnasium import GymnasiumEnvironment
from trainer.harness.environments.verifiers import ClassicEnvironment, cannot_load
from trainer.harness.environments.verifiers_tasksets import TasksetEnvironment
from trainer.harness.user_code import within
from trainer.harness.user_texts import error_text
from trainer.harness.workflow_config import GymnasiumConfig, VerifiersConfig

logger = logging.getLogger(__name__)
CLOSE_WITHIN = 60.0  # seconds


@asynccontextmanager
async def opened(config: object) -> AsyncIterator[Environment | None]:
    """Load the environment that a workflow's config names, if any, and close it at the end.

    Its own code may fail or hang as it closes, but what it was opened for is done.
    """
    environment = load_environment(config)
    try:
        yield environment
    finally:
        if environment is not None:
            try:
                await within(CLOSE_WITHIN, environment.close())
            except Exception as error:
                logger.warning("The environment did not close: %s", error_text(error))


def load_environment(config: object) -> Environment | None:
    """Load the environment that a workflow's config names; None if it names none."""
    match config:
        case VerifiersConfig():
            return load_verifiers(config)
        case GymnasiumConfig():
            return GymnasiumEnvironment(config)
    return None


def load_verifiers(config: VerifiersConfig) -> Environment:
    """Load the environment: a module with `load_environment`, or a taskset."""
    try:
        verifiers: Any = importlib.import_module("verifiers")
    except ImportError as exc:
        raise NotInstalled(
            f"The workflow `verifiers` needs the package `verifiers`: {exc}",
            hint="Install it beside the agent with `pip install 'art-cluster[verifiers]'`",
        ) from exc
    directory = str(Path.cwd())
    if directory not in sys.path:
        sys.path.insert(0, directory)  # `python -m` does this, but a console script does not
    name = config.env.rsplit("/", 1)[-1].split("@", 1)[0].replace("-", "_")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as exc:
        if exc.name != name:
            raise ConfigError(
                f"The environment `{config.env}` cannot be imported: {exc}",
                hint=f"Install `{exc.name}`",
            ) from exc
        module = None  # a taskset that ships with `verifiers`
    if not hasattr(module, "load_environment"):
        return TasksetEnvironment(config)
    try:
        load = verifiers.load_environment
    except (AttributeError, ImportError):
        raise ConfigError(
            f"The environment `{config.env}` needs `verifiers` 0.3 or older, but "
            f"`{verifiers.__version__}` is installed",
            hint="Install it with `pip install 'verifiers<0.4'`",
        ) from None
    try:
        return ClassicEnvironment(config, load(config.env, **config.args))
    except Exception as exc:  # any error of the environment's own code
        raise cannot_load(config, exc) from exc
