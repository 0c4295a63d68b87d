"""The request of a chat completion, as OpenAI's and vLLM's clients send it."""

from collections.abc import Callable
from functools import cached_property
from typing import Literal

from pydantic import Field

from kit.types import Json
from trainer.base_model.tokenizer import Tokenizer
from trainer.engines.engine import SampleRequest
from trainer.errors import BadRequest
from trainer.server import prompts
from trainer.server.chat.fields import refuse_unknown
from trainer.server.chat.sampling_fields import SamplingFields
from trainer.server.chat.template_limits import reasoning_variables, warnings_about
from trainer.server.chat.tools import ToolUse, tool_use

# Names that the renderer itself gives to the template.
_RESERVED = {"messages", "tools", "documents", "add_generation_prompt", "self"}
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ChatRequest(SamplingFields):
    """The body of `/v1/chat/completions`, and the form into which other APIs are translated.

    Other fields than these are refused by name, unless they change no answer.
    """

    model: str
    messages: list[Json] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    """Returned unless it is false and a rollout records them."""
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: Json | None = None

    @cached_property
    def tool_use(self) -> ToolUse:
        """The functions that the answer may call, and how."""
        return tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)

    def sample_request(
        self, tokenizer: Tokenizer, encode: Callable[[str], list[int]]
    ) -> tuple[SampleRequest, str]:
        """The request for the engine, and the text of its prompt, which `encode` turned to ids."""
        refuse_unknown(self.model_extra or {})
        if self.top_logprobs and self.logprobs is False:
            raise BadRequest(
                "`top_logprobs` needs `logprobs: true`",
                hint="Remove one of them",
                param="top_logprobs",
            )
        limit = self.max_completion_tokens or self.max_tokens
        settings = self.settings(tokenizer, self.tool_use, limit)
        prompts.check_count(self.messages, tokenizer)
        text = tokenizer.render(self.messages, **self.template(tokenizer))
        top = self.top_logprobs or 0
        return SampleRequest(prompt_ids=encode(text), top_logprobs=top, **settings), text

    def warnings(self, tokenizer: Tokenizer) -> list[str]:
        """Parts of this request that the model's chat template leaves out, one sentence each."""
        return warnings_about(tokenizer, self.messages, self.shown_tools, self.reasoning_effort)

    @property
    def shown_tools(self) -> list[Json] | None:
        """The tools that the model sees."""
        return None if self.tool_choice == "none" else self.tools

    def template(self, tokenizer: Tokenizer) -> Json:
        """The arguments of the chat template beside the messages, which the ledger records."""
        return {"tools": self.shown_tools, **self._variables(tokenizer)}

    def _variables(self, tokenizer: Tokenizer) -> Json:
        variables = self.chat_template_kwargs or {}
        if reserved := _RESERVED & variables.keys():
            raise BadRequest(
                f"`chat_template_kwargs` holds `{min(reserved)}`",
                hint="Send it as a field of the request itself",
                param="chat_template_kwargs",
            )
        return {**reasoning_variables(tokenizer, self.reasoning_effort), **variables}
