"""Checks of a request that every engine makes before it samples, with one wording for all."""

from trainer.engines.engine import SampleRequest
from trainer.errors import BadRequest, TooLong

MOST_TOP_LOGPROBS = 20


def token_limit(request: SampleRequest, *, context: int, vocabulary: int) -> int:
    """Return how many tokens a choice may have, or raise what is wrong with the request."""
    prompt = request.prompt_ids
    if not prompt or max(prompt) >= vocabulary:
        raise BadRequest(
            "The prompt is empty, or contains a token that the model does not know",
            hint="Remove text that the tokenizer turns into an added special token",
        )
    room = context - len(prompt)
    wanted = 1 if request.max_tokens is None else request.max_tokens
    if wanted > room:
        # Agents tell this error from others by these words of OpenAI and vLLM.
        raise TooLong(
            f"{len(prompt)} prompt tokens and `max_tokens` {wanted} do not fit: "
            f"this model's maximum context length is {context} tokens"
        )
    limit = room if request.most_tokens is None else min(room, request.most_tokens)
    if limit < (0 if request.prompt_logprobs else 1):
        raise BadRequest("`max_tokens` must be at least 1")
    _check_settings(request, limit, vocabulary)
    return limit


def _check_settings(request: SampleRequest, limit: int, vocabulary: int) -> None:
    ranges = {
        "min_p": (0.0, 1.0),
        "frequency_penalty": (-2.0, 2.0),
        "presence_penalty": (-2.0, 2.0),
        "min_tokens": (0, limit),
        "top_logprobs": (0, MOST_TOP_LOGPROBS),
    }
    for name, (least, most) in ranges.items():
        value = getattr(request, name)
        if not least <= value <= most:
            raise BadRequest(f"`{name}` must be from {least} to {most}, not `{value}`")
    if not request.repetition_penalty > 0:
        raise BadRequest(
            f"`repetition_penalty` must be above 0, not `{request.repetition_penalty}`"
        )
    if any(not -100 <= bias <= 100 for _, bias in request.logit_bias):
        raise BadRequest("The values of `logit_bias` must be from -100 to 100")
    for name, tokens in (
        ("logit_bias", [token for token, _ in request.logit_bias]),
        ("stop_token_ids", request.stop_token_ids),
    ):
        for token in tokens:
            if not 0 <= token < vocabulary:
                raise BadRequest(
                    f"`{name}` has the token id `{token}`, but the model has only "
                    f"{vocabulary} tokens"
                )
    if request.constraint:
        for name in ("min_tokens", "ignore_eos"):
            if getattr(request, name):
                raise BadRequest(
                    f"`{name}` cannot be combined with structured output, which decides "
                    "where the text ends",
                    hint=f"Remove `{name}`, or express the length in the schema or grammar",
                )
