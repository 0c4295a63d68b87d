"""The request of a chat completion, as OpenAI's and vLLM's clients send it."""

from functools import cached_property
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from kit.types import Json
from trainer.base_model.tokenizer import Tokenizer
from trainer.engines.engine import SampleRequest
from trainer.errors import BadRequest
from trainer.server.chat_fields import refuse_unknown
from trainer.server.structured import GUIDED, constraint
from trainer.server.template_limits import reasoning_variables, warnings_about
from trainer.server.tools import ToolUse, tool_use

Number = Annotated[float, Field(allow_inf_nan=False)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class ChatRequest(pydantic.BaseModel):
    """The body of `/v1/chat/completions`, and the form into which other APIs are translated.

    Other fields than these are refused by name, unless they change no answer.
    """

    model_config = pydantic.ConfigDict(extra="allow")

    model: str
    messages: list[Json] = Field(min_length=1)
    n: int | None = Field(None, ge=1, le=256)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
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
    logprobs: bool | None = None
    """Logprobs are returned whatever it says."""
    top_logprobs: int | None = Field(None, ge=0, le=20)
    stream: bool | None = None
    stream_options: Json | None = None
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    response_format: Json | None = None
    structured_outputs: Json | None = None
    guided_json: Json | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: Json | None = None

    @cached_property
    def tool_use(self) -> ToolUse:
        """The functions that the answer may call, and how."""
        return tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)

    def sample_request(self, tokenizer: Tokenizer) -> SampleRequest:
        """Apply the chat template, and translate the settings for the engine."""
        refuse_unknown(self.model_extra or {})
        self._check_agreement()
        use = self.tool_use
        return SampleRequest(
            prompt_ids=tokenizer.apply_chat_template(
                self.messages, self.shown_tools, **self._variables(tokenizer)
            ),
            n=self.n or 1,
            max_tokens=self.max_completion_tokens or self.max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),  # vLLM's -1 keeps all
            min_p=self.min_p or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            repetition_penalty=self.repetition_penalty or 1.0,
            logit_bias=self._logit_bias(tokenizer),
            min_tokens=self.min_tokens or 0,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_token_ids=_token_ids("stop_token_ids", self.stop_token_ids or (), tokenizer),
            ignore_eos=bool(self.ignore_eos),
            constraint=constraint(self.response_format, self._structured_outputs(), use),
            top_logprobs=self.top_logprobs or 0,
            seed=self.seed,
            stream=bool(self.stream),
        )

    def warnings(self, tokenizer: Tokenizer) -> list[str]:
        """What the model's chat template leaves out of this request, one sentence each."""
        return warnings_about(tokenizer, self.messages, self.shown_tools, self.reasoning_effort)

    @property
    def shown_tools(self) -> list[Json] | None:
        """The tools that the model sees."""
        return None if self.tool_choice == "none" else self.tools

    def _variables(self, tokenizer: Tokenizer) -> Json:
        variables = self.chat_template_kwargs or {}
        if reserved := {"messages", "tools"} & variables.keys():
            raise BadRequest(
                f"`chat_template_kwargs` holds `{min(reserved)}`",
                hint="Send it as a field of the request itself",
                param="chat_template_kwargs",
            )
        return {**reasoning_variables(tokenizer, self.reasoning_effort), **variables}

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
        _token_ids("logit_bias", tuple(bias), tokenizer)
        return tuple(bias.items())

    def _check_agreement(self) -> None:
        limit = self.max_completion_tokens or self.max_tokens
        if limit and (self.min_tokens or 0) > limit:
            raise BadRequest(
                f"`min_tokens` is {self.min_tokens}, more than `max_tokens` {limit}",
                hint="Lower `min_tokens`",
                param="min_tokens",
            )
        if self.top_logprobs and self.logprobs is False:
            raise BadRequest(
                "`top_logprobs` needs `logprobs: true`",
                hint="Remove one of them",
                param="top_logprobs",
            )
        known = {"include_usage", "include_obfuscation", "continuous_usage_stats"}
        if self.stream_options and (unknown := self.stream_options.keys() - known):
            raise BadRequest(
                f"`stream_options.{min(unknown)}` is not supported",
                hint="Send `include_usage` only",
                param="stream_options",
            )


def _token_ids(field: str, ids: Any, tokenizer: Tokenizer) -> tuple[int, ...]:
    for token in ids:
        if not 0 <= token < tokenizer.vocab_size:
            raise BadRequest(
                f"`{field}` has the token `{token}`, but the model has {tokenizer.vocab_size}",
                hint="Use token ids of this model's tokenizer",
                param=field,
            )
    return tuple(ids)
