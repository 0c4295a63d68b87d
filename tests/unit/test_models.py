"""Runs, their names, and the step that a name serves."""

import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from trainer import checkpoint
from trainer.config import LoraConfig
from trainer.errors import NotFound, NotReady
from trainer.server import model as model_module
from trainer.server.journal import Journal, JournaledRequest, interrupted
from trainer.server.model import Model
from trainer.server.models import Models
from trainer.server.routes.art import routes
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
    with pytest.raises(NotFound):
        models.find("agent@1")  # an older run has that step, with other weights
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


async def test_a_model_that_is_being_restored_has_no_step_yet(tmp_path: Path) -> None:
    models = Models(tmp_path)
    models.starting = True
    model = models.add(wire("agent"), LORA)
    assert models.get(wire("agent")) is model
    app = FastAPI()
    backend: Any = SimpleNamespace(models=models)
    app.include_router(routes(backend))
    body = wire("agent").model_dump(mode="json", by_alias=True)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
        with pytest.raises(NotReady, match="`agent` is not served yet"):
            await client.post("/_get_step", json=body)
    model.prepared = True
    assert models.ready(wire("agent")) is model
    models.starting = model.prepared = False  # a client may register it, and prepare it later
    assert models.ready(wire("agent")) is model


def test_a_step_that_was_interrupted_before_its_run_was_renamed_is_finished(tmp_path: Path) -> None:
    old = tmp_path / "p" / "models" / "agent"
    checkpoint_in(old, 7)
    sent = wire("agent").model_dump(mode="json", by_alias=True)
    Journal(old).begin(JournaledRequest(8, "digest", "base", sent, [], {}))
    Models(tmp_path).add(wire("agent", "first"), LORA)
    [request] = interrupted(tmp_path, "base")
    assert ModelWire.model_validate(request.model).run == "first"


def test_a_name_in_two_projects_means_the_run_that_was_prepared_last(tmp_path: Path) -> None:
    models = Models(tmp_path)
    models.base_model = "org/base"
    a, b = (ModelWire(name="same", project=name, base_model="org/base") for name in ("pa", "pb"))
    one, two = served(models, a), served(models, b)
    one.steps, one.step = {0: "", 4: ""}, 4
    two.steps, two.step = {0: "", 7: ""}, 7
    assert models.find("same") == (two, 7)
    assert models.find("pa/same") == (one, 4) and models.find("pa/same@4") == (one, 4)
    assert {"same", "same@7", "pa/same", "pa/same@4"} <= set(models.served_names())
    assert "same@4" not in models.served_names()
    with pytest.raises(NotFound, match="no model `same@4`"):
        models.find("same@4")  # those are the weights of another run
    served(models, a)
    assert models.find("same") == (one, 4) and models.find("pb/same") == (two, 7)


def test_an_alias_of_the_run_prepared_last_goes_before_a_name_in_another_project(
    tmp_path: Path,
) -> None:
    models = Models(tmp_path)
    models.base_model = "base"
    own = served(models, ModelWire(name="same", project="pb", base_model="base"))
    alias = served(models, wire("same", "run"))
    assert models.find("same") == (alias, 0) and models.find("pb/same") == (own, 0)


def test_a_second_kill_forgets_no_model_that_was_not_served_again_yet(tmp_path: Path) -> None:
    models = Models(tmp_path)
    one, two = wire("one"), wire("agent", "two")
    for each in (one, two):
        served(models, each)
    restarted = Models(tmp_path)
    assert len(restarted.to_restore()) == 2
    served(restarted, one)  # and then it is killed
    restored = [ModelWire.model_validate(sent) for sent in Models(tmp_path).to_restore()]
    assert restored == [two, one]


@pytest.mark.parametrize(
    "content", ["", "{", "null", "5", '{"a": 1}', "[3]", "\0" * 40, "\xff\xfe"]
)
def test_a_damaged_list_of_served_models_is_set_aside(tmp_path: Path, content: str) -> None:
    (tmp_path / "serving.json").write_bytes(content.encode("latin1"))
    models = Models(tmp_path)
    assert models.to_restore() == []
    [aside] = tmp_path.iterdir()
    assert aside.name.startswith("serving.json.damaged-")
    report = models.health.report()
    assert report["status"] == "degraded" and aside.name in report["reasons"][0]


@pytest.mark.parametrize(
    "name", ["ledger.db", "models", "logs", "pulled", "Serving.json", "rollouts.db-wal", "wandb"]
)
def test_a_project_or_model_may_not_have_the_name_of_our_own_files(name: str) -> None:
    for fields in ({"name": name, "project": "p"}, {"name": "m", "project": name}):
        with pytest.raises(ValueError, match="which names a file of the server itself"):
            ModelWire.model_validate(fields)
    ModelWire(name="my-models", project="ledger")


def test_a_name_is_found_while_a_thread_adds_models(tmp_path: Path) -> None:
    models = Models(tmp_path)
    models.base_model = "base"
    first = served(models, wire("first"))
    adding = threading.Thread(
        target=lambda: [models.add(wire(f"run{number}"), LORA) for number in range(500)]
    )
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        adding.start()
        while adding.is_alive():
            assert models.find("first") == (first, 0)
            assert "first" in models.served_names()
    finally:
        sys.setswitchinterval(interval)
        adding.join()


def test_an_unknown_name_is_answered_with_a_few_of_many_models(tmp_path: Path) -> None:
    models = Models(tmp_path)
    models.base_model = "base"
    for number in range(100):
        served(models, wire(f"run{number}"))
    with pytest.raises(NotFound) as caught:
        models.find("nobody")
    assert "`run0`" in caught.value.hint and "and 82 more" in caught.value.hint
    assert len(caught.value.hint) < 1000


def test_a_model_serves_its_steps_while_it_reads_them_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = Models(tmp_path)
    directory = tmp_path / "p" / "models" / "m"
    for step in (1, 2):
        checkpoint_in(directory, step)
    model = served(models, wire("m"))
    checkpoint_in(directory, 3)
    seen = []
    read = model_module.read_manifest

    def read_while_a_chat_asks(path: Path) -> Any:
        seen.append((models.find("m@1"), models.find("m")))
        return read(path)

    monkeypatch.setattr(model_module, "read_manifest", read_while_a_chat_asks)
    model.read_steps()
    assert seen == [((model, 1), (model, 2))] * 3
    assert models.find("m") == (model, 3)
