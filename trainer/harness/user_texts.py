"""Texts of objects that the user's code made: they may not print, and may hold no valid text."""

from typing import Any

from trainer.harness.watchdog import users_code

LONGEST = 300  # characters of an error that are kept


def text_of(value: Any) -> str:
    """`str(value)` as valid text, also if the object cannot be printed."""
    try:
        with users_code():
            text = str(value)
    except BaseException as error:  # the object's own code
        return f"<a `{type(value).__name__}` that cannot be printed: {type(error).__name__}>"
    # A terminal and a file cannot take half of a surrogate pair, which a cut emoji leaves.
    return text.encode(errors="replace").decode()


def error_text(error: BaseException) -> str:
    """An error in one line of bounded length: its message, with its type unless it is ours."""
    text = getattr(error, "message", None) or f"{type(error).__name__}: {text_of(error)}"
    return " ".join(text_of(text).split())[:LONGEST]
