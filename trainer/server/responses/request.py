"""The request of OpenAI's Responses API, translated to a chat."""

import pydantic
from pydantic import Field

from kit.types import Json
from trainer.errors import BadRequest, Unsupported
from trainer.server.chat.request import ChatRequest
from trainer.server.chat.translate import chat_request, check_extra, check_keys
from trainer.server.responses.items import Lookup, messages_of, with_instructions

LOGPROBS = "message.output_text.logprobs"
# There are no built-in tools here and no reasoning that could be encrypted or summarized.
_INCLUDABLE = {LOGPROBS, "reasoning.encrypted_content"}
# Default values that clients send unprompted. Any other value is refused by its key.
_NEUTRAL: Json = {"background": False, "truncation": "disabled"}
# Keys that change no answer.
_NO_EFFECT = {
    *("max_tool_calls", "metadata", "prompt_cache_key", "prompt_cache_options"),
    *("prompt_cache_retention", "safety_identifier", "service_tier", "stream_options", "user"),
}
_TEXT_KEYS = {"format", "verbosity"}
_REASONING_KEYS = {"effort", "generate_summary", "summary"}
_REASONING_NEUTRAL: Json = {"context": "auto", "mode": "standard"}
_TOOL_KEYS = {"type", "name", "description", "parameters", "strict"}
_TOOL_NEUTRAL: Json = {"defer_loading": False, "allowed_callers": ["direct"]}


class ResponsesRequest(pydantic.BaseModel):
    """The body of `/v1/responses`; keys that are not supported are refused by name."""

    model_config = pydantic.ConfigDict(extra="allow")

    model: str
    input: str | list[Json]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_logprobs: int | None = Field(None, ge=0, le=20)
    include: list[str] | None = None
    tools: list[Json] | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    text: Json | None = None
    reasoning: Json | None = None
    metadata: Json | None = None

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ()) or bool(self.top_logprobs)

    def new_messages(self, lookup: Lookup) -> list[Json]:
        """The messages of `input`, without those of earlier responses."""
        messages = messages_of(self.input, lookup)
        if not messages:
            raise BadRequest("`input` is empty", hint="Send text, or at least one message")
        return messages

    def chat(self, messages: list[Json]) -> ChatRequest:
        """The same request as a chat about `messages`, which `instructions` precede."""
        passed = check_extra(self.model_extra, _NEUTRAL, _NO_EFFECT)
        check_keys("text", self.text, _TEXT_KEYS, {})
        check_keys("reasoning", self.reasoning, _REASONING_KEYS, _REASONING_NEUTRAL)
        for name in self.include or ():
            if name not in _INCLUDABLE:
                raise Unsupported(f"`include` of `{name}` is not supported")
        tools, tool_choice = self._tools()
        return chat_request(
            **passed,
            **self._text_settings(),
            model=self.model,
            messages=with_instructions(self.instructions, messages),
            stream=self.stream,
            max_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            logprobs=self.wants_logprobs or None,
            top_logprobs=self.top_logprobs,
            tools=tools,
            tool_choice=tool_choice,
            parallel_tool_calls=self.parallel_tool_calls if tools else None,
            reasoning_effort=(self.reasoning or {}).get("effort"),
        )

    def _text_settings(self) -> Json:
        wanted = (self.text or {}).get("format") or {"type": "text"}
        if not isinstance(wanted, dict):
            raise BadRequest("`text.format` is not an object", hint='Send `{"type": …}`')
        match wanted.get("type"):
            case "text":
                return {}
            case "json_object":
                return {"response_format": {"type": "json_object"}}
            case "json_schema":
                if not isinstance(wanted.get("schema"), dict):
                    raise BadRequest("`text.format.schema` is missing", hint="Send a JSON schema")
                schema = {key: value for key, value in wanted.items() if key != "type"}
                return {"response_format": {"type": "json_schema", "json_schema": schema}}
            case kind:
                raise Unsupported(f"`text.format` of type `{kind}` is not supported")

    def _tools(self) -> tuple[list[Json] | None, str | Json | None]:
        """Tools and the choice among them, as a chat names them."""
        tools = [_tool(tool, f"tools[{i}]") for i, tool in enumerate(self.tools or ())] or None
        choice = self.tool_choice
        if not isinstance(choice, dict):
            # Some clients send the default without any tools.
            return tools, choice if tools or choice not in ("auto", "none") else None
        match choice.get("type"):
            case "function":
                return tools, {"type": "function", "function": {"name": choice.get("name")}}
            case "allowed_tools":
                allowed = {"mode": choice.get("mode"), "tools": choice.get("tools")}
                return tools, {"type": "allowed_tools", "allowed_tools": allowed}
            case kind:
                raise Unsupported(
                    f"`tool_choice` of type `{kind}` is not supported",
                    hint="Use `auto`, `none`, `required`, a function or `allowed_tools`",
                )


def _tool(tool: Json, place: str) -> Json:
    if tool.get("type") != "function":
        raise Unsupported(
            f"`{place}` of type `{tool.get('type')}` is not supported",
            hint="Give the agent a function that does the same; it runs beside the agent",
        )
    for key, value in tool.items():
        if key not in _TOOL_KEYS and value is not None and value != _TOOL_NEUTRAL.get(key, ...):
            raise Unsupported(f"`{place}.{key}` is not supported")
    if not tool.get("name"):
        raise BadRequest(f"`{place}.name` is missing", hint="Name the function")
    function = {key: tool[key] for key in _TOOL_KEYS - {"type"} if tool.get(key) is not None}
    return {"type": "function", "function": function}
