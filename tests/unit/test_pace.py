"""The time between steps: sampling that overlaps counts once, the rest is idle."""

from collections.abc import Callable

import pytest

from trainer.server.pace import Pace


@pytest.fixture
def clock() -> list[float]:
    return [100.0]


def pace_of(clock: list[float]) -> tuple[Pace, Callable[[float], None]]:
    def wait(seconds: float) -> None:
        clock[0] += seconds

    return Pace(lambda: clock[0]), wait


def test_requests_at_the_same_time_count_once_and_the_rest_is_idle(clock: list[float]) -> None:
    pace, wait = pace_of(clock)
    assert pace.before_step() == {}  # nobody knows how long the client was idle
    with pace.sampling():
        wait(2)
        with pace.sampling():
            wait(3)
    wait(4)
    assert pace.before_step() == {"time/sample_s": 5, "time/idle_s": 4}
    wait(60)  # the step itself
    pace.step_done()
    wait(1)
    with pace.sampling():
        wait(6)
        assert pace.before_step() == {"time/sample_s": 6, "time/idle_s": 1}


def test_a_request_that_outlasts_a_step_counts_from_its_end(clock: list[float]) -> None:
    pace, wait = pace_of(clock)
    with pace.sampling():
        wait(1)
        pace.step_done()
        wait(2)
    wait(3)
    assert pace.before_step() == {"time/sample_s": 2, "time/idle_s": 3}
