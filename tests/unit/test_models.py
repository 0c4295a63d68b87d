"""Runs, their names, and the step that a name serves."""

import json
from pathlib import Path
from typing import Any

import pytest

from trainer import checkpoint
from trainer.config import LoraConfig
from trainer.errors import NotFound
from trainer.server.journal import Journal, JournaledRequest, interrupted
from trainer.server.models import Model, Models
from trainer.server.wire import ModelWire

LORA = LoraConfig()


def wire(name: str, run_name: str | None = None, **more: Any) -> ModelWire:
    return ModelWire(name=name, run_name=run_name, project="p", base_model="base", **more)


def checkpoint_in(directory: Path, step: int, lora: LoraConfig = LORA) -> None:
    def write(path: Path) -> dict[str, str]:
        (path / "adapter_model.safetensors").write_text(f"step {step}")
        return {}

    shape = lora.model_dump(mode="json", exclude={"seed"})
    checkpoint.save(directory / "checkpoints", step, write, {"base_model": "base", "lora": shape})


def served(models: Models, wire: ModelWire) -> Model:
    model = models.add(wire, LORA)
    model.prepared = True
    models.serve(model, wire)
    return model


def test_two_runs_that_share_an_alias_share_nothing_else(tmp_path: Path) -> None:
    models = Models(tmp_path)
    models.base_model = "base"
    one, two = served(models, wire("agent", "one")), served(models, wire("agent", "two"))
    assert one is not two and one.directory != two.directory
    one.steps, one.step = {0: "", 1: ""}, 1
    two.steps = {0: ""}
    assert models.find("one") == (one, 1) and models.find("two@0") == (two, 0)
    assert models.find("agent") == (two, 0)  # the one that was prepared last
    assert models.find("agent@1") == (one, 1)
    served(models, wire("agent", "one"))
    assert models.find("agent") == (one, 1)
    assert models.get(wire("agent", "two")) is two
    names = models.served_names()
    assert {"one", "one@1", "two@0", "agent", "agent@0", "agent@1"} <= set(names)
    assert len(names) == len(set(names))
    with pytest.raises(NotFound, match="`agent` of project `p`"):
        models.get(wire("agent"))


def test_a_runs_own_name_goes_before_an_alias(tmp_path: Path) -> None:
    models = Models(tmp_path)
    models.base_model = "base"
    own = served(models, wire("agent"))
    served(models, wire("agent", "other"))
    assert models.find("agent") == (own, 0)


def test_the_first_run_with_an_alias_continues_the_run_that_was_stored_under_it(
    tmp_path: Path,
) -> None:
    for step in (0, 7):
        checkpoint_in(tmp_path / "p" / "models" / "agent", step)
    models = Models(tmp_path)
    first = models.add(wire("agent", "first"), LORA)
    assert first.step == 7 and first.directory.name == "first"
    assert not (tmp_path / "p" / "models" / "agent").exists()
    assert models.add(wire("agent", "second"), LORA).step == 0
    again = Models(tmp_path)
    assert again.add(wire("agent", "first"), LORA).step == 7
    assert again.add(wire("first", "third"), LORA).step == 0  # `first` is a run's own name now
    names = json.loads((first.directory / "run.json").read_text())
    assert names == {"name": "agent", "run_name": "first"}


def test_a_run_stored_under_its_name_is_not_taken_if_it_is_in_use_or_does_not_fit(
    tmp_path: Path,
) -> None:
    checkpoint_in(tmp_path / "p" / "models" / "agent", 7)
    models = Models(tmp_path)
    assert models.add(wire("agent", "narrow"), LoraConfig(rank=4)).step == 0
    assert models.add(wire("agent"), LORA).step == 7
    assert models.add(wire("agent", "new"), LORA).step == 0
    assert (tmp_path / "p" / "models" / "agent" / "checkpoints" / "0007").is_dir()
    assert Models(tmp_path).add(wire("agent", "agent"), LORA).step == 7


def test_a_run_that_a_killed_server_served_is_not_taken_before_it_is_restored(
    tmp_path: Path,
) -> None:
    checkpoint_in(tmp_path / "p" / "models" / "agent", 7)
    served(Models(tmp_path), wire("agent"))
    restarted = Models(tmp_path)
    restarted.starting = True
    assert restarted.add(wire("agent", "new"), LORA).step == 0
    assert restarted.add(wire("agent"), LORA).step == 7


def test_a_step_that_was_interrupted_before_its_run_was_renamed_is_finished(tmp_path: Path) -> None:
    old = tmp_path / "p" / "models" / "agent"
    checkpoint_in(old, 7)
    sent = wire("agent").model_dump(mode="json", by_alias=True)
    Journal(old).begin(JournaledRequest(8, "digest", "base", sent, [], {}))
    Models(tmp_path).add(wire("agent", "first"), LORA)
    [request] = interrupted(tmp_path, "base")
    assert ModelWire.model_validate(request.model).run == "first"
