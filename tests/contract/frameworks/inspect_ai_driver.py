"""inspect-ai with its OpenAI provider."""

import json

from common import CALL_IT, DESCRIBE, HELLO, INTRODUCTION, KEY, SUM, WHO, Number, add
from inspect_ai.model import (
    ChatMessageUser,
    GenerateConfig,
    ResponseSchema,
    get_model,
)
from inspect_ai.tool import ToolFunction, tool
from inspect_ai.util import json_schema


@tool(name="add")
def adding():
    async def execute(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        return add(a, b)

    return execute


def llm(url, model, **settings):
    return get_model(f"openai/{model}", base_url=url, api_key=KEY, memoize=False, **settings)


async def chat(url, model):
    return (await llm(url, model).generate(HELLO)).completion


async def tools(url, model):
    _, output = await llm(url, model).generate_loop(SUM, tools=[adding()])
    return output.completion


async def forced(url, model):
    answer = await llm(url, model).generate(
        CALL_IT, tools=[adding()], tool_choice=ToolFunction(name="add")
    )
    return answer.message.tool_calls[0].arguments


async def structured(url, model):
    schema = ResponseSchema(name="number", json_schema=json_schema(Number))
    answer = await llm(url, model).generate(DESCRIBE, config=GenerateConfig(response_schema=schema))
    return json.loads(answer.completion)


async def turns(url, model):
    first = (await llm(url, model).generate(INTRODUCTION)).message
    said = [ChatMessageUser(content=INTRODUCTION), first, ChatMessageUser(content=WHO)]
    return (await llm(url, model).generate(said)).completion
