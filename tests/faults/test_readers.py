"""Whatever bytes are in a file of ours, its reader returns a value or an error with a sentence."""

import contextlib
import json
import random
import sqlite3
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from kit.errors import KitError
from kit.files import append_lines, read_lines
from kit.manifest import MANIFEST, damage, write_manifest
from kit.settings import read_env_file
from kit.types import Json
from launcher.local.runs import read_run
from tests.faults.mutations import damaged, retyped
from trainer import checkpoint
from trainer.base_model.architecture import read_architecture
from trainer.config import LoraConfig
from trainer.engines import vllm_log
from trainer.harness.curriculum import CurriculumState
from trainer.harness.history import History, Pending, resume
from trainer.harness.types import TrajectoryCollection
from trainer.learner.state import read_tensors
from trainer.learner.tensor_file import write_tensors
from trainer.runs import ModelRun
from trainer.server import history, strict_json
from trainer.server.client_settings import lora_config
from trainer.server.digests import fingerprint
from trainer.server.health import Health
from trainer.server.journal import Journal, JournaledRequest
from trainer.server.ledger import Entry, Ledger, entry_of
from trainer.server.models import Models
from trainer.server.step_settings import max_seq_length
from trainer.server.wire import ModelWire

CASES = 60  # for each reader
Make = Callable[[Path], Path]
REQUEST = JournaledRequest(1, "0" * 64, "tiny-random", {"name": "run", "project": "p"}, [], {})
ROW = {"step": 1, "train/reward": 0.5, "loss": 0.1}


def make_json(name: str, value: object) -> Make:
    def make(directory: Path) -> Path:
        (directory / name).write_text(json.dumps(value))
        return directory / name

    return make


def make_manifest(directory: Path) -> Path:
    path = directory / "checkpoints" / "0001"
    path.mkdir(parents=True)
    (path / "adapter_config.json").write_text("{}")
    write_manifest(path, {"step": 1, "base_model": "tiny-random"})
    return path / MANIFEST


def make_tensors(directory: Path) -> Path:
    write_tensors({"a": torch.ones(4, 4), "b": torch.zeros(3)}, directory / "a.safetensors")
    return directory / "a.safetensors"


def make_history(directory: Path) -> Path:
    append_lines(directory / "history.jsonl", [ROW, {"step": 2, "val/reward": 1}])
    return directory / "history.jsonl"


def entry(number: int) -> Entry:
    ids = {"prompt_ids": [1, 2], "completion_ids": [number], "logprobs": [-0.5]}
    template = {"tools": [{"type": "function"}]}
    return Entry("p/run", 1, "0", None, **ids, id=f"choice{number}", template=template)


def make_ledger(directory: Path) -> Path:
    ledger = Ledger(directory / "ledger.db")
    for number in range(40):
        ledger.record(entry(number), str(number))
    ledger.close()
    return directory / "ledger.db"


def make_epochs(directory: Path) -> Path:
    epochs = History(directory, "id", epoch=1, curriculum=CurriculumState(1.0))
    epochs.save()
    nothing = TrajectoryCollection(trajectories=[], run_id="id")
    pending = Pending(2, 1, {}, nothing, epochs.curriculum.as_json())
    epochs.begin_training(pending)
    return directory / "finetune_state.json"


def make_pending(directory: Path) -> Path:
    return make_epochs(directory).with_name("pending_epoch.json")


def read_epochs(path: Path) -> None:
    if found := resume(path.parent):
        found.interrupted()


def make_serving(directory: Path) -> Path:
    models = Models(directory)
    for name in ("run", "other"):
        wire = ModelWire(name=name, project="p", base_model="tiny-random", run_name=name)
        models.serve(models.add(wire, LoraConfig()), wire)
    return directory / "serving.json"


def read_serving(path: Path) -> None:
    """As a server does that starts again: a model that cannot be read is named, others served."""
    for sent in Models(path.parent, Health(path.parent)).to_restore():
        with contextlib.suppress(ValidationError):
            wire = ModelWire.model_validate(sent)
            lora_config(wire, LoraConfig())
            max_seq_length(wire)


