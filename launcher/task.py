"""`Task`: a task YAML with its envs, secrets and lease filled in from the user's settings."""

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kit.config import MAX_FAULTS
from kit.errors import plural
from kit.settings import read_env_file, variables
from kit.state_dir import STATE_DIR
from kit.yaml_files import Location, read_yaml, shortened
from launcher.errors import TaskError
from launcher.lease import AUTOSTOP, DEFAULTS, Lease
from launcher.settings import OPTIONAL_SECRETS, Settings, generate_key

# The keys of a SkyPilot YAML that `sky launch` uses.
KEYS: dict[str, type | tuple[type, ...]] = {
    "name": str,
    "workdir": (str, dict),
    "num_nodes": int,
    "resources": dict,
    "file_mounts": dict,
    "volumes": dict,
    "config": dict,
    "envs": dict,
    "secrets": (dict, list),
    "setup": str,
    "run": str,
}
# Other keys of a SkyPilot YAML, and why a task cannot have them.
_UNUSABLE_KEYS = {
    "experimental": "SkyPilot has renamed it to `config`",
    "service": "`sky launch` would ignore it",
    "pool": "`sky launch` would ignore it",
}

_NUMBERS = {
    "max_hours": "a number of hours, such as 0.5; 0 is no limit",
    "idle_minutes": "a number of minutes, such as 30; 0 is no limit",
    "port": "a port from 1 to 65535",
    "openai_port": "a port from 1 to 65535",
}


@dataclass(frozen=True)
class Task:
    """A program to set up and run on a cluster."""

    path: Path
    config: Mapping[str, Any]
    """The content of the YAML, without the values of secrets."""
    envs: Mapping[str, str]
    secrets: Mapping[str, str] = field(repr=False)
    max_cost: float | None = None
    """Limit in US dollars, in addition to the hours in `envs`."""

    @classmethod
    def load(
        cls,
        path: Path,
        settings: Settings,
        *,
        env_file: Path | None = None,
        envs: Mapping[str, str] | None = None,
        lease: Lease | None = None,
    ) -> "Task":
        """Read `path` and fill in its envs, secrets and lease. `envs` override the settings.

        As with `sky launch`, all of `env_file` is sent. A variable that is neither a setting nor
        an env of the task is treated as a secret, because it may be one.
        """
        lease = lease or Lease()
        config, lines = read_yaml(path)
        _check(path, config, lines)
        own, sent = config.get("envs") or {}, _other_variables(env_file)
        values = {
            **DEFAULTS,
            "ART_PORT": settings.port,
            "ART_OPENAI_PORT": settings.openai_port,
            **own,
            **{name: text for name, text in sent.items() if name in own},
            **settings.envs(),
            **lease.envs(settings),
            **(envs or {}),
        }
        _require_values(path, values)
        if settings.bucket:
            config["file_mounts"] = {
                **(config.get("file_mounts") or {}),
                f"~/sky_workdir/{STATE_DIR}": {"source": settings.bucket, "mode": "MOUNT_CACHED"},
            }
            values["ART_BUCKET"] = settings.bucket  # the server reports what is safe there
        if not requests_resource(config, "autostop"):
            # Without it nothing would tear the cluster down after its server has exited.
            config["resources"] = {**(config.get("resources") or {}), "autostop": AUTOSTOP}
        unnamed = {name: text for name, text in sent.items() if name not in values}
        secrets = unnamed | _secrets(path, config, settings, env_file)
        if int(config.get("num_nodes") or 1) > 1 and "ART_API_KEY" in (config.get("secrets") or {}):
            # The machines of a cluster authenticate to each other with it; users need not know it.
            secrets.setdefault("ART_API_KEY", generate_key())
        config["secrets"] = dict.fromkeys(secrets)
        texts = {name: str(value) for name, value in values.items()}
        _check_numbers(path, texts)
        return cls(path, config, texts, secrets, lease.max_cost)

    @property
    def name(self) -> str:
        return str(self.config.get("name") or self.path.stem)

    @property
    def ports(self) -> tuple[int, int]:
        """Ports of the control API and the OpenAI API on the cluster."""
        return int(self.envs["ART_PORT"]), int(self.envs["ART_OPENAI_PORT"])


