"""The user's own code, found by `module:name`."""

import difflib
import importlib
import sys
from pathlib import Path
from typing import Any

from kit.errors import ConfigError
from trainer.harness.component_config import CustomConfig


def load(name: str) -> Any:
    """The object `module:name`; modules beside the config file or where one stands are found."""
    module_name, _, attribute = name.partition(":")
    if not attribute:
        raise ConfigError(f"`{name}` names no object", hint="Write `module:name`")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # as `python -m` does; a console script does not
    try:
        module = importlib.import_module(module_name)
    except ImportError as exc:
        raise ConfigError(
            f"`{name}` cannot be imported: {exc}",
            hint=f"Run where `{module_name}` can be imported, or install it",
        ) from exc
    found: Any = module
    for part in attribute.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            near = difflib.get_close_matches(part, dir(found), n=1)
            hint = f"Did you mean `{near[0]}`?" if near else "Check the name after the colon"
            raise ConfigError(f"Module `{module_name}` has no `{part}`", hint=hint) from None
    return found


def instance(config: CustomConfig) -> Any:
    """The user's component, made with the arguments that stand beside its `_type`."""
    make = load(config.type)
    try:
        return make(**config.arguments)
    except TypeError as exc:
        raise ConfigError(
            f"`{config.type}` does not take these settings: {exc}",
            hint="Give the arguments of its constructor beside `_type`",
        ) from exc
