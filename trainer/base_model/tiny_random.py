"""`tiny-random`: a deterministic Llama of about 1M parameters over bytes, created on the fly.

It has random weights, starts in milliseconds and is the model that the tests train. Its head_dim is
64, the smallest that vLLM's CPU kernels support. No torch here.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

SEED = 20250101
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "float32",
    "vocab_size": 256 + len(SPECIAL),
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": True,
    "bos_token_id": 256,
    "eos_token_id": 258,
    "pad_token_id": 259,
}
CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}
{{- messages[0].content + '\\n\\n' }}
{%- endif %}
{{- 'Tools you may call, one JSON schema a line:\\n<tools>' }}
{%- for tool in tools %}
{{- '\\n' + (tool | tojson) }}
{%- endfor %}
{{- '\\n</tools>\\nCall one with <tool_call>{"name": ..., "arguments": ...}</tool_call>' }}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
{{- '\\n</tool_response><|im_end|>\\n' }}
{%- elif message.role != 'system' or not tools or not loop.first %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
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


def write(directory: Path) -> None:
    """Write the model in Hugging Face form into `directory`."""
    from safetensors.numpy import save_file

    save_file(_weights(), directory / "model.safetensors", metadata={"format": "pt"})
    _tokenizer().save(str(directory / "tokenizer.json"))
    texts = {
        "config.json": CONFIG,
        "generation_config.json": {"eos_token_id": [258, 256], "pad_token_id": 259},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIAL[0],
            "eos_token": SPECIAL[2],
            "pad_token": SPECIAL[3],
            "model_max_length": CONFIG["max_position_embeddings"],
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    }
    for name, value in texts.items():
        (directory / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _weights() -> dict[str, NDArray[np.float32]]:
    # numpy's legacy generator is frozen, so every machine and version gets the same weights.
    random = np.random.RandomState(SEED)

    def normal(*shape: int, std: float) -> NDArray[np.float32]:
        return (random.standard_normal(shape) * std).astype(np.float32)

    dim, ffn, head_dim = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["head_dim"]
    q_dim = CONFIG["num_attention_heads"] * head_dim
    kv_dim = CONFIG["num_key_value_heads"] * head_dim
    # With weights of this size, attention and output depend on the input, but the next token stays
    # close to uniform, so there is much to learn.
    std = dim**-0.5
    weights = {"model.embed_tokens.weight": normal(CONFIG["vocab_size"], dim, std=0.05)}
    for layer in range(CONFIG["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        weights |= {
            f"{at}.self_attn.q_proj.weight": normal(q_dim, dim, std=std),
            f"{at}.self_attn.k_proj.weight": normal(kv_dim, dim, std=std),
            f"{at}.self_attn.v_proj.weight": normal(kv_dim, dim, std=std),
            f"{at}.self_attn.o_proj.weight": normal(dim, q_dim, std=std),
            f"{at}.mlp.gate_proj.weight": normal(ffn, dim, std=std),
            f"{at}.mlp.up_proj.weight": normal(ffn, dim, std=std),
            f"{at}.mlp.down_proj.weight": normal(dim, ffn, std=ffn**-0.5),
            f"{at}.input_layernorm.weight": np.ones(dim, np.float32),
            f"{at}.post_attention_layernorm.weight": np.ones(dim, np.float32),
        }
    weights["model.norm.weight"] = np.ones(dim, np.float32)
    return weights


def _tokenizer() -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    # One token per byte: byte-level letters in the order of the bytes they represent, no merges.
    vocabulary = {letter: byte for byte, letter in byte_letters().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], fuse_unk=False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL]
    )
    return tokenizer


def byte_letters() -> dict[int, str]:
    """The letter that represents each byte in byte-level tokenizers (GPT-2's convention)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    letters |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    return dict(sorted(letters.items()))
