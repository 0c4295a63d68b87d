"""The sampling fields of a request, which chats and plain completions share."""

from collections.abc import Iterable
from typing import Annotated, Any

import pydantic
from pydantic import Field

from kit.types import Json
from trainer.base_model.tokenizer import Tokenizer
from trainer.errors import BadRequest
from trainer.server.chat.structured import GUIDED, constraint
from trainer.server.chat.tools import ToolUse

Number = Annotated[float, Field(allow_inf_nan=False)]
_STREAM_OPTIONS = {"include_usage", "include_obfuscation", "continuous_usage_stats"}


class SamplingFields(pydantic.BaseModel):
    """Settings of the sampler and of the stream, with the bounds of OpenAI's and vLLM's APIs."""

    model_config = pydantic.ConfigDict(extra="allow")

    n: int | None = Field(None, ge=1, le=256)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: Number | None = Field(None, gt=0)
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] | None = None
    stop: str | Annotated[list[str], Field(max_length=16)] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0)
    seed: int | None = None
    stream: bool | None = None
    stream_options: Json | None = None
    response_format: Json | None = None
    structured_outputs: Json | None = None
    guided_json: Json | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    def settings(self, tokenizer: Tokenizer, use: ToolUse, max_tokens: int | None) -> Json:
        """The settings as fields of a `SampleRequest`."""
        self._check_agreement(max_tokens)
        return {
            "n": self.n or 1,
            "max_tokens": max_tokens,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": 1.0 if self.top_p is None else self.top_p,
            "top_k": max(self.top_k or 0, 0),  # vLLM's -1 keeps all
            "min_p": self.min_p or 0.0,
            "frequency_penalty": self.frequency_penalty or 0.0,
            "presence_penalty": self.presence_penalty or 0.0,
            "repetition_penalty": self.repetition_penalty or 1.0,
            "logit_bias": self._logit_bias(tokenizer),
            "min_tokens": self.min_tokens or 0,
            "stop": (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            "stop_token_ids": known_ids("stop_token_ids", self.stop_token_ids or (), tokenizer),
            "ignore_eos": bool(self.ignore_eos),
            "constraint": constraint(self.response_format, self._structured_outputs(), use),
            "seed": self.seed,
            "stream": bool(self.stream),
        }

    def _structured_outputs(self) -> Json | None:
        """vLLM's `structured_outputs`, also under its older names."""
        older = {
            kind: value
            for name, kind in GUIDED.items()
            if (value := getattr(self, name)) is not None
        }
        if older and self.structured_outputs:
            raise BadRequest(
                "`structured_outputs` and a `guided_` field contradict each other",
                hint="Send `structured_outputs` only",
                param="structured_outputs",
            )
        return older or self.structured_outputs

    def _logit_bias(self, tokenizer: Tokenizer) -> tuple[tuple[int, float], ...]:
        bias = self.logit_bias or {}
        known_ids("logit_bias", tuple(bias), tokenizer)
        return tuple(bias.items())

    def _check_agreement(self, max_tokens: int | None) -> None:
        if max_tokens and (self.min_tokens or 0) > max_tokens:
            raise BadRequest(
                f"`min_tokens` is {self.min_tokens}, more than `max_tokens` {max_tokens}",
                hint="Lower `min_tokens`",
                param="min_tokens",
            )
        if unknown := (self.stream_options or {}).keys() - _STREAM_OPTIONS:
            raise BadRequest(
                f"`stream_options.{min(unknown)}` is not supported",
                hint="Send `include_usage` only",
                param="stream_options",
            )


def known_ids(field: str, ids: Iterable[Any], tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the token ids of a field, all of which the model must have."""
    ids = tuple(ids)
    for token in ids:
        if not 0 <= token < tokenizer.vocab_size:
            raise BadRequest(
                f"`{field}` has the token id `{token}`, but the model has only "
                f"{tokenizer.vocab_size} tokens",
                hint="Use token ids of this model's tokenizer",
                param=field,
            )
    return ids
