"""A tokenizer in GGUF: llama.cpp has no `tokenizer.json`, but knows the usual rules by name."""

import contextlib
import json
from pathlib import Path
from typing import Any

from trainer.base_model.tokenizer import END_OF_TURN, TOOL_TAGS, Tokenizer
from trainer.errors import BadRequest, ModelError

_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_GPT2, _DIGITS = "GPT-2's expression", "single digits"
# How a text is split before merges apply, and whether a whole word that is a token skips them ->
# llama.cpp's name of that rule.
RULES = {
    ((_GPT2,), False): "gpt-2",
    ((_DIGITS, _GPT2), False): "smollm",
    ((rf"{_ENDINGS}|{_LETTERS}|\p{{N}}|{_REST}",), False): "qwen2",
    ((rf"{_ENDINGS}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}",), True): "llama-bpe",
    ((rf"{_ENDINGS}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}",), False): "smaug-bpe",
    (
        (
            rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}|"
            r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ),
        True,
    ): "tekken",
}
# llama.cpp wants at least one merge. No text has this character, so this one never applies.
NO_MERGE = "\ufffe \ufffe"


def add_tokenizer(writer: Any, directory: Path, vocab_size: int) -> None:
    """Add the tokenizer in `directory` to `writer`, or raise if llama.cpp cannot have it."""
    from gguf import SpecialVocab

    source = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    model = source["model"]
    if model.get("type", "BPE") != "BPE":
        raise _unknown(directory, f"is of type `{model['type']}`, not `BPE`")
    byte_level = _is_byte_level(source)
    writer.add_tokenizer_model("gpt2" if byte_level else "llama")
    writer.add_tokenizer_pre(_rule(source, directory) if byte_level else "default")
    tokens, types = _tokens(source, vocab_size, directory, byte_level=byte_level)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    special = SpecialVocab(directory, load_merges=byte_level, n_vocab=vocab_size)
    if byte_level:
        special.merges = special.merges or [NO_MERGE]
    else:
        writer.add_token_scores(_scores(model, tokens))
        writer.add_add_space_prefix(_adds_space(source, directory))
    special.chat_template = None
    with contextlib.suppress(ModelError):  # a model without a template still completes texts
        special.chat_template = Tokenizer(directory).template_source
    special.add_special_token = {"bos": adds_bos(directory), "eos": False}
    ends = [tokens.index(token) for token in END_OF_TURN if token in tokens]
    if ends and special.special_token_ids.get("eos") != ends[0]:
        special.special_token_ids["eot"] = ends[0]
    special.add_to_gguf(writer, quiet=True)


def _is_byte_level(source: dict[str, Any]) -> bool:
    return any(part["type"] == "ByteLevel" for part in _parts(source, "pre_tokenizer"))


def _rule(source: dict[str, Any], directory: Path) -> str:
    model = source["model"]
    for part in _parts(source, "normalizer"):
        if part["type"] != "NFC":  # llama.cpp leaves it out, and models hardly notice
            raise _unknown(directory, f"normalizes with `{part['type']}`")
    split: list[str] = []
    for part in _parts(source, "pre_tokenizer"):
        kind = part["type"]
        if kind == "ByteLevel" and not part.get("add_prefix_space"):
            split += [_GPT2] if part.get("use_regex", True) else []
        elif kind == "Digits" and part.get("individual_digits"):
            split.append(_DIGITS)
        elif kind == "Split" and part["behavior"] == "Isolated" and "Regex" in part["pattern"]:
            split.append(part["pattern"]["Regex"])
        else:
            raise _unknown(directory, f"splits texts with `{kind}` in a way of its own")
    if not split and not model["merges"]:
        return "gpt-2"  # each byte is a token, wherever a text is split
    rule = RULES.get((tuple(split), bool(model.get("ignore_merges"))))
    if rule is None:
        raise _unknown(directory, "splits texts by a rule without a name in llama.cpp")
    return rule


def _tokens(
    source: dict[str, Any], vocab_size: int, directory: Path, *, byte_level: bool
) -> tuple[list[str], list[int]]:
    from gguf import TokenType

    # Models often have more rows of weights than their tokenizer has tokens.
    tokens = [f"[PAD{index}]" for index in range(vocab_size)]
    types = [TokenType.UNUSED] * vocab_size
    added = {token["id"]: token for token in source.get("added_tokens", [])}
    known = {index: token for token, index in source["model"]["vocab"].items()}
    known |= {index: token["content"] for index, token in added.items()}
    if max(known) >= vocab_size:
        raise ModelError(
            f"The tokenizer in `{directory}` has token `{max(known)}`, but the model only "
            f"`{vocab_size}` tokens",
            hint="Use the tokenizer that belongs to the model",
        )
    for index, token in known.items():
        tokens[index] = token
        types[index] = TokenType.NORMAL
        if index in added:
            # Tags of tool calls are text of an answer, also where a model has them as special.
            special = added[index]["special"] and token not in TOOL_TAGS
            types[index] = TokenType.CONTROL if special else TokenType.USER_DEFINED
        elif not byte_level and len(token) == 6 and token.startswith("<0x"):
            types[index] = TokenType.BYTE
    unknown = source["model"].get("unk_token")
    if unknown in tokens and not byte_level:
        types[tokens.index(unknown)] = TokenType.UNKNOWN
    return tokens, [int(kind) for kind in types]


def _scores(model: dict[str, Any], tokens: list[str]) -> list[float]:
    """SentencePiece merges the pair with the highest score first; merges are in that order."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(model["merges"]):
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        ranks.setdefault(left + right, rank)
    return [-float(ranks.get(token, len(ranks))) for token in tokens]


def _adds_space(source: dict[str, Any], directory: Path) -> bool:
    """Whether a text starts with the space of its first word: Llama 2's and Mistral's tokenizers.

    Their old form prepends it in the normalizer, the new one in the pre-tokenizer.
    """
    if not source["model"].get("byte_fallback"):
        raise _unknown(directory, "is neither of bytes nor has tokens for unknown bytes")
    for part in (*_parts(source, "normalizer"), *_parts(source, "pre_tokenizer")):
        kind = part["type"]
        if kind == "Prepend" and part["prepend"] == "▁":
            return True
        if kind == "Metaspace":
            return bool(part.get("prepend_scheme", "always") != "never")
        if kind != "Replace":
            raise _unknown(directory, f"prepares texts with `{kind}`")
    return False


def adds_bos(directory: Path) -> bool:
    """Whether llama.cpp starts every text with the BOS token.

    In a chat it replaces the one that the template writes. A model whose template writes none was
    trained without one.
    """
    from gguf import SpecialVocab

    adds = bool(SpecialVocab(directory).add_special_token.get("bos"))
    tokenizer = Tokenizer(directory)
    start = tokenizer.special_tokens.get("bos_token")
    if not adds or start is None:
        return False
    try:
        return tokenizer.render([{"role": "user", "content": "Hi"}]).startswith(start)
    except (ModelError, BadRequest):  # no template, or one for other messages
        return True


def _parts(source: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The steps of a `normalizer` or `pre_tokenizer`, out of their sequences."""
    found = source.get(name)
    if not found:
        return []
    nested = {"Sequence": found.get("normalizers") or found.get("pretokenizers")}
    inner = nested.get(found["type"])
    if inner is None:
        return [found]
    return [step for part in inner for step in _parts({name: part}, name)]


def _unknown(directory: Path, why: str) -> ModelError:
    return ModelError(
        f"The tokenizer in `{directory}` cannot be written as GGUF: it {why}",
        hint="Export without `--gguf`, and convert with llama.cpp's `convert_hf_to_gguf.py`",
    )
