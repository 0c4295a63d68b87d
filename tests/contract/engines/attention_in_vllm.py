"""Attention in vLLM's FlashAttention backend, where a plain formula replaces FlashAttention.

A part of `kernels_in_vllm.py`, which imports it before our hooks.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention.attention import unified_attention_with_output
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends import flash_attn
from vllm.v1.kv_cache_interface import FullAttentionSpec

HEADS, KV_HEADS, SIZE, PAGE, PAGES = 6, 2, 64, 16, 64
LAYER = "layer"  # the name under which vLLM finds it
own_build = flash_attn.FlashAttentionMetadataBuilder.build
own_forward = flash_attn.FlashAttentionImpl.forward


@dataclass
class Batch:
    """Tokens that each request adds, and has in all. `padding` tokens belong to no request."""

    counts: list[int]
    lengths: list[int]
    padding: int = 0
    graphs: CUDAGraphMode = CUDAGraphMode.FULL_AND_PIECEWISE

    def metadata(self, table: Tensor) -> CommonAttentionMetadata:
        starts = torch.tensor([0, *self.counts]).cumsum(0).int()
        tokens = sum(self.counts) + self.padding
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=torch.tensor(self.lengths).int(),
            num_reqs=len(self.counts),
            num_actual_tokens=tokens,
            max_query_len=max(self.counts),
            max_seq_len=max(self.lengths),
            block_table_tensor=table,
            slot_mapping=torch.zeros(tokens, dtype=torch.int64),
        )


BATCHES = {
    "decodes": Batch([1, 1, 1], [5, 70, 33]),
    "mixed": Batch([1, 1, 7, 9], [5, 70, 40, 9]),
    "prompt first": Batch([9, 1], [9, 70]),
    "padded requests": Batch([1, 1, 1, 1], [5, 70, 0, 0]),
    "padded tokens": Batch([1, 1], [5, 70], padding=2),
    "padded mixed": Batch([1, 1, 7], [5, 70, 40], padding=7),
    "graphs of mixed batches": Batch([1, 1], [5, 70], graphs=CUDAGraphMode.FULL),
}


class FlashAttention:
    """Stands for FlashAttention 3, and records the batches that it is given."""

    def __init__(self) -> None:
        self.batches: list[dict[str, Any]] = []
        flash_attn.flash_attn_varlen_func = self
        flash_attn.get_flash_attn_version = lambda *_, **__: 3
        flash_attn.flash_attn_supports_kv_cache_dtype = lambda *_, **__: True
        flash_attn.flash_attn_supports_quant_query_input = lambda: True
        flash_attn.get_scheduler_metadata = self.plan

    def plan(self, *, batch_size: int, **_: Any) -> Tensor:
        return torch.ones(4 * batch_size + 1, dtype=torch.int32)

    def __call__(
        self, *, q: Tensor, k: Tensor, v: Tensor, out: Tensor, cu_seqlens_q: Tensor,
        seqused_k: Tensor, block_table: Tensor, softmax_scale: float, q_descale: Tensor,
        k_descale: Tensor, v_descale: Tensor, scheduler_metadata: Tensor | None, num_splits: int,
        causal: bool, max_seqlen_q: int, max_seqlen_k: int, **_: Any,
    ) -> Tensor:  # fmt: skip
        lengths, counts, start = seqused_k.tolist(), cu_seqlens_q.diff().tolist(), 0
        assert causal and max(counts) <= max_seqlen_q and max(lengths) <= max_seqlen_k
        assert len(lengths) == len(counts) == len(block_table)
        assert cu_seqlens_q[0] == 0 and cu_seqlens_q[-1] <= len(q) == len(out)
        planned = scheduler_metadata is not None
        self.batches.append({"tokens": counts, "planned": planned, "splits": num_splits})
        fp8 = q.dtype == torch.float8_e4m3fn
        for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            pages, here = block_table[row].long(), slice(start, start + count)
            start += count
            queries = q[here].float() * (q_descale[row, 0] if fp8 else 1)
            keys, values = (
                cache[pages].flatten(0, 1)[:length].float().repeat_interleave(HEADS // KV_HEADS, 1)
                * (scale[row, 0] if fp8 else 1)
                for cache, scale in ((k, k_descale), (v, v_descale))
            )
            scores = torch.einsum("qhd,khd->hqk", queries, keys) * softmax_scale
            later = torch.arange(length) > torch.arange(length - count, length)[:, None]
            weights = scores.masked_fill(later, -torch.inf).softmax(-1)
            out[here] = torch.einsum("hqk,khd->qhd", weights, values)
        return out


def attention(config: VllmConfig) -> dict[str, Any]:
    """Compare with vLLM alone: `name -> error`, and what FlashAttention was given beside us."""
    flash, facts = FlashAttention(), {}
    for kind in ("float16", "fp8"):
        fp8 = kind == "fp8"
        cache = torch.randn(PAGES, KV_HEADS, PAGE, 2 * SIZE).half()
        layer = SimpleNamespace(
            impl=flash_attn.FlashAttentionImpl(HEADS, SIZE, SIZE**-0.5, KV_HEADS, None, None, kind),
            kv_cache=cache.to(torch.float8_e4m3fn).view(torch.uint8) if fp8 else cache,
            _q_scale=torch.tensor(0.5),
            _k_scale=torch.tensor(0.7),
            _v_scale=torch.tensor(1.3),
        )
        config.compilation_config.static_forward_context[LAYER] = layer
        for name, batch in BATCHES.items():
            config.compilation_config.cudagraph_mode = batch.graphs
            tokens = sum(batch.counts) + batch.padding
            query = torch.randn(tokens, HEADS, SIZE).half()
            query = query.to(torch.float8_e4m3fn) if fp8 else query
            error, facts[f"FlashAttention {kind} {name}"] = differences(
                config, layer, batch, query, flash
            )
            facts[f"attention {kind} {name}"] = error
    return facts


def differences(
    config: VllmConfig, layer: Any, batch: Batch, query: Tensor, flash: FlashAttention
) -> tuple[float, list[dict[str, Any]]]:
    """The error of two groups of layers, which share metadata but for the tables of pages."""
    spec = FullAttentionSpec(
        block_size=PAGE, num_kv_heads=KV_HEADS, head_size=SIZE, dtype=torch.float16
    )
    builder = flash_attn.FlashAttentionMetadataBuilder(spec, [LAYER], config, torch.device("cpu"))
    rows = len(batch.counts)
    tables = torch.randperm(PAGES).int()[: 2 * 6 * rows].view(2, rows, 6)
    common = batch.metadata(tables[0])
    own = own_build(builder, 0, common)
    ours = builder.build(common_prefix_len=0, common_attn_metadata=common)
    found, exact = torch.full((2, 2, *query.shape), torch.nan, dtype=torch.float16)
    for number, table in enumerate(tables):
        flash.batches = []
        given = builder.update_block_table(own, table, common.slot_mapping)
        own_forward(layer.impl, layer, query, None, None, layer.kv_cache, given, exact[number])
        flash.batches = []
        if number:
            ours = builder.update_block_table(ours, table, common.slot_mapping)
        with set_forward_context({LAYER: ours}, config, slot_mapping={}):
            unified_attention_with_output(query, None, None, found[number], LAYER)
    real = slice(sum(batch.counts))
    difference = (found[:, real].float() - exact[:, real].float()).norm()
    return float(difference / exact[:, real].float().norm()), flash.batches
