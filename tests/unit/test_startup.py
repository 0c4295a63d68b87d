import contextlib
import threading
from collections.abc import Iterator

import pytest

from launcher.startup import Early


def test_it_opens_beside_the_caller_once_and_is_closed() -> None:
    begun, may_open, told = threading.Event(), threading.Event(), []

    @contextlib.contextmanager
    def door() -> Iterator[str]:
        begun.set()
        may_open.wait(10)
        told.append("open")
        yield "way"
        told.append("closed")

    with Early(door) as early:
        early.begin()
        assert begun.wait(10) and not told
        may_open.set()
        assert (early.value(), early.value()) == ("way", "way")
    assert told == ["open", "closed"]


def test_what_fails_to_open_is_told_to_who_asks_and_to_nobody_else() -> None:
    @contextlib.contextmanager
    def door() -> Iterator[None]:
        raise OSError("stuck")
        yield

    with Early(door) as early:
        early.begin()
    with Early(door) as early, pytest.raises(OSError, match="stuck"):
        early.value()
