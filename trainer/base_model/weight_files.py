"""The weight files of a base model: which they are, and whether they fit its config. No torch.

Only the headers are read, so that a damaged model is reported before any process loads it.
"""

from pathlib import Path

from safetensors import SafetensorError, safe_open

from trainer.base_model.architecture import Architecture
from trainer.base_model.json_files import AGAIN, read_object
from trainer.errors import ModelError

INDEX = "model.safetensors.index.json"
DTYPES = ("F64", "F32", "F16", "BF16")


def shards(directory: Path) -> list[Path]:
    """The files that hold the weights."""
    index = directory / INDEX
    if index.is_file():
        names = read_object(index).get("weight_map")
        if not isinstance(names, dict) or not names:
            raise ModelError(f"`{index}` has no `weight_map`", hint=AGAIN)
        for name in names.values():
            if not isinstance(name, str) or Path(name).name != name:
                raise ModelError(f"`{index}` names the file `{name!s:.60}`", hint=AGAIN)
        found = [directory / name for name in sorted(set(names.values()))]
        if missing := [path for path in found if not path.is_file()]:
            raise ModelError(f"`{index}` names `{missing[0].name}`, which is missing", hint=AGAIN)
        return found
    if (single := directory / "model.safetensors").is_file():
        return [single]
    return sorted(directory.glob("*.safetensors"))


def check_weights(directory: Path, architecture: Architecture) -> None:
    """Raise ModelError unless every weight is there, with the shape that the config requires."""
    expected = expected_shapes(architecture)
    found: set[str] = set()
    files = shards(directory)
    for path in files:
        try:
            with safe_open(path, framework="np") as file:
                for name in set(file.keys()) & expected.keys():
                    part = file.get_slice(name)
                    _check(path, name, tuple(part.get_shape()), part.get_dtype(), expected[name])
                    found.add(name)
        except (SafetensorError, OSError, ValueError) as exc:
            raise ModelError(f"`{path}` cannot be read: {exc}", hint=AGAIN) from exc
    if missing := sorted(expected.keys() - found):
        where = files[0] if len(files) == 1 else directory
        raise ModelError(f"The weights in `{where}` lack `{missing[0]}`", hint=AGAIN)


def _check(
    path: Path, name: str, shape: tuple[int, ...], dtype: str, expected: tuple[int, ...]
) -> None:
    if shape != expected:
        raise ModelError(
            f"`{name}` in `{path}` has shape `{list(shape)}`, not `{list(expected)}`",
            hint="The weights and `config.json` belong to different models: download it again",
        )
    if dtype not in DTYPES:
        raise ModelError(
            f"`{name}` in `{path}` is stored as `{dtype}`",
            hint=f"Use weights in one of {', '.join(DTYPES)}",
        )


def expected_shapes(a: Architecture) -> dict[str, tuple[int, ...]]:
    """The shape of every weight, by its Hugging Face name."""
    q_dim, kv_dim = a.heads * a.head_dim, a.kv_heads * a.head_dim
    linears = {
        "self_attn.q_proj": (q_dim, a.dim, a.qkv_bias),
        "self_attn.k_proj": (kv_dim, a.dim, a.qkv_bias),
        "self_attn.v_proj": (kv_dim, a.dim, a.qkv_bias),
        "self_attn.o_proj": (a.dim, q_dim, a.output_bias),
        "mlp.gate_proj": (a.ffn_dim, a.dim, a.mlp_bias),
        "mlp.up_proj": (a.ffn_dim, a.dim, a.mlp_bias),
        "mlp.down_proj": (a.dim, a.ffn_dim, a.mlp_bias),
    }
    norms = {"input_layernorm": a.dim, "post_attention_layernorm": a.dim}
    if a.qk_norm:
        norms |= {"self_attn.q_norm": a.head_dim, "self_attn.k_norm": a.head_dim}
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (a.vocab_size, a.dim),
        "model.norm.weight": (a.dim,),
    }
    if not a.tied_embeddings:
        found["lm_head.weight"] = (a.vocab_size, a.dim)
    for layer in range(a.layers):
        at = f"model.layers.{layer}"
        for name, (outputs, inputs, bias) in linears.items():
            found[f"{at}.{name}.weight"] = (outputs, inputs)
            if bias:
                found[f"{at}.{name}.bias"] = (outputs,)
        for name, size in norms.items():
            found[f"{at}.{name}.weight"] = (size,)
    return found
