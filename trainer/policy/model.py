"""The policy, assembled from TorchTune's modules. The only module that imports TorchTune.

Any Llama-like checkpoint in Hugging Face form becomes a `Policy` with rotate-half RoPE. Its
weights, and the LoRA trained on it, therefore have the same values here, in PEFT and in vLLM: only
the names differ. Weights are memory-mapped, and frozen ones are never copied.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainer.base_model.architecture import Architecture, read_architecture
from trainer.config import LoraConfig
from trainer.policy.attention import Mask, View, attend, inverse_frequencies, rotations
from trainer.policy.autograd_ops import lora_linear, rms_norm, rotate, swiglu
from trainer.policy.compiled import CompiledLayers
from trainer.policy.light_imports import light_torchtune
from trainer.policy.logprobs import chosen_logprobs
from trainer.policy.lora import (
    init_lora,
    load_lora,
    lora_parameters,
    lora_state,
    peft_config,
    read_lora_config,
)  # fmt: skip
from trainer.policy.shards import place_shards, shard
from trainer.policy.tree_mask import TreeMask
from trainer.policy.weights import hugging_face_names, place_weights

with light_torchtune():
    from torchtune.modules import (
        FeedForward,
        MultiHeadAttention,
        RMSNorm,
        TiedLinear,
        TransformerDecoder,
        TransformerSelfAttentionLayer,
    )
    from torchtune.modules.peft import LoRALinear

__all__ = [
    "LoraLinear", "Policy", "init_lora", "load_lora", "load_model", "lora_state",
    "peft_config", "read_lora_config",
]  # fmt: skip


class LoraLinear(LoRALinear):  # type: ignore[misc]
    """A frozen linear layer with a LoRA in fp32, because bf16 cannot hold AdamW's small steps."""

    def forward(self, x: Tensor) -> Tensor:
        if self.disabled:
            return nn.functional.linear(x, self.weight, self.bias)
        scale = self.alpha / self.rank
        return lora_linear(x, self.weight, self.bias, self.lora_a.weight, self.lora_b.weight, scale)


class Norm(RMSNorm):  # type: ignore[misc]
    """TorchTune's norm in fewer passes."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.scale, self.eps)


class Mlp(FeedForward):  # type: ignore[misc]
    """TorchTune's gated MLP in fewer passes."""

    def forward(self, x: Tensor) -> Any:
        return self.w2(swiglu(self.w1(x), self.w3(x)))


class Attention(MultiHeadAttention):  # type: ignore[misc]
    """TorchTune's attention with q and k normed before RoPE, as Qwen3 needs."""

    def forward(self, x: Tensor, view: View) -> Tensor:
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, self.num_heads, self.head_dim)
        k = self.k_proj(x).view(batch, length, self.num_kv_heads, self.head_dim)
        v = self.v_proj(x).view(batch, length, self.num_kv_heads, self.head_dim)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, view.cos, view.sin), rotate(k, view.cos, view.sin)
        out = attend(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), view.mask)
        result: Tensor = self.output_proj(out.transpose(1, 2).flatten(2))
        return result


class Layer(TransformerSelfAttentionLayer):  # type: ignore[misc]
    """TorchTune's layer, with the view passed on to its attention.

    `compiled` computes the same instead. FSDP gathers weights only for a layer that is called.
    """

    def forward(
        self, x: Tensor, view: View, compiled: Callable[[Tensor], Tensor] | None = None
    ) -> Tensor:
        if compiled is not None:
            return compiled(x)
        x = x + self.attn(self.sa_norm(x), view)
        out: Tensor = x + self.mlp(self.mlp_norm(x))
        return out


