"""Import TorchTune's modules without the packages that they would bring along unused.

A worker's start is mostly imports. Those avoided here are more than half of its CPU time.
"""

import contextlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch._compile import _disable_dynamo


@contextlib.contextmanager
def light_torchtune() -> Iterator[None]:
    """Within it, `torchtune.modules` can be imported, with little else."""
    # TorchTune's `__init__` imports its data sets, with pandas and pyarrow. The package is
    # registered without running it.
    spec = importlib.util.find_spec("torchtune")
    if spec and "torchtune" not in sys.modules:
        sys.modules["torchtune"] = importlib.util.module_from_spec(spec)
    with warnings.catch_warnings(), _without_torchao(), _without_compilers():
        # TorchTune 0.6.1 is older than our torch: its imports emit deprecation warnings.
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _without_torchao() -> Iterator[None]:
    """Put a stand-in for torchao in its place: TorchTune takes only weights in NF4 from it.

    Whoever imports torchao afterwards gets the real one.
    """
    if "torchao" in sys.modules:
        yield
        return
    stand_ins = [ModuleType(name) for name in ("torchao", "torchao.dtypes")]
    stand_ins.append(_Nf4("torchao.dtypes.nf4tensor"))
    sys.modules.update({module.__name__: module for module in stand_ins})
    try:
        yield
    finally:
        for module in stand_ins:
            del sys.modules[module.__name__]


@contextlib.contextmanager
def _without_compilers() -> Iterator[None]:
    """Mark functions as not to be compiled without importing the compilers, unused on a CPU.

    torch's own decorator for this purpose imports them at the first call of such a function.
    """
    disable = torch.compiler.disable
    torch.compiler.disable = _disable_dynamo  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compiler.disable = disable


class _Nf4(ModuleType):
    """What TorchTune imports from torchao. No weight of ours is in NF4, so none of it is called."""

    class NF4Tensor:
        """No tensor is one."""

    @staticmethod
    def implements(_: Any) -> Callable[[Any], Any]:
        return lambda function: function

    @staticmethod
    def to_nf4(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("No weight is stored in NF4")

    linear_nf4 = to_nf4
