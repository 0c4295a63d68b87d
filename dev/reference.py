"""Writes `docs/reference.md` and the generated parts of README, CONTRIBUTING and the manual.

    python -m dev.reference            write every page that is stale
    python -m dev.reference --check    write nothing; exit 1 if a page is stale

The commands come from click and the settings from pydantic, so a new flag or field makes the pages
stale, and `tests/unit/test_reference.py` fails. A page marks a generated part with

    <!-- generated: help launcher up -->
    <!-- generated: variables -->
    <!-- generated: map trainer/server -->
    <!-- generated: readme Quickstart -->

and ends it with `<!-- end generated -->`.
"""

import ast
import inspect
import re
import sys
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from pydantic import BaseModel

from dev.setting_tables import describe, one_line, sections, settings_table
from kit.settings import variables
from launcher.cli.main import cli as launcher
from launcher.settings import Settings
from trainer.cli import cli as trainer
from trainer.config import LoraConfig, ServerConfig
from trainer.harness.config import FinetuneConfig
from trainer.step_config import GrpoConfig, SftConfig

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs/reference.md"
PROGRAMS: dict[str, click.Command] = {"launcher": launcher, "trainer": trainer}
GENERATED = re.compile(r"(<!-- generated: ([\w/ -]+) -->\n).*?(<!-- end generated -->)", re.DOTALL)
HELP_WIDTH = 80

INTRODUCTION = """\
# Reference

Every command and every setting, generated from the code. Do not edit this page: change the code,
then run `scripts/docs renew`.

- Commands: [`launcher`](#launcher) on your machine, [`trainer`](#trainer) where the model is.
- Settings: [`trainer serve`](#trainer-serve-settings), [a training step](#training-step),
  [`trainer finetune`](#trainer-finetune-file), [the launcher](#launcher-settings).

A setting is taken from the first of these places that has it: flag, environment, `.env`, task or
config file, default. An empty variable counts as not set. A config file with an unknown key is
refused, with the line and the closest name that exists.
"""
SETTINGS: list[tuple[str, str, type[BaseModel]]] = [
    (
        "`trainer serve`: settings",
        "The file of `trainer serve --config FILE`. Most settings also have a flag.",
        ServerConfig,
    ),
    ("`lora`", "Part of the server's file: the shape of the LoRA of a new model.", LoraConfig),
    (
        "Training step",
        "What a client sends with a step: keyword arguments of `backend.train`, `training` of a "
        "trainer adapter, or the `config` of `/_train_model`. Names and defaults are ART's, where "
        "ART has the setting.",
        GrpoConfig,
    ),
    (
        "Supervised step",
        "The `config` of `/_train_sft`, which trains on the assistants' messages.",
        SftConfig,
    ),
    (
        "Launcher settings",
        "Flags, environment and `.env`. The ones that are not secret go to every task as envs; a "
        "secret goes to the tasks that declare it.",
        Settings,
    ),
]


def reference() -> str:
    """The whole of `docs/reference.md`."""
    parts = [INTRODUCTION]
    for name, program in PROGRAMS.items():
        parts.append(f"## {name}\n\n{_command(name, program)}")
        for path, command in _subcommands(program, name):
            parts.append(f"### {path}\n\n{_command(path, command)}")
    for title, where, model in SETTINGS:
        parts.append(f"## {title}\n\n{where}\n\n{settings_table(model)}")
    parts.append(_finetune_file())
    return "\n".join(parts)


def _finetune_file() -> str:
    text = (
        "## `trainer finetune`: file\n\n"
        "The YAML of `trainer finetune --config_file=FILE`. `NAME` is a name of your choice. A "
        "component's `_type` is one of those below, or `module:Class` for your own; the other keys "
        "are then its arguments.\n"
    )
    for path, models in sections(FinetuneConfig):
        text += f"\n### `{path}`\n"
        for model in models:
            kind = model.model_fields.get("type")
            if kind and len(models) > 1:
                text += f"\n#### {_tags(kind.annotation)}\n"
            text += f"\n{describe(model)}{settings_table(model, base=GrpoConfig, at=path)}"
    return text


def _tags(annotation: Any) -> str:
    return ", ".join(f"`{tag}`" for tag in typing.get_args(annotation))


def _subcommands(command: click.Command, path: str) -> Iterator[tuple[str, click.Command]]:
    if isinstance(command, click.Group):
        for name, child in sorted(command.commands.items()):
            if not child.hidden:
                yield f"{path} {name}", child
                yield from _subcommands(child, f"{path} {name}")


def _command(path: str, command: click.Command) -> str:
    """Usage, description, options and examples of one command."""
    before, _, after = inspect.cleandoc(command.help or "").partition("\b")
    paragraphs = "\n\n".join(one_line(text) for text in before.split("\n\n") if text.strip())
    usage = " ".join([path, *command.collect_usage_pieces(_context(command, path, None))])
    text = f"```text\n{usage}\n```\n\n{paragraphs}\n"
    if rows := [_option(param) for param in command.params if _is_shown(param)]:
        text += "\n| Option | Default | Description |\n|---|---|---|\n" + "".join(rows)
    if examples := textwrap.dedent(after.partition("Example:\n")[2]).strip():
        text += f"\n```bash\n{examples}\n```\n"
    return text


