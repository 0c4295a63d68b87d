"""YAML files: strict, with the line of every key, and bounded in size, depth and aliases.

Numbers such as `1e-6`, which YAML 1.1 reads as strings, are numbers here.
"""

import re
import typing
from collections.abc import Hashable, Iterable
from pathlib import Path
from typing import Any

import yaml

from kit.errors import ConfigError

Location = tuple[str | int, ...]
MAX_BYTES = 1 << 20
MAX_NODES = 50_000  # keys and values, with those that aliases repeat
TOO_MANY = f"there are more than {MAX_NODES} values in it"
MAX_DEPTH = 100


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads YAML 1.2 floats and refuses duplicate keys."""

    _depth = _nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        # Here and not after the whole is read: the scanner takes a time that is quadratic in depth.
        self._depth += 1
        self._nodes += 1
        if self._depth > MAX_DEPTH:
            raise RecursionError
        if self._nodes > MAX_NODES and parent is not None:
            _refuse(parent, TOO_MANY)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not _is_hashable(key):
                raise yaml.MarkedYAMLError(
                    problem="a list or a mapping cannot be a key", problem_mark=key_node.start_mark
                )
            if key in seen and key != "<<":
                raise yaml.MarkedYAMLError(
                    problem=f"key `{shortened(str(key))}` is given twice",
                    problem_mark=key_node.start_mark,
                )
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"""^(?:[-+]?(?:\d[\d_]*)\.[\d_]*(?:[eE][-+]?\d+)?
        |[-+]?\d[\d_]*[eE][-+]?\d+
        |\.[\d_]+(?:[eE][-+]?\d+)?
        |[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$""",
        re.VERBOSE,
    ),
    list("-+0123456789."),
)


def read_yaml(path: Path) -> tuple[dict[str, Any], dict[Location, int]]:
    """Return the mapping in `path` and the line number of every key and item."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_BYTES + 1).decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(
            f"There is no file `{path}`", hint="Check the path, or run from the project's root"
        ) from None
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(
            f"`{path}` cannot be read: {exc}", hint="Check its permissions and its encoding (UTF-8)"
        ) from exc
    if len(text) > MAX_BYTES:
        raise ConfigError(
            f"`{path}` is larger than {MAX_BYTES >> 20} MiB", hint="Check that it is the right file"
        )
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is not None:
            _check_size(node)
        data = loader.construct_document(node) if node is not None else {}
    except yaml.YAMLError as exc:
        mark = getattr(exc, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        problem = getattr(exc, "problem", None) or getattr(exc, "reason", None) or str(exc)
        raise ConfigError(
            f"`{where}` is not valid YAML: {shortened(problem)}", hint="Fix that line"
        ) from exc
    except RecursionError:
        raise ConfigError(f"`{path}` is nested too deeply", hint="Write it flatter") from None
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as exc:
        # PyYAML's constructors of tagged and implicit types: a date such as 2001-99-99.
        raise ConfigError(
            f"`{path}` has a value that YAML cannot read: {shortened(str(exc))}",
            hint="Put texts that look like numbers or dates between quotes",
        ) from exc
    if not isinstance(data, dict):
        raise ConfigError(
            f"`{path}` is not a mapping at its top level", hint="Write `key: value` lines"
        )
    return data, dict(_lines(node)) if node is not None else {}


def _is_hashable(key: object) -> bool:
    try:
        hash(key)
    except TypeError:
        return False
    return True


def _check_size(root: yaml.Node) -> None:
    """Refuse a document whose aliases make it huge, or part of itself.

    An alias costs a few bytes, but everything that walks the document meets its value again.
    """
    sizes: dict[int, int] = {}
    open_nodes: set[int] = set()
    found = [root]
    while found:
        node = found[-1]
        if id(node) in sizes or isinstance(node, yaml.ScalarNode):
            sizes.setdefault(id(node), 1)
            found.pop()
            continue
        entries = node.value
        is_mapping = isinstance(node, yaml.MappingNode)
        parts = [part for entry in entries for part in entry] if is_mapping else entries
        if id(node) not in open_nodes:
            open_nodes.add(id(node))
            found += parts
            if len(open_nodes) > MAX_DEPTH:
                raise RecursionError
            if open_nodes.intersection(map(id, parts)):
                _refuse(node, "an alias contains itself")
            continue
        found.pop()
        open_nodes.discard(id(node))
        sizes[id(node)] = 1 + sum(sizes[id(part)] for part in parts)
        if sizes[id(node)] > MAX_NODES:
            _refuse(node, TOO_MANY)


def _refuse(node: yaml.Node, problem: str) -> typing.NoReturn:
    raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def shortened(text: str) -> str:
    """The beginning of a text, on one line: a fault may be as long as its file."""
    line = " ".join(text.split())
    return line if len(line) <= 120 else f"{line[:117]}…"


def _lines(node: yaml.Node, at: Location = ()) -> Iterable[tuple[Location, int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            place = (*at, key.value)
            yield place, key.start_mark.line + 1
            yield from _lines(value, place)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            place = (*at, index)
            yield place, value.start_mark.line + 1
            yield from _lines(value, place)
