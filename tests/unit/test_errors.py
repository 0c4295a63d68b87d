import pickle

import pytest

import launcher.errors
import trainer.errors
from kit.errors import KitError

ERRORS = [
    kind
    for module in (launcher.errors, trainer.errors)
    for kind in vars(module).values()
    if isinstance(kind, type) and issubclass(kind, KitError)
]


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_every_error_survives_pickling_with_its_hint(kind: type[KitError]) -> None:
    error = pickle.loads(pickle.dumps(kind("`x` broke", hint="Mend `x`")))
    assert (type(error), error.message, error.hint) == (kind, "`x` broke", "Mend `x`")
