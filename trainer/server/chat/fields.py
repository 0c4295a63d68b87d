"""Fields of a chat request that change no answer, and those that are refused with their own hint.

`docs/api.md` lists all of them; `tests/unit/test_chat.py` compares the two.
"""

from typing import Any

from kit.types import Json
from trainer.errors import Unsupported

# Fields about storage, billing, caching and tracing at OpenAI and vLLM; and vLLM's flags for what
# every answer here holds anyway.
NO_EFFECT = frozenset(
    {
        "metadata",
        "store",
        "service_tier",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "verbosity",
        "user",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "cache_salt",
        "priority",
        "request_id",
        "include_reasoning",
    }
)
# Values that request the default behaviour. Any other value is refused by its key.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "modalities": (["text"],),
    "best_of": (1,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "add_special_tokens": (False,),
    "echo": (False,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "typical_p": (1, 1.0),
    "bad_words": ([],),
    "documents": ([],),
    "functions": ([],),
    "extra_body": ({},),
}
HINTS = {
    "functions": "Send `tools`, which replaced it; in a framework, choose its tool-calling agent",
    "function_call": "Send `tool_choice`, which replaced it",
    "audio": "Only text is served; remove the audio output from the agent",
    "modalities": 'Only text is served; send `["text"]`, or leave it out',
    "prediction": "Leave it out; it would only change the speed",
    "web_search_options": "Give the agent a function tool that searches",
    "best_of": "Send `n`, and choose among the choices yourself",
    "guided_decoding_backend": "Leave it out; there is one backend, llguidance",
    "guided_whitespace_pattern": "Leave it out; the white space of JSON is fixed",
    "prompt_logprobs": "Send the prompt to `/v1/completions` with `echo` and `logprobs`",
    "echo": "Send the prompt to `/v1/completions`, which has `echo`",
    "prompt": "Send `messages`, or use `/v1/completions`",
    "input": "Send `messages`, or use `/v1/responses`",
    "extra_body": "Send its fields as fields of the request itself",
}
EXTRA_FIELDS = ("engine_data",)  # of `nvext`; openpipe-art 0.5.23 sends it to every server


def refuse_unknown(fields: Json) -> None:
    """Refuse by name the first field that would change the answer."""
    for key, value in fields.items():
        if value is None or key in NO_EFFECT or value in NEUTRAL.get(key, ()):
            continue
        if key == "nvext":
            _check_nvext(value)
            continue
        hint = HINTS.get(key) or (
            f"Remove `{key}` from the agent's model settings (extra body, model kwargs)"
        )
        raise Unsupported(f"`{key}` is not supported", hint=hint, param=key)


def _check_nvext(value: Any) -> None:
    fields = value if isinstance(value, dict) else {"": value}
    for key, part in fields.items():
        wanted = part if isinstance(part, list) else [part]
        unknown = [name for name in wanted if name not in EXTRA_FIELDS]
        if key != "extra_fields" or unknown:
            place = f"nvext.{key}" if key else "nvext"
            value = f" `{unknown[0]}`" if key == "extra_fields" else ""
            raise Unsupported(
                f"`{place}`{value} is not supported",
                hint='Only `{"extra_fields": ["engine_data"]}` is taken',
                param=place,
            )
