"""Something that takes seconds to open, begun before it is needed."""

import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Generic, Self, TypeVar

T = TypeVar("T")


class Early(Generic[T]):
    """Enters `make()` beside the caller from `begin` on; `value` waits for what it gives.

    Closed at the end of the `with`, whether anybody asked for it or not.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[T]]) -> None:
        self._make = make
        self._pool = ThreadPoolExecutor(1)
        self._stack = contextlib.ExitStack()
        self._opened: Future[T] | None = None

    def begin(self) -> None:
        """Safe to repeat."""
        if self._opened is None:
            self._opened = self._pool.submit(lambda: self._stack.enter_context(self._make()))

    def value(self) -> T:
        self.begin()
        assert self._opened is not None
        return self._opened.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        self._stack.close()
