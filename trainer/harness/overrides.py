"""`-o NAME VALUE`: replaces one value of a config file before it is checked."""

from typing import Any

import yaml

from kit.errors import ConfigError
from kit.yaml_files import Location


def override(data: dict[str, Any], lines: dict[Location, int], name: str, text: str) -> None:
    """Set one value by its dotted path, such as `finetuning.num_epochs`. The text is YAML."""
    *parents, leaf = name.split(".")
    section: Any = data
    place: Location = ()
    for part in parents:
        place = (*place, part)
        lines.setdefault(place, 0)
        section = section.setdefault(part, {})
        if not isinstance(section, dict):
            raise ConfigError(
                f"Cannot set `-o {name}`: `{'.'.join(map(str, place))}` has no settings",
                hint="Give the setting's path in the file, such as `finetuning.num_epochs`",
            )
    try:
        section[leaf] = _parse_value(text)
    except yaml.YAMLError as exc:
        raise ConfigError(
            f"`-o {name} {text}`: the value is not valid YAML",
            hint="Write the value as in the config file",
        ) from exc
    lines[(*place, leaf)] = 0


def _parse_value(text: str) -> Any:
    """Parse a value as the config file does. PyYAML by itself reads `1e-6` as a string."""
    try:
        return float(text) if not text.lstrip("+-").isdigit() else int(text)
    except ValueError:
        return yaml.safe_load(text)
