"""The request of a chat completion, as OpenAI's clients send it."""

import pydantic

from kit.types import Json
from trainer.base_model.tokenizer import Tokenizer
from trainer.engines.engine import SampleRequest
from trainer.errors import BadRequest, Unsupported

# Default values that clients send unprompted. Any other value is refused by its key.
_NEUTRAL: Json = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "top_logprobs": 0,
    "response_format": {"type": "text"},
    "store": False,
}
# vLLM's flags for what every answer here holds anyway, and keys that change no answer.
_ALWAYS = {"logprobs", "return_token_ids", "return_tokens_as_token_ids", "user"}


class ChatRequest(pydantic.BaseModel):
    """The body of `/v1/chat/completions`; keys that are not supported are refused by name."""

    model_config = pydantic.ConfigDict(extra="allow")

    model: str
    messages: list[Json] = pydantic.Field(min_length=1)
    n: int | None = pydantic.Field(None, ge=1, le=256)
    max_tokens: int | None = pydantic.Field(None, ge=1)
    max_completion_tokens: int | None = pydantic.Field(None, ge=1)
    temperature: float | None = pydantic.Field(None, ge=0, le=2)
    top_p: float | None = pydantic.Field(None, gt=0, le=1)
    top_k: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: Json | None = None
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: Json | None = None

    def sample_request(self, tokenizer: Tokenizer) -> SampleRequest:
        """Apply the chat template, and translate the settings for the engine."""
        self._refuse_unsupported()
        variables = self.chat_template_kwargs or {}
        if reserved := {"messages", "tools"} & variables.keys():
            raise BadRequest(
                f"`chat_template_kwargs` holds `{min(reserved)}`",
                hint="Send it as a field of the request itself",
            )
        tools = None if self.tool_choice == "none" else self.tools
        return SampleRequest(
            prompt_ids=tokenizer.apply_chat_template(self.messages, tools, **variables),
            n=self.n or 1,
            max_tokens=self.max_completion_tokens or self.max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),  # vLLM's -1 keeps all
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            seed=self.seed,
            stream=bool(self.stream),
        )

    def _refuse_unsupported(self) -> None:
        for key, value in (self.model_extra or {}).items():
            if key not in _ALWAYS and value is not None and value != _NEUTRAL.get(key, ...):
                raise Unsupported(f"`{key}` is not supported")
        if self.tool_choice not in (None, "auto", "none"):
            raise Unsupported("`tool_choice` other than `auto` and `none` is not supported")
        if self.tools and self.parallel_tool_calls is False:
            raise Unsupported("`parallel_tool_calls: false` is not supported")