def read_history(path: Path) -> None:
    history.by_step(path.parent)
    history.smoothed(path.parent, "train/reward", 0.5)
    ModelRun("p", "run", path.parent).summary()


def read_ledger(path: Path) -> None:
    ledger = Ledger(path, health=Health(path.parent))
    try:
        for number in range(0, 40, 13):
            content = ledger.with_content(str(number))
            identity = ledger.with_fingerprint(fingerprint(f"token_id:{number}", [-0.5]))
            for row in (*content, *identity, ledger.with_id(f"choice{number}")):
                if row:
                    entry_of(row)
                    ledger.variables(row)
        ledger.record(entry(99), "99")
        ledger.forget("p/run", before=1)
        ledger.forget("p/run", before=5)
    finally:
        ledger.close()


def read_manifest_everywhere(path: Path) -> None:
    damage(path.parent)
    checkpoint.list_steps(path.parents[1])
    ModelRun("p", "run", path.parents[2]).summary()
    checkpoint.verify(path.parent)


def read_body(path: Path) -> None:
    with contextlib.suppress(json.JSONDecodeError):  # the routes answer it with 400
        strict_json.read(path.read_bytes())


def read_log(path: Path) -> None:
    lines = path.read_text(errors="replace").splitlines()
    vllm_log.stage(lines)
    vllm_log.hint(vllm_log.cause(lines))


ARCHITECTURE: Json = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
LOG = "INFO engine\nERROR ValueError: No available memory\nTraceback:\nRuntimeError: x\n"
READERS: dict[str, tuple[Make, Callable[[Path], object]]] = {
    "journal": (
        make_json(f"journal.{REQUEST.step:04}.json", asdict(REQUEST)),
        lambda path: Journal(path.parent).pending(),
    ),
    "serving": (make_serving, read_serving),
    "rows": (make_history, read_lines),
    "history": (make_history, read_history),
    "ledger": (make_ledger, read_ledger),
    "manifest": (make_manifest, read_manifest_everywhere),
    "tensors": (make_tensors, read_tensors),
    "epochs": (make_epochs, read_epochs),
    "pending epoch": (make_pending, read_epochs),
    "run": (make_json("about.json", {"name": "serve"}), lambda path: read_run(path.parent)),
    "architecture": (
        make_json("config.json", ARCHITECTURE),
        lambda path: read_architecture(path.parent),
    ),
    "body": (make_json("body", {"a": [1, 2.5, "x", None]}), read_body),
    "env": (make_json(".env", {"A": 1}), read_env_file),
    "log": (lambda directory: _write(directory / "log", LOG), read_log),
}


def _write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize("kind", READERS)
def test_any_bytes_are_a_value_or_an_error_with_a_sentence(
    kind: str, tmp_path: Path, chance: random.Random, rounds: int
) -> None:
    make, read = READERS[kind]
    directory = tmp_path / "whole"
    directory.mkdir()
    whole = make(directory).read_bytes()
    for number in range(CASES * rounds):
        directory = tmp_path / str(number)
        directory.mkdir()
        path = make(directory)
        path.write_bytes(_fault(whole, chance))
        try:
            read(path)
        except KitError as error:
            assert error.message and len(error.message) < 3000


def _fault(whole: bytes, chance: random.Random) -> bytes:
    try:
        value = json.loads(whole)
    except ValueError:
        return damaged(whole, chance)
    if chance.random() < 0.4:
        return damaged(whole, chance)
    return json.dumps(retyped(value, chance)).encode()


def test_the_faults_do_damage_a_ledger(tmp_path: Path) -> None:
    path = make_ledger(tmp_path)
    path.write_bytes(b"x" * 200 + path.read_bytes()[200:])
    with pytest.raises(sqlite3.DatabaseError):
        sqlite3.connect(path).execute("SELECT * FROM completions").fetchall()
