"""The generated parts of the documentation match the code."""

import re
from pathlib import Path

import click
import pytest

from dev import reference
from trainer.cli import cli
from trainer.step_config import GrpoConfig

ROOT = reference.ROOT
PAGES = reference.pages()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_generated_parts_are_up_to_date(page: Path) -> None:
    assert page.read_text() == reference.renewed(page), (
        f"{page.name} is stale: renew it with `scripts/docs renew` and commit it"
    )


def test_the_pages_that_quote_code_have_generated_parts() -> None:
    assert {"README.md", "CONTRIBUTING.md", "reference.md"} <= {page.name for page in PAGES}


def test_the_map_has_every_folder_of_the_code() -> None:
    listed = re.findall(r"<!-- generated: map (\S+) -->", (ROOT / "CONTRIBUTING.md").read_text())
    modules = [
        path for name in ("kit", "launcher", "trainer") for path in ROOT.glob(f"{name}/**/*.py")
    ]
    folders = {str(path.parent.relative_to(ROOT)) for path in modules if path.stat().st_size}
    # Files that `launcher init` copies are a user's code, not ours.
    folders = {folder for folder in folders if not folder.startswith("launcher/templates")}
    assert sorted(listed) == sorted(folders)


def test_a_new_flag_makes_the_reference_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    before = reference.reference()
    serve = cli.commands["serve"]
    flag = click.Option(["--shiny"], help="A flag that nobody documented.")
    monkeypatch.setattr(serve, "params", [*serve.params, flag])
    after = reference.reference()
    assert "`--shiny`" not in before
    assert "| `--shiny` |  | A flag that nobody documented. |" in after


def test_every_field_is_listed_with_its_default_bounds_and_docstring() -> None:
    text = reference.reference()
    rows = [f"| `{name}` |" for name in GrpoConfig.model_fields]
    assert [row for row in rows if row not in text] == []
    assert "| `adam_beta1` | number, at least 0, below 1 | `0.9` |" in text
    assert GrpoConfig.model_fields["adam_beta1"].description in text
    assert "[settings](#evalgeneraldataset)" in text and "### `eval.general.dataset`" in text


def test_hidden_options_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    serve = cli.commands["serve"]
    flag = click.Option(["--old-spelling"], hidden=True)
    monkeypatch.setattr(serve, "params", [*serve.params, flag])
    assert "--old-spelling" not in reference.reference()
