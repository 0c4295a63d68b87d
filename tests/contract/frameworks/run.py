"""Run drivers in one process, and print a JSON line per column: URL MODEL [--columns A,B] NAME...

The columns of one framework run one after the other; the first argument is a base URL without
`/v1`, and each framework gets `URL/rollouts/NAME-COLUMN/v1`, unless it needs another form.
"""

import argparse
import asyncio
import contextlib
import importlib
import inspect
import io
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import common

COLUMNS = ("chat", "stream", "tools", "forced", "structured", "turns", "completions")


def wrong(column: str, got: Any) -> str:
    """What is wrong with a driver's result, or an empty string."""
    if column == "chat":
        right = got == "Hello there."
    elif column == "stream":
        right = len(got) > 1 and "".join(got) == "Hello there."
    elif column == "tools":
        right = common.calls == [[2, 3]] and got == "The answer is 5."
    elif column == "forced":
        right = got.keys() == {"a", "b"} and all(type(value) is int for value in got.values())
    elif column == "structured":
        types = {name: type(value) for name, value in got.items()}
        right = types == {"value": int, "even": bool}
    elif column == "turns":
        right = got == "You are Ada."
    else:
        right = got is True
    return "" if right else f"got {got!r}, calls {common.calls}"


def run(
    loop: asyncio.Runner, function: Callable[..., Any], column: str, url: str, model: str
) -> str:
    common.calls.clear()
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # frameworks print panels
            got = function(url, model)
            if inspect.isawaitable(got):
                got = loop.run(got)
        return wrong(column, got)
    except Exception as error:
        if os.environ.get("TRACE"):
            traceback.print_exc()
        return f"{type(error).__name__}: {error}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("names", nargs="+")
    parser.add_argument("--columns", default=",".join(COLUMNS))
    arguments = parser.parse_args()
    loop = asyncio.Runner()  # one for all: some frameworks keep a client for every loop
    for name in arguments.names:
        driver = importlib.import_module(f"{name}_driver")
        for column in arguments.columns.split(","):
            function = getattr(driver, column, None)
            if function is None:
                continue
            url = f"{arguments.url}/rollouts/{name}-{column}/v1"
            error = run(loop, function, column, url, arguments.model)
            line = {"framework": name, "column": column, "error": error}
            sys.stdout.write(json.dumps(line) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
