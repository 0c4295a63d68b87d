"""The root of both error trees: one sentence that says what happened, and a hint what to do.

KitError
├── launcher.errors.LauncherError
└── trainer.errors.TrainerError
"""


class KitError(Exception):
    """What happened, with values in backticks; `hint` says what to do next.

    Only the message reaches `Exception.__init__`, so every error pickles across a process.
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
    """Settings, flags or a file that cannot be used as they stand."""


class NotInstalled(KitError):
    """A package that an optional part needs is absent."""
