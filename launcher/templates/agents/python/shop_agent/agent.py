"""The agent: it picks the tool that knows the answer, and returns the tool's result."""

import json
from collections.abc import Callable
from typing import Any

from shop_agent.tools import price, stock

PROMPT = "You answer questions about a shop. Call the tool that knows the answer."
TOOLS: dict[str, Callable[[str], str]] = {"price": price, "stock": stock}
SCHEMAS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": function.__doc__,
            "parameters": {
                "type": "object",
                "properties": {"item": {"type": "string"}},
                "required": ["item"],
            },
        },
    }
    for name, function in TOOLS.items()
]


async def answer(example: Any, llm: Any) -> str:
    """One run. Any OpenAI client works too: `llm.base_url`, `llm.api_key` and `llm.model`."""
    messages = [
        {"role": "system", "content": PROMPT},
        {"role": "user", "content": example.question},
    ]
    message = await llm.chat(
        messages, tools=SCHEMAS, tool_choice="required", parallel_tool_calls=False
    )
    for call in message.get("tool_calls") or []:
        function = call["function"]
        return TOOLS[function["name"]](json.loads(function["arguments"])["item"])
    return ""  # the call was cut off by `max_tokens`
