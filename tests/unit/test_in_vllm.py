"""What runs in vLLM's own process, without vLLM."""

import os
from dataclasses import dataclass
from itertools import accumulate, chain
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy
import pytest
import torch

from trainer.engines.in_vllm import stream_priority
from trainer.engines.in_vllm.decode_attention import install
from trainer.engines.in_vllm.light_scheduler import MOST, Held, scheduler
from trainer.engines.in_vllm.start_vllm import METHOD, in_fork, keep_forking


class Logprobs(NamedTuple):
    """As vLLM has the logprobs of a step, and those of a request in it."""

    logprob_token_ids: numpy.ndarray
    logprobs: numpy.ndarray
    sampled_token_ranks: numpy.ndarray
    cu_num_generated_tokens: list[int] | None = None

    def slice_request(self, index: int, tokens: int) -> "Logprobs":
        begin = self.cu_num_generated_tokens[index] if self.cu_num_generated_tokens else index
        return Logprobs(*(rows[begin : begin + tokens] for rows in self[:3]))


class Output(SimpleNamespace):
    __struct_fields__ = ("request_id", "new_token_ids", "new_logprobs", "finish_reason", "events",
                         "prefill_stats")  # fmt: skip


def output(request: str, *tokens: int, finish: str | None = None, **others: Any) -> Output:
    given = {"events": None, "prefill_stats": None, **others}
    return Output(
        request_id=request,
        new_token_ids=list(tokens),
        new_logprobs=None,
        finish_reason=finish,
        **given,
    )


class Own:
    """Stands for vLLM's scheduler: it answers with the outputs that it is given."""

    def __init__(self, vllm_config: Any) -> None:
        self.requests: dict[str, Any] = {}

    def update_from_output(self, outputs: list[Output], sampled: Any) -> dict[int, Any]:
        for index, each in enumerate(outputs):
            if each.finish_reason:
                del self.requests[each.request_id]
            if sampled.logprobs:
                rows = sampled.logprobs.slice_request(index, len(each.new_token_ids))
                each.new_logprobs = rows
        return {0: SimpleNamespace(outputs=outputs)}

    def finish_requests(self, request: str, status: str) -> None:
        del self.requests[request]


def updated(ours: Any, outputs: list[Output], *, wide: int = 0, logprobs: bool = True) -> Any:
    """The outputs that are handed over of a step. A token's logprob is its negative, its rank 1.

    `wide` is how many of the likeliest tokens another request wants to know.
    """
    tokens = [token for each in outputs for token in each.new_token_ids]
    counts = [len(each.new_token_ids) for each in outputs]
    ids = numpy.array([[token, *range(wide)] for token in tokens], dtype=numpy.int32)
    values = -ids.astype(numpy.float32)
    starts = None if max(counts) == 1 else [0, *accumulate(counts)]
    rows = Logprobs(ids, values, numpy.ones(len(tokens), dtype=numpy.int64), starts)
    sampled = SimpleNamespace(logprobs=rows if logprobs else None)
    return ours.update_from_output(outputs, sampled)[0].outputs


def create(**requests: Any) -> Any:
    config = SimpleNamespace(scheduler_cls="ours", get_scheduler_cls=lambda: Own)
    created = scheduler(SimpleNamespace(scheduler_config=config))
    assert config.scheduler_cls == "ours"
    for name, (kind, detokenize, logprobs) in requests.items():
        parameters = SimpleNamespace(
            output_kind=SimpleNamespace(name=kind), detokenize=detokenize, logprobs=logprobs
        )
        created.requests[name] = SimpleNamespace(sampling_params=parameters)
    return created


FLAT = ("FINAL_ONLY", False, 0)


