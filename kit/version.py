"""The installed version of both programs."""

import importlib.metadata


def version() -> str:
    """The installed version, or `0.dev` when the code runs from a bare checkout."""
    try:
        return importlib.metadata.version("art-cluster")
    except importlib.metadata.PackageNotFoundError:
        return "0.dev"
