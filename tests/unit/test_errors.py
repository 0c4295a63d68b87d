import ast
import pickle
from pathlib import Path

import pytest

import kit.errors
import launcher.errors
import trainer.errors
from kit.errors import KitError

ROOT = Path(kit.errors.__file__).parents[1]
MODULES = (kit.errors, launcher.errors, trainer.errors)
ERRORS = {
    kind.__name__: kind
    for module in MODULES
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, KitError)
}


@pytest.mark.parametrize("kind", ERRORS.values(), ids=ERRORS)
def test_every_error_keeps_its_message_and_hint_when_pickled(kind: type[KitError]) -> None:
    error = pickle.loads(pickle.dumps(kind("`x` broke", hint="Fix `x`")))
    assert (type(error), error.message, error.hint) == (kind, "`x` broke", "Fix `x`")


def test_every_error_is_defined_in_one_of_the_three_error_modules() -> None:
    # Reads the source instead of importing it: some modules need a GPU or a client's package.
    homes = {Path(str(module.__file__)) for module in MODULES}
    strays = [
        f"{path.relative_to(ROOT)}: {node.name}"
        for package in ("kit", "launcher", "trainer")
        for path in sorted((ROOT / package).rglob("*.py"))
        if path not in homes
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
        and any(ast.unparse(base).split(".")[-1] in ERRORS for base in node.bases)
    ]
    assert not strays


def test_every_error_is_drawn_in_its_modules_tree() -> None:
    for module in (launcher.errors, trainer.errors):
        drawn = set((module.__doc__ or "").replace("─", " ").split())
        own = {name for name, kind in ERRORS.items() if kind.__module__ == module.__name__}
        assert own <= drawn
