import io
import threading
from typing import TextIO

from launcher.startup import Showing


def test_a_log_is_shown_once_and_only_while_somebody_waits() -> None:
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
    with Showing(follow) as showing:
        showing.start(shown)
        showing.start(shown)
        assert first.wait(10)
    more.set()
    assert over.wait(10)
    assert (len(followers), shown.getvalue()) == (1, "one\n")


def test_a_log_that_cannot_be_shown_stops_nothing() -> None:
    tried = threading.Event()

    def follow(out: TextIO) -> None:
        tried.set()
        raise OSError

    with Showing(follow) as showing:
        showing.start(io.StringIO())
        assert tried.wait(10)