def requests_resource(config: Mapping[str, Any], key: str) -> bool:
    """Whether the `resources` of a task, or one of their alternatives, have `key`."""
    resources = config.get("resources") or {}
    choices = [*(resources.get("ordered") or []), *(resources.get("any_of") or [])]
    return any(key in choice for choice in (resources, *choices))


def _check(path: Path, config: Mapping[str, Any], lines: Mapping[Location, int]) -> None:
    faults = []
    for key, value in config.items():
        at = f"line {lines[(key,)]}: " if (key,) in lines else ""
        if key in _UNUSABLE_KEYS:
            faults.append(f"{at}`{key}` cannot be used: {_UNUSABLE_KEYS[key]}")
        elif key not in KEYS:
            near = difflib.get_close_matches(str(key)[:100], KEYS, n=1)
            faults.append(
                f"{at}`{shortened(str(key))}` is not a key of a task"
                + (f", did you mean `{near[0]}`?" if near else "")
            )
        elif value is not None and not isinstance(value, KEYS[key]):
            faults.append(f"{at}`{key}` cannot be `{shortened(repr(value))}`")
        elif key == "resources":
            faults += [f"{at}{fault}" for fault in _check_choices(config[key] or {})]
        elif key == "secrets" and not all(isinstance(name, str) for name in config[key] or ()):
            faults.append(f"{at}`secrets` must be `NAME: null` lines, or a list of names")
    if not config.get("run"):
        faults.append("`run` is required")
    if faults:
        told = faults[:MAX_FAULTS] + ["…"] * (len(faults) > MAX_FAULTS)
        raise TaskError(f"`{path}` has {plural(len(faults), 'fault')}: " + "; ".join(told))


def _require_values(path: Path, envs: Mapping[str, Any]) -> None:
    if missing := [name for name, value in envs.items() if value is None]:
        raise TaskError(
            f"`{path}` needs a value for `{missing[0]}`",
            hint=f"Set it in the YAML, or with `--env {missing[0]}=VALUE`",
        )


def secret_values(
    names: Iterable[str], settings: Settings, env_file: Path | None = None
) -> dict[str, str]:
    """The values of `names` that are set in the settings, the environment or the env file."""
    values = {**read_env_file(env_file), **os.environ, **settings.secrets()}
    return {name: values[name] for name in names if values.get(name)}


def _check_choices(resources: Mapping[str, Any]) -> list[str]:
    """Faults in the alternatives that a launch may choose from."""
    alternatives = {key: resources.get(key) or [] for key in ("ordered", "any_of")}
    return [
        f"`{key}` must be a list of resources, such as `- {{accelerators: H100:1}}`"
        for key, choices in alternatives.items()
        if not (isinstance(choices, list) and all(isinstance(it, dict) for it in choices))
    ]


def _check_numbers(path: Path, envs: Mapping[str, str]) -> None:
    """Check the envs that are numbers against the bounds of the launcher's settings."""
    names = variables(Settings)
    for number, expected in _NUMBERS.items():
        try:
            Settings.model_validate({number: envs[names[number]]})
        except ValidationError as exc:
            raise TaskError(
                f"`{path}` cannot have `{shortened(envs[names[number]])}` as `{names[number]}`",
                hint=f"Give {expected}",
            ) from exc


def _other_variables(env_file: Path | None) -> dict[str, str]:
    """The variables of `env_file` that are not settings of the launcher."""
    if env_file is None:
        return {}
    settings = variables(Settings).values()
    return {name: text for name, text in read_env_file(env_file).items() if name not in settings}


def _secrets(
    path: Path, config: Mapping[str, Any], settings: Settings, env_file: Path | None
) -> dict[str, str]:
    """The values of the secrets that the task declares. All but `OPTIONAL_SECRETS` must be set."""
    declared = config.get("secrets") or {}
    if isinstance(declared, list):
        declared = dict.fromkeys(declared)
    if written := [name for name, value in declared.items() if value is not None]:
        raise TaskError(
            f"`{path}` contains the value of the secret `{written[0]}`",
            hint=f"Write `{written[0]}: null` there, and put the value into `.env`",
        )
    values = secret_values(declared, settings, env_file)
    if missing := [name for name in declared if name not in {*values, *OPTIONAL_SECRETS}]:
        raise TaskError(
            f"`{path}` needs the secret `{missing[0]}`",
            hint=f"Set `{missing[0]}` in `.env` or in the environment",
        )
    return values
