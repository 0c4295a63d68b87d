"""Every fault in a YAML file is one sentence that names the file, in bounded time and memory."""

import random
import resource
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from kit.config import load
from kit.errors import KitError
from launcher.settings import Settings
from launcher.task import Task
from tests.contract.harness.conftest import guide
from tests.faults.mutations import damaged, damaged_lines
from trainer.config import ServerConfig
from trainer.harness.config_file import load_config

CASES = 350  # for each of the three readers
LONGEST = 3000  # characters in a message
SERVE = """\
base_model: tiny-random
port: 7999
state_dir: .art
lora: {rank: 8, alpha: 16, target_modules: [q_proj, v_proj]}
idle_minutes: 30
"""
FINETUNE = yaml.safe_dump(
    guide(SimpleNamespace(openai="http://127.0.0.1:8000", control="http://127.0.0.1:7999"), "run")
)
TASKS = [path.read_text() for path in sorted(Path("sky").glob("*.yaml"))]


def load_task(path: Path) -> object:
    return Task.load(path, Settings())


READERS: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "finetune": (load_config, [FINETUNE, Path("examples/temporal_clue/config.yaml").read_text()]),
    "task": (load_task, TASKS),
    "serve": (lambda path: load(ServerConfig, path), [SERVE]),
}
LAUGHS = "a0: &a0 [x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)
BOMBS = {
    "laughs": LAUGHS,
    "laughs in keys": LAUGHS.replace("[", "{k: [").replace("]", "]}"),
    "itself": "a: &a [*a]\n",
    "itself as a value": "a: &a {b: *a}\n",
    "itself merged": "a: &a\n  <<: *a\n",
    "deep list": "a: " + "[" * 100_000,
    "deep mapping": "a: " + "{a: " * 50_000,
    "deep by lines": "".join(f"{' ' * n}a:\n" for n in range(2000)),
    "wide": "a: [" + "1," * 200_000 + "]\n",
    "long number": "a: " + "9" * 100_000,
    "long name": "a" * 1_000_000 + ": 1\n",
    "many names": "".join(f"a{n}: 1\n" for n in range(20_000)),
    "key of a list": "? [1, 2]\n: 3\n",
    "two documents": "a: 1\n---\nb: 2\n",
}


def read(reader: Callable[[Path], object], path: Path) -> str:
    """Read the file, and return the sentence about its fault, or nothing."""
    began = time.process_time()
    try:
        reader(path)
        told = ""
    except KitError as error:
        told = error.message
        assert path.name in told
        assert "\n" not in told and len(told) < LONGEST, told[:LONGEST]
        assert error.hint
    assert time.process_time() - began < 20
    return told


@pytest.mark.parametrize("kind", READERS)
def test_a_fault_in_a_yaml_file_is_one_sentence_that_names_it(
    kind: str, tmp_path: Path, chance: random.Random, rounds: int
) -> None:
    reader, texts = READERS[kind]
    path = tmp_path / "damaged.yaml"
    refused = 0
    for _ in range(CASES * rounds):
        data = chance.choice([damaged, damaged_lines])(chance.choice(texts).encode(), chance)
        path.write_bytes(data)
        refused += bool(read(reader, path))  # a file that fails stays in `tmp_path`
    assert refused > CASES * rounds / 4


@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.parametrize("kind", READERS)
def test_a_yaml_bomb_is_refused_in_bounded_time_and_memory(
    kind: str, bomb: str, tmp_path: Path
) -> None:
    path = tmp_path / "bomb.yaml"
    path.write_text(BOMBS[bomb])
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert read(READERS[kind][0], path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 300_000


@pytest.mark.parametrize("path", [Path("/dev/zero"), Path("/"), Path("/dev/null")], ids=str)
def test_a_path_that_is_no_file_is_refused(path: Path) -> None:
    with pytest.raises(KitError, match=str(path)):
        load_config(path)