def test_a_step_may_have_more_logprobs_for_another_request() -> None:
    ours = create(flat=FLAT, likeliest=("FINAL_ONLY", False, 2))
    ours._held["flat"] = Held(MOST)
    (first,) = updated(ours, [output("flat", 4), output("likeliest", 9)], wide=2)
    assert first.request_id == "likeliest"  # what it wants is not held
    assert first.new_logprobs.logprobs.tolist() == [[-9.0, 0.0, -1.0]]
    assert updated(ours, [output("flat", 5)]) == []
    (whole,) = updated(ours, [output("flat", 6, finish="length")])
    assert whole.new_logprobs.logprob_token_ids.tolist() == [[4], [5], [6]]
    assert whole.new_logprobs.logprobs.tolist() == [[-4.0], [-5.0], [-6.0]]
    assert whole.new_logprobs.sampled_token_ranks.tolist() == [1, 1, 1]
    types = [rows.dtype for rows in whole.new_logprobs[:3]]
    assert types == [numpy.int32, numpy.float32, numpy.int64]


def test_choices_that_begin_together_are_handed_over_in_parts_by_turns() -> None:
    names = [str(number) for number in range(2 * MOST)]
    ours = create(**dict.fromkeys(names, FLAT))
    parts: dict[str, list[Output]] = {name: [] for name in names}
    for token in range(4 * MOST):
        handed = updated(ours, [output(name, token) for name in names])
        assert len(handed) == 2  # of all choices, in every step
        for part in handed:
            parts[part.request_id].append(part)
    for part in updated(ours, [output(name, 7, finish="length") for name in names]):
        parts[part.request_id].append(part)
    for taken in parts.values():
        tokens = list(chain.from_iterable(part.new_token_ids for part in taken))
        assert tokens == [*range(4 * MOST), 7]
        logprobs = numpy.concatenate([part.new_logprobs.logprobs for part in taken])
        assert logprobs[:, 0].tolist() == [-float(token) for token in tokens]
        assert max(len(part.new_token_ids) for part in taken) == MOST
        assert [part.finish_reason for part in taken] == [None] * (len(taken) - 1) + ["length"]
    assert not ours._held


def test_a_step_may_have_several_tokens_of_a_request() -> None:
    ours = create(one=FLAT, other=FLAT)
    ours._held |= {"one": Held(MOST), "other": Held(MOST)}
    assert updated(ours, [output("one", 1, 2), output("other", 3)]) == []
    last = [output("one", 4, finish="stop"), output("other", 5, 6, finish="stop")]
    one, other = updated(ours, last)
    assert one.new_token_ids == [1, 2, 4] and other.new_token_ids == [3, 5, 6]
    assert one.new_logprobs.logprobs.tolist() == [[-1.0], [-2.0], [-4.0]]
    assert other.new_logprobs.logprobs.tolist() == [[-3.0], [-5.0], [-6.0]]


def test_an_end_without_a_token_keeps_what_was_held() -> None:
    ours = create(flat=FLAT)
    ours._held["flat"] = Held(MOST)
    assert updated(ours, [output("flat", 4)]) == []
    (whole,) = updated(ours, [output("flat", finish="abort")], logprobs=False)
    assert (whole.new_token_ids, whole.finish_reason) == ([4], "abort")
    assert whole.new_logprobs.logprobs.tolist() == [[-4.0]]


def test_a_part_says_what_all_of_its_outputs_say() -> None:
    ours = create(flat=FLAT)
    ours._held["flat"] = Held(MOST)
    first = output("flat", 5, events=["queued"], prefill_stats="prompt")
    for each in (first, output("flat", 6)):
        assert updated(ours, [each], logprobs=False) == []
    (whole,) = updated(ours, [output("flat", 7, finish="stop")], logprobs=False)
    assert (whole.new_token_ids, whole.finish_reason) == ([5, 6, 7], "stop")
    assert whole.new_logprobs is None
    assert (whole.events, whole.prefill_stats) == (["queued"], "prompt")
    assert not ours._held


