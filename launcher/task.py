"""`Task`: one YAML of `sky/`, with the envs and secrets that the user's settings give it."""

import difflib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kit.config import Location, read_yaml
from kit.settings import read_env_file, variables
from kit.state_dir import STATE_DIR
from launcher.errors import TaskError
from launcher.lease import AUTOSTOP, DEFAULTS, Lease
from launcher.settings import OPTIONAL_SECRETS, Settings, generate_key

# Of SkyPilot's keys those that `sky launch` acts on.
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
# And those that people know from elsewhere, with why they cannot be here.
_ELSEWHERE = {
    "experimental": "SkyPilot knows it as `config` now",
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
    """What to set up and run on a cluster. `config` is the YAML's mapping, without any secret."""

    path: Path
    config: Mapping[str, Any]
    envs: Mapping[str, str]
    secrets: Mapping[str, str] = field(repr=False)
    max_cost: float | None = None
    """US dollars that the cluster may cost, besides the hours in `envs`."""

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
        """Read `path` and fill in its envs, secrets and lease; `envs` win over the settings.

        An `env_file` that is named goes along whole, as with `sky launch`: what is neither a
        setting nor an env of the task travels as a secret, since nobody can tell what it is.
        """
        lease = lease or Lease()
        config, lines = read_yaml(path)
        _check(path, config, lines)
        own, sent = config.get("envs") or {}, _sent(env_file)
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
        if missing := [name for name, value in values.items() if value is None]:
            raise TaskError(
                f"`{path}` needs a value for `{missing[0]}`",
                hint=f"Give it in the YAML, or with `--env {missing[0]}=VALUE`",
            )
        if settings.bucket:
            config["file_mounts"] = {
                **(config.get("file_mounts") or {}),
                f"~/sky_workdir/{STATE_DIR}": {"source": settings.bucket, "mode": "MOUNT_CACHED"},
            }
            values["ART_BUCKET"] = settings.bucket  # the server tells what is safe there
        if "autostop" not in json.dumps(config.get("resources")):
            # Without one nothing would tear the cluster down once its server has exited.
            config["resources"] = {**(config.get("resources") or {}), "autostop": AUTOSTOP}
        unnamed = {name: text for name, text in sent.items() if name not in values}
        secrets = unnamed | _secrets(path, config, settings, env_file)
        if int(config.get("num_nodes") or 1) > 1 and "ART_API_KEY" in (config.get("secrets") or {}):
            # The machines of a cluster know each other by it; nobody else needs to.
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
        """Where its server listens on the cluster: the control API and the OpenAI API."""
        return int(self.envs["ART_PORT"]), int(self.envs["ART_OPENAI_PORT"])


def _check(path: Path, config: Mapping[str, Any], lines: Mapping[Location, int]) -> None:
    faults = []
    for key, value in config.items():
        at = f"line {lines[(key,)]}: " if (key,) in lines else ""
        if key in _ELSEWHERE:
            faults.append(f"{at}`{key}` cannot be used: {_ELSEWHERE[key]}")
        elif key not in KEYS:
            near = difflib.get_close_matches(str(key), KEYS, n=1)
            faults.append(
                f"{at}`{key}` is not a key of a task"
                + (f", did you mean `{near[0]}`?" if near else "")
            )
        elif value is not None and not isinstance(value, KEYS[key]):
            faults.append(f"{at}`{key}` cannot be `{value!r}`")
        elif key == "resources":
            faults += [f"{at}{fault}" for fault in _choices(config[key] or {})]
        elif key == "secrets" and not all(isinstance(name, str) for name in config[key] or ()):
            faults.append(f"{at}`secrets` has to be `NAME: null` lines, or a list of names")
    if not config.get("run"):
        faults.append("`run` is required")
    if faults:
        count = f"{len(faults)} fault{'s' * (len(faults) > 1)}"
        raise TaskError(f"`{path}` has {count}: " + "; ".join(faults))


def secret_values(
    names: Iterable[str], settings: Settings, env_file: Path | None = None
) -> dict[str, str]:
    """Of the secrets `names` those that the settings, the environment or `.env` give."""
    known = {**read_env_file(env_file), **os.environ, **settings.secrets()}
    return {name: known[name] for name in names if known.get(name)}


def _choices(resources: Mapping[str, Any]) -> list[str]:
    """What is wrong with the resources that a launch may choose from."""
    given = {key: resources.get(key) or [] for key in ("ordered", "any_of")}
    return [
        f"`{key}` has to be a list of resources, such as `- {{accelerators: H100:1}}`"
        for key, choices in given.items()
        if not (isinstance(choices, list) and all(isinstance(it, dict) for it in choices))
    ]


def _check_numbers(path: Path, envs: Mapping[str, str]) -> None:
    """Those of the envs that the launcher counts with, by the bounds of its settings."""
    names = variables(Settings)
    for number, wanted in _NUMBERS.items():
        try:
            Settings.model_validate({number: envs[names[number]]})
        except ValidationError as exc:
            raise TaskError(
                f"`{path}` cannot have `{envs[names[number]]}` as `{names[number]}`",
                hint=f"Give {wanted}",
            ) from exc


def _sent(env_file: Path | None) -> dict[str, str]:
    """The variables of a file that was named, less those that the settings read."""
    given, settings = read_env_file(env_file) if env_file else {}, variables(Settings).values()
    return {name: text for name, text in given.items() if name not in settings}


def _secrets(
    path: Path, config: Mapping[str, Any], settings: Settings, env_file: Path | None
) -> dict[str, str]:
    """The values of the secrets that the task declares; ours may be left out, others may not."""
    declared = config.get("secrets") or {}
    if isinstance(declared, list):
        declared = dict.fromkeys(declared)
    if written := [name for name, value in declared.items() if value is not None]:
        raise TaskError(
            f"`{path}` holds the value of the secret `{written[0]}`",
            hint=f"Write `{written[0]}: null` there, and the value into `.env`",
        )
    known = secret_values(declared, settings, env_file)
    if absent := [name for name in declared if name not in {*known, *OPTIONAL_SECRETS}]:
        raise TaskError(
            f"`{path}` needs the secret `{absent[0]}`",
            hint=f"Set `{absent[0]}` in `.env` or in the environment",
        )
    return known
