from pathlib import Path

import pytest
from pydantic import Field

from kit.config import Config, load
from kit.errors import ConfigError
from kit.yaml_files import read_yaml


class Inner(Config):
    learning_rate: float = Field(gt=0)


class Outer(Config):
    name: str
    training: Inner
    epochs: int = 1


def write(directory: Path, text: str) -> Path:
    path = directory / "config.yaml"
    path.write_text(text)
    return path


def test_numbers_with_an_exponent_are_numbers(tmp_path: Path) -> None:
    config = load(Outer, write(tmp_path, "name: a\ntraining:\n  learning_rate: 1e-6\n"))
    assert config.training.learning_rate == 1e-6


@pytest.mark.parametrize("text", ["1e-6", "1E6", "-2e+3", "1.5e-3", ".5", "1."])
def test_every_way_to_write_a_float_is_a_float(tmp_path: Path, text: str) -> None:
    data, _ = read_yaml(write(tmp_path, f"x: {text}\n"))
    assert data == {"x": float(text)}


@pytest.mark.parametrize("text", ["e5", "1e", "v1e5", "1-e5", "'1e5'"])
def test_text_that_only_looks_like_a_float_stays_text(tmp_path: Path, text: str) -> None:
    data, _ = read_yaml(write(tmp_path, f"x: {text}\n"))
    assert data == {"x": text.strip("'")}


def test_one_error_lists_every_fault_with_its_line(tmp_path: Path) -> None:
    text = "name: a\ntraining:\n  learning_rat: 1\nepochs: soon\n"
    with pytest.raises(ConfigError) as caught:
        load(Outer, write(tmp_path, text))
    message = caught.value.message
    assert "3 faults" in message
    assert "line 2: `training.learning_rate` is required" in message
    assert (
        "line 3: `training.learning_rat` is not a setting, did you mean `learning_rate`?" in message
    )
    assert "line 4: `epochs`" in message


def test_a_missing_file_and_bad_yaml_are_reported_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"There is no file `.*nope\.yaml`"):
        load(Outer, tmp_path / "nope.yaml")
    with pytest.raises(ConfigError, match=r"config\.yaml:2` is not valid YAML"):
        load(Outer, write(tmp_path, "name: a\n  b: :\n"))


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.yaml:2` .* key `name` is given twice"):
        read_yaml(write(tmp_path, "name: a\nname: b\n"))
