from pathlib import Path
from typing import Annotated

import pytest

from kit.config import Config
from kit.errors import ConfigError
from kit.settings import Env, gather


class Settings(Config):
    color: Annotated[str, Env("COLOR")] = "default"
    size: int = 1


def test_flag_beats_environment_beats_env_file_beats_file_beats_default(tmp_path: Path) -> None:
    env_file = tmp_path / "env"
    env_file.write_text("COLOR=from-env-file\n")
    environment = {"COLOR": "from-environment"}
    file = {"color": "from-file"}
    flags = {"color": "from-flag"}

    def color(**sources: object) -> str:
        return gather(Settings, **{"environment": {}, **sources}).color  # type: ignore[arg-type]

    assert color() == "default"
    assert color(file=file) == "from-file"
    assert color(file=file, env_file=env_file) == "from-env-file"
    assert color(file=file, env_file=env_file, environment=environment) == "from-environment"
    assert color(file=file, env_file=env_file, environment=environment, flags=flags) == "from-flag"


def test_an_empty_variable_and_a_flag_of_none_count_as_not_set() -> None:
    assert gather(Settings, environment={"COLOR": ""}, flags={"color": None}).color == "default"


def test_a_named_env_file_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="There is no env file"):
        gather(Settings, env_file=tmp_path / "absent", environment={})


def test_the_default_env_file_is_read_if_it_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert gather(Settings, environment={}).color == "default"
    (tmp_path / ".env").write_text("COLOR=blue\n")
    assert gather(Settings, environment={}).color == "blue"
