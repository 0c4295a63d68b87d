"""Makes vLLM on a Hopper GPU decode with our attention kernel.

With 512 requests, half of decoding is attention. FlashAttention 3 needs the same time for an fp8
cache as for bf16; `decode_kernel` needs half of it for fp8, and a sixth less for bf16
(`bench/decode_attention.py`). Tokens of prompts stay with FlashAttention. vLLM's workers load this
file, so it imports nothing of ours. A vLLM that lacks what is needed here decodes as it would
without us.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

logger = logging.getLogger("vllm.decode_attention")
SIZES = (64, 128, 256)  # of a head
ROWS = 16  # query heads of a key head, at most
FEWEST = 512  # requests times key heads; with fewer, FlashAttention is faster
# What vLLM sets for other kinds of attention.
SPECIAL = (
    "use_cascade",
    "rswa_prefix_lens",
    "mm_prefix_range_tensor",
    "mm_prefix_query_range_tensor",
)
CACHES = ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3")


def leading_decodes(metadata: Any) -> int:
    """Return how many requests at the head of a batch add one token each: vLLM puts them first."""
    if metadata.max_query_len == 1:
        return int(metadata.num_reqs)
    starts = metadata.query_start_loc_cpu[: metadata.num_reqs + 1]
    longer = (starts.diff() != 1).nonzero()
    return int(longer[0]) if len(longer) else int(metadata.num_reqs)


def after(metadata: Any, count: int) -> Any:
    """Return the metadata of the requests behind the first `count`, which add one token each."""
    kept = metadata.__dict__.get("after_decodes")
    # All layers of a step share it. vLLM copies metadata and replaces the table for other layers.
    if kept is None or kept[0] is not metadata.block_table:
        rest = replace(
            metadata,
            num_actual_tokens=metadata.num_actual_tokens - count,
            query_start_loc=metadata.query_start_loc[count:] - count,
            seq_lens=metadata.seq_lens[count:],
            block_table=metadata.block_table[count:],
            scheduler_metadata=None,  # it divides the whole batch
            max_num_splits=0,
        )
        kept = metadata.after_decodes = metadata.block_table, rest
    return kept[1]


def fits(layer: Any) -> bool:
    """Return whether the kernel computes what this layer of vLLM's FlashAttention computes."""
    return bool(
        layer.attn_type == "decoder"
        and layer.head_size in SIZES
        and layer.num_queries_per_kv <= ROWS
        and layer.kv_cache_dtype in CACHES
        and layer.alibi_slopes is None
        and tuple(layer.sliding_window) == (-1, -1)
        and not layer.logits_soft_cap
        and layer.sinks is None
        and layer.dcp_world_size == 1
        and not layer.batch_invariant_enabled
        and torch.cuda.get_device_capability() == (9, 0)
    )


def plain(metadata: Any) -> bool:
    """Return whether every token of a batch sees all tokens before it."""
    found = [getattr(metadata, name, None) for name in SPECIAL]
    return metadata.causal is True and all(it is None or it is False for it in found)


def install(
    backend: Any, full_graph: Any, attend: Callable[..., None], fits: Callable[[Any], bool]
) -> None:
    """Let `attend` decode in vLLM's FlashAttention backend, a module, for the layers it fits."""
    builder, layer_class = backend.FlashAttentionMetadataBuilder, backend.FlashAttentionImpl
    build, forward = builder.build, layer_class.forward

    def counting(
        self: Any, common_prefix_len: int, common_attn_metadata: Any, *others: Any, **named: Any
    ) -> Any:
        found = build(self, common_prefix_len, common_attn_metadata, *others, **named)
        config = self.vllm_config
        # A graph of whole batches is captured with requests that decode, and replayed for prompts.
        whole = config.compilation_config.cudagraph_mode.mixed_mode() == full_graph
        count = 0
        if config.speculative_config is None and plain(found) and not whole:
            count = leading_decodes(common_attn_metadata)
        found.decodes = count
        return found

    def divided(
        self: Any, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any,
        attn_metadata: Any, output: Any, *others: Any, **named: Any,
    ) -> Any:  # fmt: skip
        count = getattr(attn_metadata, "decodes", 0)
        if not hasattr(self, "fits_kernel"):
            self.fits_kernel = fits(self)
        given = (key, value, kv_cache)
        scaled = any(it is not None for it in (*others, *named.values()))  # of a rounded output
        scales = (layer._q_scale, layer._k_scale, layer._v_scale)
        scaled |= any(scale.numel() != 1 for scale in scales)  # one for each head
        few = count * self.num_kv_heads < FEWEST
        if few or not self.fits_kernel or scaled:
            return forward(self, layer, query, *given, attn_metadata, output, *others, **named)
        tokens = min(count, attn_metadata.num_actual_tokens)
        attend(
            query[:tokens],
            kv_cache,
            output[:tokens],
            attn_metadata.block_table,
            attn_metadata.seq_lens,
            self.scale,
            scales,
            attn_metadata.max_seq_len,
        )
        if count < len(attn_metadata.seq_lens):  # the number of tokens may include padding
            rest = after(attn_metadata, count)
            parts = (query[count:], *given, rest, output[count:])
            forward(self, layer, *parts)
        return output

    builder.build, layer_class.forward = counting, divided


try:
    from decode_kernel import attend  # type: ignore[import-not-found]  # beside this file
    from vllm.config import CUDAGraphMode
    from vllm.v1.attention.backends import flash_attn

    install(flash_attn, CUDAGraphMode.FULL, attend, fits)
except (ImportError, AttributeError) as error:
    logger.warning("decoding without our attention kernel: %s", error)
