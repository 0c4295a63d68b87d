"""Uploads an export to a model hub. The only place that writes to one."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.errors import HubError

DEFAULT_ENDPOINT = "https://huggingface.co"


class Hub:
    """One repository of a hub: `HF_ENDPOINT` says which hub, `HF_TOKEN` who is asking."""

    def __init__(self, repository: str) -> None:
        from huggingface_hub import HfApi, get_token
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils._validators import validate_repo_id

        self.endpoint = (os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")
        self.repository = repository
        try:
            validate_repo_id(repository)
        except HFValidationError as exc:
            raise HubError(
                f"`{repository}` is no name of a repository",
                hint="Use `OWNER/NAME` with letters, digits, `-`, `_` and `.`",
            ) from exc
        token = os.environ.get("HF_TOKEN") or get_token()
        if not token:
            raise HubError(
                f"There is no token for the hub `{self.endpoint}`",
                hint="Set `HF_TOKEN` to a token that may write, from the hub's settings",
            )
        self._api: Any = HfApi(endpoint=self.endpoint, token=token)

    def create(self) -> None:
        """Create the repository, which is private, unless it exists."""
        with self._translated():
            created = self._api.create_repo(self.repository, private=True, exist_ok=True)
            self.repository = created.repo_id  # with its owner

    def upload(self, directory: Path, message: str) -> str:
        """Upload the files of `directory` as one commit, and return the repository's address.

        Large files that the hub already has are not sent again.
        """
        with self._translated():
            self._api.upload_folder(
                repo_id=self.repository, folder_path=directory, commit_message=message
            )
        return f"{self.endpoint}/{self.repository}"

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """Turn the hub's errors into ours, keeping the original as the cause."""
        import httpx
        from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

        try:
            yield
        except OfflineModeIsEnabled as exc:
            raise HubError(
                f"`{self.repository}` cannot be pushed while `HF_HUB_OFFLINE` is set",
                hint="Unset it, and push again",
            ) from exc
        except (HfHubHTTPError, httpx.HTTPError, OSError, RuntimeError) as exc:
            # Files that cannot be sent are a RuntimeError, with the reason as its cause.
            cause = exc.__cause__ if isinstance(exc, RuntimeError) and exc.__cause__ else exc
            if isinstance(cause, HfHubHTTPError):
                raise self._refusal(cause) from exc
            raise HubError(
                f"The hub `{self.endpoint}` cannot be reached: {_first_line(cause)}",
                hint="Check the network and `HF_ENDPOINT`; the same command continues the upload",
            ) from exc

    def _refusal(self, error: Any) -> HubError:
        status = error.response.status_code
        if status in (401, 403):
            return HubError(
                f"The hub `{self.endpoint}` does not let this token write to `{self.repository}`",
                hint="Set `HF_TOKEN` to a token that may write there, and check the owner's name",
            )
        reason = error.server_message or _first_line(error)
        return HubError(
            f"The hub `{self.endpoint}` refused `{self.repository}` with status `{status}`: "
            f"{reason}",
            hint="Fix what it names; the same command continues the upload"
            if status < 500
            else "Try again later; the same command continues the upload",
        )


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