def _is_shown(param: click.Parameter) -> bool:
    return isinstance(param, click.Option) and not param.hidden and param.name != "version"


def _option(param: click.Parameter) -> str:
    assert isinstance(param, click.Option)
    names = ", ".join(f"`{name}`" for name in [*param.opts, *param.secondary_opts])
    if not param.is_flag and param.metavar:
        names = f"{names} `{param.metavar}`"
    # A flag whose default is decided later states it at the end of its help: `Port.  [7999]`.
    help_text, _, stated = (param.help or "").partition("  [")
    return f"| {names} | {_default(param, stated.rstrip(']'))} | {help_text}{_range(param)} |\n"


def _default(param: click.Option, stated: str) -> str:
    if param.required:
        return "required"
    if stated:
        return f"`{stated}`" if " " not in stated else stated
    if param.is_flag:
        return f"`{param.opts[0]}`" if param.secondary_opts and param.default is True else ""
    shown = param.show_default and isinstance(param.default, str | int | float | Path)
    return f"`{param.default}`" if shown else ""


def _range(param: click.Option) -> str:
    if isinstance(param.type, click.Choice):
        return " One of " + ", ".join(f"`{choice}`" for choice in param.type.choices) + "."
    if isinstance(param.type, click.IntRange | click.FloatRange):
        low, high = param.type.min, param.type.max
        if low is not None and high is not None:
            return f" From {low} to {high}."
        if low is not None:
            return f" {'More than' if param.type.min_open else 'At least'} {low}."
    return ""


def _context(command: click.Command, name: str, parent: click.Context | None) -> click.Context:
    """The context in which the program itself would print the help of `command`."""
    # Commands inherit `-h` from their program; click caches the help option of the first context.
    settings: dict[str, Any] = {"help_option_names": ["-h", "--help"], **command.context_settings}
    settings.pop("max_content_width", None)
    return click.Context(
        command, info_name=name, parent=parent, terminal_width=HELP_WIDTH, **settings
    )


def help_text(path: str) -> str:
    """The output of `PATH --help`, as a code block."""
    name, *rest = path.split()
    command: click.Command = PROGRAMS[name]
    context = _context(command, name, None)
    for part in rest:
        assert isinstance(command, click.Group)
        command = command.commands[part]
        context = _context(command, part, context)
    return f"```text\n{command.get_help(context)}\n```\n"


def variables_table() -> str:
    """Every environment variable that the launcher or the server reads."""
    rows: dict[str, list[str]] = {}
    for program, model in (("launcher", Settings), ("trainer serve", ServerConfig)):
        for field, variable in variables(model).items():
            text = one_line(model.model_fields[field].description or "")
            rows.setdefault(variable, [text]).append(f"`{program}`")
    lines = [
        f"| `{name}` | {text} | {', '.join(readers)} |\n" for name, (text, *readers) in rows.items()
    ]
    return "| Variable | Sets | Read by |\n|---|---|---|\n" + "".join(lines)


def folder_map(folder: str) -> str:
    """The modules of a folder, each with the first sentence of its docstring."""
    rows = []
    for path in sorted((ROOT / folder).glob("*.py")):
        text = one_line((ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n\n")[0])
        if text and path.name != "__init__.py":
            rows.append(f"| `{path.relative_to(ROOT)}` | {text} |\n")
    return "| File | Owns |\n|---|---|\n" + "".join(rows)


def readme_script(title: str) -> str:
    """The first Python script below a heading of the README, which a test runs."""
    section = (ROOT / "README.md").read_text().partition(f"\n## {title}")[2]
    start, end = section.index("```python\n"), section.index("```\n\n")
    return section[start:end] + "```\n"


def generated(kind: str) -> str:
    """The content of one generated part."""
    if kind == "variables":
        return variables_table()
    if kind.startswith("map "):
        return folder_map(kind.removeprefix("map "))
    if kind.startswith("readme "):
        return readme_script(kind.removeprefix("readme "))
    return help_text(kind.removeprefix("help "))


def renewed(path: Path) -> str:
    """The content that `path` must have."""
    if path == REFERENCE:
        return reference()
    return GENERATED.sub(
        lambda found: f"{found[1]}\n{generated(found[2])}\n{found[3]}", path.read_text()
    )


def pages() -> list[Path]:
    """Every page with a generated part."""
    written = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    return [REFERENCE, *(path for path in sorted(written) if GENERATED.search(path.read_text()))]


def main() -> None:
    check = "--check" in sys.argv[1:]
    stale = [path for path in pages() if not path.exists() or path.read_text() != renewed(path)]
    for path in stale:
        if not check:
            path.write_text(renewed(path))
        click.echo(f"{'stale' if check else 'wrote'}: {path.relative_to(ROOT)}", err=True)
    sys.exit(bool(stale) and check)


if __name__ == "__main__":
    main()
