"""The request of OpenAI's legacy completions: plain prompts, without a chat template."""

from typing import Any

from pydantic import Field

from trainer.base_model.tokenizer import Tokenizer
from trainer.engines.engine import SampleRequest
from trainer.errors import BadRequest, Unsupported
from trainer.server.chat.fields import refuse_unknown
from trainer.server.chat.sampling_fields import SamplingFields, known_ids
from trainer.server.chat.tools import ToolUse
from trainer.server.prompts import check_tokens, encode

DEFAULT_MAX_TOKENS = 16  # OpenAI's
MAX_PROMPTS = 2048


class CompletionRequest(SamplingFields):
    """The body of `/v1/completions`; keys that are not supported are refused by name."""

    model: str
    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: int | None = Field(None, ge=0)
    logprobs: int | None = Field(None, ge=0, le=20, strict=True)
    """How many of the likeliest tokens to list at each position."""
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    return_tokens_as_token_ids: bool | None = None

    def sample_requests(self, tokenizer: Tokenizer) -> list[SampleRequest]:
        """One request for each prompt."""
        refuse_unknown(self.model_extra or {})
        if self.suffix:
            raise Unsupported(
                "`suffix` is not supported", hint="Put what follows into the prompt itself"
            )
        if (self.best_of or 1) > 1:
            raise Unsupported(
                "`best_of` above 1 is not supported", hint="Send `n`, and choose among the choices"
            )
        limit = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        if limit == 0 and not self.echo:
            raise BadRequest(
                "`max_tokens` is 0, and `echo` is not set, so there is nothing to return",
                hint="Send `echo: true`, or raise `max_tokens`",
            )
        settings = self.settings(tokenizer, ToolUse(), limit)
        wants_prompt = bool(self.echo) and (self.logprobs is not None or limit == 0)
        return [
            SampleRequest(
                prompt_ids=ids,
                top_logprobs=self.logprobs or 0,
                prompt_logprobs=wants_prompt,
                **settings,
            )
            for ids in self._prompts(tokenizer)
        ]

    def _prompts(self, tokenizer: Tokenizer) -> list[list[int]]:
        """Token ids of every prompt; a text is encoded as it is, without special tokens."""
        several = isinstance(self.prompt, list) and not _is_tokens(self.prompt)
        prompts: Any = self.prompt if several else [self.prompt]
        if len(prompts) > MAX_PROMPTS:
            raise BadRequest(
                f"`prompt` has {len(prompts)} prompts, more than {MAX_PROMPTS}",
                hint="Send them in several requests",
            )
        found = [self._ids(each, tokenizer) for each in prompts]
        if not found or not all(found):
            raise BadRequest("`prompt` is empty", hint="Send at least one token")
        return found

    def _ids(self, prompt: str | list[int], tokenizer: Tokenizer) -> list[int]:
        if isinstance(prompt, str):
            return encode(prompt, tokenizer)
        check_tokens(prompt, tokenizer)
        return list(known_ids("prompt", prompt, tokenizer))


def _is_tokens(prompt: list[Any]) -> bool:
    return bool(prompt) and isinstance(prompt[0], int)
