"""Numbers of a run on the page: steps that are planned, time, dollars, and lost runs."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kit.state_dir import HISTORY, PRICE
from trainer.harness.epoch_rules import tell_the_plan
from trainer.harness.types import Trajectory, TrajectoryCollection
from trainer.page import overview
from trainer.page.reader import Run
from trainer.server.journal import JournaledRequest
from trainer.server.reports import _about_groups
from trainer.server.routes.page import Page


def numbers(*metadata: Any) -> dict[str, float]:
    members = [{"messages_and_choices": [], "reward": 1.0, "metadata": it} for it in metadata]
    return _about_groups(JournaledRequest(1, "", "", {}, [{"trajectories": members}], {}))


def test_the_harness_says_how_many_steps_there_will_be() -> None:
    trajectory = Trajectory(episode=[], reward=1.0, metadata={"example_id": "a"})
    chosen = TrajectoryCollection(trajectories=[[trajectory]], run_id="r")
    tell_the_plan(chosen, 24)
    assert trajectory.metadata == {"example_id": "a", "steps_planned": 24}
    assert numbers(trajectory.metadata)["steps_planned"] == 24


@pytest.mark.parametrize("odd", [None, "text", {"steps_planned": "x"}, {"steps_planned": 10**400}])
def test_a_client_that_says_nothing_of_use_has_no_plan(odd: Any) -> None:
    assert "steps_planned" not in numbers(odd)
    assert numbers(odd, {"steps_planned": 3})["steps_planned"] == 3


def test_the_verdict_says_the_step_and_the_time_left(tmp_path: Path) -> None:
    lines = [
        {"step": at, "num_gradient_steps": 1, "steps_planned": 24, "recorded_at": 1e9 + 40 * at}
        for at in range(1, 8)
    ]
    (tmp_path / HISTORY).write_text("".join(json.dumps(line) + "\n" for line in lines))
    verdict = overview.overview(Run("p", "n", tmp_path), "training")["verdict"]
    assert verdict["sentences"][0] == "Step 7 of 24, about 11 minutes left"


@pytest.mark.parametrize(
    ("text", "price"), [("2.5000\n", 2.5), ("", None), ("nan", None), ("-1", None), ("x", None)]
)
def test_the_server_reads_the_price_that_the_launcher_wrote(
    tmp_path: Path, text: str, price: float | None
) -> None:
    (tmp_path / PRICE).write_text(text)
    settings = {"dollars_per_hour": 0.0, "max_hours": 0, "exit_when_idle": 0}
    config = SimpleNamespace(state_path=tmp_path, **settings)
    page: Any = SimpleNamespace(_backend=SimpleNamespace(config=config), _started=0.0)
    lease = Page.lease(page)
    assert (lease["dollars_per_hour"] if lease else None) == price


def test_lost_runs_are_counted_by_the_name_of_their_exception() -> None:
    faults: list[Any] = [
        *[{"type": "workflow_timed_out"}] * 3,
        *[{"type": "<class 'openai.APITimeoutError'>"}] * 2,
        *["text", {}, {"type": None}],
    ]
    groups = [{"trajectories": [], "exceptions": faults}, {"trajectories": []}]
    found = _about_groups(JournaledRequest(1, "", "", {}, groups, {}))
    lost = {name: count for name, count in found.items() if "lost" in name}
    assert lost == {
        **{"data/lost_workflow_timed_out": 3, "data/lost_APITimeoutError": 2},
        "data/lost_unknown": 3,
    }
    many = [{"exceptions": [{"type": f"E{number}"} for number in range(100)]}]
    found = _about_groups(JournaledRequest(1, "", "", {}, many, {}))
    lost = {name: count for name, count in found.items() if "lost" in name}
    assert len(lost) == 9 and sum(lost.values()) == 100 and lost["data/lost_other"] == 92