@pytest.mark.parametrize(
    "kind", [("DELTA", False, 0), ("FINAL_ONLY", True, 0), ("FINAL_ONLY", False, 3)]
)
def test_tokens_that_somebody_waits_for_are_not_held(kind: tuple[str, bool, int]) -> None:
    ours = create(streamed=kind)
    (each,) = updated(ours, [output("streamed", 5)])
    assert each.new_token_ids == [5] and each.new_logprobs.logprobs.tolist() == [[-5.0]]
    (last,) = updated(ours, [output("streamed", 6, finish="length")])
    assert last.new_token_ids == [6] and isinstance(last.new_logprobs, Logprobs)


def test_nothing_is_kept_of_a_request_that_was_aborted() -> None:
    ours = create(gone=FLAT, stays=FLAT)
    updated(ours, [output("gone", 5), output("stays", 6)])
    ours.finish_requests("gone", "aborted")
    assert list(ours._held) == ["stays"]


def test_a_forked_process_answers_or_none_does() -> None:
    def dies() -> None:
        os._exit(3)

    assert in_fork(lambda: {"pid": os.getpid()})["pid"] != os.getpid()
    assert in_fork(lambda: 1 // 0) is None
    assert in_fork(dies) is None


def test_a_cpu_keeps_the_way_in_which_processes_are_to_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checked = []

    class Platform:
        def check_and_update_config(self, config: str) -> None:
            checked.append(config)
            os.environ[METHOD] = "spawn"

    platform = Platform()
    monkeypatch.setenv(METHOD, "fork")
    keep_forking(platform)
    platform.check_and_update_config("config")
    assert checked == ["config"]
    assert os.environ[METHOD] == "fork"


@dataclass
class Batch:
    """Stands for vLLM's metadata of a batch, and for what it is built from."""

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int = 64
    scheduler_metadata: object = "of the whole batch"
    max_num_splits: int = 32
    causal: object = True
    use_cascade: bool = False

    @property
    def num_reqs(self) -> int:
        return len(self.seq_lens)

    @property
    def query_start_loc_cpu(self) -> torch.Tensor:
        return self.query_start_loc


def batch(*lengths: int, **others: Any) -> Batch:
    starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    numbers = torch.arange(len(lengths))
    return Batch(starts, 50 + numbers, numbers[:, None], sum(lengths), max(lengths), **others)


class FlashAttention:
    """Stands for vLLM's backend: it answers with a request's number, made negative."""

    class FlashAttentionMetadataBuilder:
        def __init__(self, mixed_mode: str = "piecewise", speculative: object = None) -> None:
            mode = SimpleNamespace(mixed_mode=lambda: mixed_mode)
            compilation = SimpleNamespace(cudagraph_mode=mode)
            self.vllm_config = SimpleNamespace(
                compilation_config=compilation, speculative_config=speculative
            )

        def build(self, prefix: int, metadata: Batch, fast_build: bool = False) -> Batch:
            return metadata

    class FlashAttentionImpl:
        scale = 0.5
        num_kv_heads = 512

        def forward(self, layer: Any, query: Any, key: Any, value: Any, cache: Any,
                    attn_metadata: Any, output: Any, output_scale: Any = None) -> Any:  # fmt: skip
            if attn_metadata is None:
                return output
            lengths = attn_metadata.query_start_loc.diff()
            assert attn_metadata.num_actual_tokens == len(output) >= lengths.sum() > 0
            assert attn_metadata.query_start_loc[0] == 0
            assert (attn_metadata.scheduler_metadata is None) == hasattr(self, "rest")
            self.seen = attn_metadata
            found = -attn_metadata.block_table[:, 0].repeat_interleave(lengths)[:, None]
            output[: len(found)] = found
            return output


ONE = torch.ones(1)


def decoded(
    given: Any, fits: bool = True, scale: torch.Tensor = ONE, **builder: Any
) -> tuple[list[float], Any]:
    """The outputs of a batch's tokens, and the layer that computed them."""

    def attend(q: Any, cache: Any, out: Any, table: Any, lengths: Any, *others: Any) -> None:
        out[:] = table[: len(out)] + lengths[: len(out), None]

    backend = SimpleNamespace(
        FlashAttentionMetadataBuilder=type(
            "Builder", (FlashAttention.FlashAttentionMetadataBuilder,), {}
        ),
        FlashAttentionImpl=type("Layer", (FlashAttention.FlashAttentionImpl,), {}),
    )
    install(backend, "full", attend, lambda layer: fits)
    built = backend.FlashAttentionMetadataBuilder(**builder).build(0, given)
    layer = backend.FlashAttentionImpl()
    if built.decodes and built.decodes < built.num_reqs:
        layer.rest = True
    output = torch.full((given.num_actual_tokens, 1), torch.nan)
    query = torch.zeros_like(output)
    scales = SimpleNamespace(_q_scale=ONE, _k_scale=scale, _v_scale=scale)
    layer.forward(scales, query, query, query, None, built, output)
    return output[:, 0].tolist(), layer


def test_requests_that_add_a_token_are_decoded_by_our_kernel() -> None:
    assert decoded(batch(1, 1, 1))[0] == [50, 52, 54]
    outputs, layer = decoded(batch(1, 1, 3, 2))
    assert outputs == [50, 52, -2, -2, -2, -3, -3]
    assert layer.seen.max_num_splits == 0
    assert decoded(batch(3, 2))[0] == [0, 0, 0, -1, -1]


@pytest.mark.parametrize(("lengths", "found"), [((1, 1), [50, 52]), ((1, 3), [50, -1, -1, -1])])
def test_tokens_that_only_fill_a_graph_are_no_request(
    lengths: tuple[int, ...], found: list[float]
) -> None:
    given = batch(*lengths)
    given.num_actual_tokens += 4
    assert decoded(given)[0][: len(found)] == found


@pytest.mark.parametrize(
    "others", [{"causal": False}, {"causal": torch.ones(1)}, {"use_cascade": True}]
)
def test_special_attention_stays_with_vllm(others: dict[str, Any]) -> None:
    assert decoded(batch(1, 1, 1, **others))[0] == [0, -1, -2]


def test_what_the_kernel_does_not_fit_stays_with_vllm() -> None:
    assert decoded(batch(1, 1), fits=False)[0] == [0, -1]
    assert decoded(batch(1, 1), speculative="drafts")[0] == [0, -1]
    assert decoded(batch(1, 1), scale=torch.ones(2))[0] == [0, -1]
    # Graphs of whole batches are captured with requests that decode, and replayed for prompts.
    assert decoded(batch(1, 1, 2), mixed_mode="full")[0] == [0, -1, -2, -2]
    assert decoded(batch(1, 1), mixed_mode="full")[0] == [0, -1]


def test_vllms_streams_get_the_priority_that_the_learner_knows() -> None:
    made: list[tuple[int, dict[str, Any]]] = []
    calls: list[Any] = []

    class Stream:
        def __new__(cls, device: Any = None, priority: int = 0, **others: Any) -> Any:
            made.append((priority, others))
            return object.__new__(cls)

        def __init__(self, *given: Any, **named: Any) -> None:
            pass

        def wait_stream(self, other: Any) -> None:
            calls.append(("waits for", other))

    class Worker:
        def init_device(self) -> None:
            calls.append("initialized")

    def set_stream(stream: Any) -> None:
        assert isinstance(stream, Stream)
        calls.append("set")

    cuda = SimpleNamespace(Stream=Stream, set_stream=set_stream, current_stream=lambda: "default")
    stream_priority.install(Worker, cuda, -1)
    Worker().init_device()
    assert calls == ["initialized", ("waits for", "default"), "set"] and made.pop() == (-1, {})
    Stream("a device", -3)
    Stream(priority=0)
    Stream(device="a device")
    Stream(stream_id=7, device_index=0, device_type=1)  # as torch returns the current one
    names = {"stream_id": 7, "device_index": 0, "device_type": 1}
    assert made == [(-3, {}), (0, {}), (-1, {}), (0, names)]
