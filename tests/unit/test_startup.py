import contextlib
import io
import threading
from collections.abc import Iterator
from typing import TextIO

import pytest

from launcher.startup import BackgroundContext, LogFollower


def test_a_context_is_entered_once_beside_the_caller_and_exited_at_the_end() -> None:
    entering, may_enter, events = threading.Event(), threading.Event(), []

    @contextlib.contextmanager
    def door() -> Iterator[str]:
        entering.set()
        may_enter.wait(10)
        events.append("entered")
        yield "value"
        events.append("exited")

    with BackgroundContext(door) as background:
        background.start()
        assert entering.wait(10) and not events
        may_enter.set()
        assert (background.value(), background.value()) == ("value", "value")
    assert events == ["entered", "exited"]


def test_an_error_on_entering_reaches_only_a_caller_of_value() -> None:
    @contextlib.contextmanager
    def door() -> Iterator[None]:
        raise OSError("stuck")
        yield

    with BackgroundContext(door) as background:
        background.start()
    with BackgroundContext(door) as background, pytest.raises(OSError, match="stuck"):
        background.value()


def test_a_log_is_shown_once_and_only_until_the_wait_ends() -> None:
    first, more, over = threading.Event(), threading.Event(), threading.Event()
    followers: list[TextIO] = []

    def follow(out: TextIO) -> None:
        followers.append(out)
        try:
            out.write("one\n")
            out.flush()
            first.set()
            more.wait(10)
            out.write("two\n")
        finally:
            over.set()

    shown = io.StringIO()
    with LogFollower(follow) as follower:
        follower.start(shown)
        follower.start(shown)
        assert first.wait(10)
    more.set()
    assert over.wait(10)
    assert (len(followers), shown.getvalue()) == (1, "one\n")


def test_a_log_that_cannot_be_shown_stops_nothing() -> None:
    tried = threading.Event()

    def follow(out: TextIO) -> None:
        tried.set()
        raise OSError

    with LogFollower(follow) as follower:
        follower.start(io.StringIO())
        assert tried.wait(10)