class Policy(TransformerDecoder):  # type: ignore[misc]
    """The model that is trained. `trainer.engines.decoder` builds its form for sampling."""

    architecture: Architecture
    lora: LoraConfig | None
    frequencies: Tensor
    activation_checkpointing: bool | None = None
    compiled: CompiledLayers | None = None
    """Runs packed rows on a GPU."""

    def hidden(
        self,
        tokens: Tensor,  # [B, T]
        *,
        mask: Mask = None,  # [B, T, T] True where a query may attend
        positions: Tensor | None = None,  # [B, T]
    ) -> Tensor:
        """Hidden states [B, T, D] after the last norm. Without a mask, attention is causal."""
        result: Tensor = self(tokens, mask=mask, positions=positions)
        return result

    def logprobs(
        self,
        tokens: Tensor,  # [B, T]
        *,
        mask: Mask,
        positions: Tensor,
        predictors: Tensor,  # [N] indices into the B * T tokens
        targets: Tensor,  # [N]
        chunk: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Logprobs [N] of `targets`, each predicted at its predictor, and entropies [N]."""
        result: tuple[Tensor, Tensor] = self(
            tokens, mask=mask, positions=positions, chosen=(predictors, targets, chunk)
        )
        return result

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., V] of hidden states [..., D], in the model's dtype."""
        result: Tensor = self.output(hidden)
        return result

    @property
    def head(self) -> Tensor:
        """The output matrix [V, D]."""
        owner = self.tok_embeddings if self.architecture.tied_embeddings else self.output
        weight: Tensor = owner.weight
        return weight

    def forward(
        self,
        tokens: Tensor,
        *,
        mask: Mask = None,
        positions: Tensor | None = None,
        chosen: tuple[Tensor, Tensor, int | None] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Compute `hidden`, or with `chosen` `logprobs`. FSDP gathers weights only in `forward`."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        dtype = self.tok_embeddings.weight.dtype
        view = View(*rotations(positions, self.frequencies, dtype), mask)
        fp8 = self.compiled.head_columns(self.head) if self.compiled and chosen else None
        x = self._through_layers(self.tok_embeddings(tokens), view)
        if chosen is None:
            normed: Tensor = self.norm(x)
            return normed
        predictors, targets, chunk = chosen
        # Only states that predict a chosen token go through the head.
        picked = self.norm(x.flatten(0, 1)[predictors])
        return chosen_logprobs(picked, self.head, targets, chunk=chunk, fp8=fp8)

    def _through_layers(self, x: Tensor, view: View) -> Tensor:
        if self.compiled and isinstance(view.mask, TreeMask):
            return self.compiled(x, view, recompute=self.activation_checkpointing)
        for layer in self.layers:
            if self.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(layer, x, view, use_reentrant=False)
            else:
                x = layer(x, view)
        return x

    def trainable(self) -> dict[str, nn.Parameter]:
        """The trained weights, by PEFT name with a LoRA and by Hugging Face name without."""
        if self.lora is not None:
            return lora_parameters(self)
        names = hugging_face_names(self)
        return {names[ours]: parameter for ours, parameter in self.named_parameters()}

    def set_lora_enabled(self, enabled: bool) -> None:
        """Switch the LoRA on or off. Without it, the policy computes as the base model."""
        for module in self.modules():
            if isinstance(module, LoraLinear):
                module.disabled = not enabled


def load_model(
    directory: Path,
    *,
    lora: LoraConfig | None,
    dtype: torch.dtype,
    device: torch.device,
    sharded_for: Literal["plain", "compiled"] | None = None,
    layers: int | None = None,
) -> Policy:
    """Load the policy in `directory`. With `lora` only the LoRA is trainable, else every weight.

    The LoRA is fresh and initialised from its seed. With `sharded_for`, each process of the process
    group loads its shard of the frozen weights, in the form that plain or compiled layers use.
    `layers` loads only the first ones.
    """
    architecture = read_architecture(directory)
    architecture = dataclasses.replace(architecture, layers=layers or architecture.layers)
    with torch.device("meta"):
        policy = assemble(architecture, lora)
    policy.architecture = architecture
    policy.lora = lora
    policy.frequencies = inverse_frequencies(architecture.rope, architecture.head_dim, device)
    if sharded_for is None:
        place_weights(policy, directory, dtype=dtype, device=device)
    else:
        shard(policy, dtype, joined=sharded_for == "compiled")
        place_shards(policy, directory, device=device)
    if lora is not None:
        policy.requires_grad_(False)
        init_lora(policy, lora.seed, device=device)
    policy.eval()
    return policy


def assemble(architecture: Architecture, lora: LoraConfig | None) -> Policy:
    """Build the policy without loading weights, on the current device or on `meta`."""
    embeddings = nn.Embedding(architecture.vocab_size, architecture.dim)
    return Policy(
        tok_embeddings=embeddings,
        layers=[_layer(architecture, lora) for _ in range(architecture.layers)],
        max_seq_len=architecture.max_length,
        num_heads=architecture.heads,
        head_dim=architecture.head_dim,
        norm=Norm(architecture.dim, eps=architecture.norm_eps),
        output=TiedLinear(embeddings)
        if architecture.tied_embeddings
        else nn.Linear(architecture.dim, architecture.vocab_size, bias=False),
    )


def _layer(architecture: Architecture, lora: LoraConfig | None) -> Layer:
    a = architecture
    q_dim, kv_dim = a.heads * a.head_dim, a.kv_heads * a.head_dim

    def linear(name: str, inputs: int, outputs: int, bias: bool) -> nn.Module:
        if lora is None or name not in lora.targets:
            return nn.Linear(inputs, outputs, bias=bias)
        return LoraLinear(inputs, outputs, rank=lora.rank, alpha=lora.alpha, use_bias=bias)

    attention = Attention(
        embed_dim=a.dim,
        num_heads=a.heads,
        num_kv_heads=a.kv_heads,
        head_dim=a.head_dim,
        q_proj=linear("q_proj", a.dim, q_dim, a.qkv_bias),
        k_proj=linear("k_proj", a.dim, kv_dim, a.qkv_bias),
        v_proj=linear("v_proj", a.dim, kv_dim, a.qkv_bias),
        output_proj=linear("o_proj", q_dim, a.dim, a.output_bias),
        q_norm=Norm(a.head_dim, eps=a.norm_eps) if a.qk_norm else None,
        k_norm=Norm(a.head_dim, eps=a.norm_eps) if a.qk_norm else None,
        max_seq_len=a.max_length,
    )
    mlp = Mlp(
        gate_proj=linear("gate_proj", a.dim, a.ffn_dim, a.mlp_bias),
        up_proj=linear("up_proj", a.dim, a.ffn_dim, a.mlp_bias),
        down_proj=linear("down_proj", a.ffn_dim, a.dim, a.mlp_bias),
    )
    return Layer(
        attention,
        mlp,
        sa_norm=Norm(a.dim, eps=a.norm_eps),
        mlp_norm=Norm(a.dim, eps=a.norm_eps),
    )
