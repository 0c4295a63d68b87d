"""The root of both error trees. An error has a message (what happened) and a hint (what to do).

KitError
├── launcher.errors.LauncherError
└── trainer.errors.TrainerError
"""


class KitError(Exception):
    """An error for people: one sentence with values in backticks, and a hint.

    Only the message reaches `Exception.__init__`, so errors pickle between processes.
    """

    hint = ""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        if hint is not None:
            self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n\nhint: {self.hint}" if self.hint else self.message


class ConfigError(KitError):
    """Settings, flags or a file that cannot be used."""


class NotInstalled(KitError):
    """A package that an optional part needs is not installed."""


def plural(count: int, noun: str) -> str:
    """`1 fault`, `2 faults`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
