"""Where our kernels replace vLLM's, without vLLM and without a GPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.engines.in_vllm import lora_linear, token_sampling
from trainer.engines.in_vllm.lora_linear import LARGEST_RANK, MOST_TOKENS

BATCH = tuple(torch.zeros(1) for _ in range(5))


class Ops(SimpleNamespace):
    """Stands for vLLM's operators, and for how one is added to them."""

    calls: list[str]

    def register(self, op_name: str, op_func: Any, mutates_args: list[str], fake_impl: Any) -> None:
        assert mutates_args == ["y"] and fake_impl(*BATCH) is None
        setattr(self, op_name, op_func)

    def lora_shrink(self, x: Tensor, a: list[Tensor], low: Tensor, *others: Any) -> None:
        assert low.shape == (len(a), len(x), a[0].shape[-2])
        self.calls.append("shrink")

    def lora_expand(self, low: Tensor, b: list[Tensor], y: Tensor, *others: Any) -> None:
        assert others[-2:] == (0, True)
        self.calls.append("expand")


def added(
    tokens: int = 4, rank: int = 8, *, slices: int = 2, none: bool = False, suits: bool = True,
    dtype: torch.dtype = torch.float32, **others: Any,
) -> list[str]:  # fmt: skip
    """Which kernels add a LoRA in vLLM's layer."""
    ops = Ops(calls=[])

    class Wrapper:
        lora_config = SimpleNamespace(specialize_active_lora=False)
        token_mapping_meta = SimpleNamespace(
            meta_args=lambda *_: (*BATCH, torch.tensor([none]), torch.ones(1))
        )

        def add_lora_linear(self, *given: Any, **others: Any) -> None:
            ops.calls.append("own")

    def add(*given: Any) -> None:
        ops.calls.append("ours")

    lora_linear.install(Wrapper, ops.register, ops, add, lambda: suits)
    x, y = torch.zeros(tokens, 6, dtype=dtype), torch.zeros(tokens, 5 * slices)
    a = tuple(torch.zeros(2, 1, rank, 6) for _ in range(slices))
    b = tuple(torch.zeros(2, 1, 5, rank) for _ in range(slices))
    Wrapper().add_lora_linear(y, x, a, b, 1.0, (5,) * slices, **others)
    return ops.calls


def test_our_kernels_add_loras_where_they_fit() -> None:
    assert added() == ["ours"]
    assert added(none=True) == []
    theirs = ["shrink", "expand"]
    assert added(MOST_TOKENS + 1) == theirs
    assert added(rank=LARGEST_RANK + 1) == theirs
    assert added(slices=4) == theirs
    assert added(dtype=torch.float16) == theirs
    assert added(suits=False) == theirs
    assert added(add_inputs=False) == ["own"]


@pytest.mark.parametrize(
    ("settings", "ours"),
    [
        ({"apply_temperature": False, "use_fp64": False, "cache": None}, True),
        ({"apply_temperature": True}, False),
        ({"apply_temperature": False, "use_fp64": True}, False),
        ({"apply_temperature": False, "cache": torch.zeros(2)}, False),
    ],
)
@pytest.mark.parametrize("fits", [True, False])
def test_our_kernels_sample_where_they_fit(
    settings: dict[str, Any], ours: bool, fits: bool
) -> None:
    theirs = SimpleNamespace(
        gumbel_sample=lambda *_, **__: "theirs", compute_token_logprobs=lambda *_: "theirs"
    )
    kernels = SimpleNamespace(sample=lambda *_: "ours", logprobs=lambda *_: "ours")
    token_sampling.install(theirs, theirs, kernels, lambda logits: fits)
    found = theirs.gumbel_sample(*(torch.zeros(3) for _ in range(5)), **settings)  # type: ignore[call-arg]
    assert found == ("ours" if ours and fits else "theirs")
    logprobs = theirs.compute_token_logprobs(torch.zeros(3, 4), torch.zeros(3, 1))
    assert logprobs == ("ours" if fits else "theirs")


def test_vllm_compiles_layers_with_our_operator() -> None:
    """As vLLM registers and traces it: a layer of any number of tokens, without graph breaks."""
    library = torch.library.Library("compiled_here", "FRAGMENT")

    def register(op_name: str, op_func: Any, mutates_args: list[str], fake_impl: Any) -> None:
        library.define(op_name + torch.library.infer_schema(op_func, mutates_args=mutates_args))
        library.impl(op_name, op_func, dispatch_key="CPU")
        library._register_fake(op_name, fake_impl)

    def add(y: Tensor, x: Tensor, a: list[Tensor], b: list[Tensor], *others: Any) -> None:
        low = [x @ one[0, 0].T for one in a]
        y += torch.cat([part @ one[0, 0].T for part, one in zip(low, b, strict=True)], dim=1)

    class Wrapper:
        lora_config = SimpleNamespace(specialize_active_lora=False)
        batch = (*BATCH, torch.tensor([False]), torch.ones(1))

        @property
        def token_mapping_meta(self) -> Any:
            return self

        def meta_args(self, tokens: int, special: bool) -> tuple[Tensor, ...]:
            return self.batch

        def add_lora_linear(self, *given: Any) -> None:
            raise AssertionError("vLLM's own")

    ops = torch.ops.compiled_here
    lora_linear.install(Wrapper, register, ops, add, lambda: True)
    wrapper, weight = Wrapper(), torch.randn(7, 6)
    a, b = ((torch.randn(1, 1, 2, 6),), (torch.randn(1, 1, 7, 2),))

    def layer(x: Tensor) -> Tensor:
        y = x @ weight.T
        wrapper.add_lora_linear(y, x, a, b, 1.0, (7,))
        return y.relu()

    compiled = torch.compile(layer, backend="aot_eager", dynamic=True, fullgraph=True)
    for tokens in (3, 5):
        x = torch.randn(tokens, 6)
        exact = (x @ weight.T + x @ a[0][0, 0].T @ b[0][0, 0].T).relu()
        torch.testing.assert_close(compiled(x), exact)
