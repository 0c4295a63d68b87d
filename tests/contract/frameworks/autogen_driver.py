"""AutoGen."""

import json

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import UserMessage
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from common import CALL_IT, DESCRIBE, HELLO, INTRODUCTION, KEY, SUM, WHO, Number, add

INFO = {
    "vision": False,
    "function_calling": True,
    "json_output": True,
    "structured_output": True,
    "family": "unknown",
}


def llm(url, model):
    return OpenAIChatCompletionClient(model=model, base_url=url, api_key=KEY, model_info=INFO)


def agent(url, model, **settings):
    return AssistantAgent("agent", model_client=llm(url, model), **settings)


async def chat(url, model):
    return (await agent(url, model).run(task=HELLO)).messages[-1].content


async def stream(url, model):
    events = agent(url, model, model_client_stream=True).run_stream(task=HELLO)
    return [
        event.content
        async for event in events
        if type(event).__name__ == "ModelClientStreamingChunkEvent"
    ]


async def tools(url, model):
    adder = agent(url, model, tools=[add], reflect_on_tool_use=True)
    return (await adder.run(task=SUM)).messages[-1].content


async def forced(url, model):
    tool = FunctionTool(add, "Add two numbers.", strict=True)
    said = [UserMessage(content=CALL_IT, source="user")]
    answer = await llm(url, model).create(said, tools=[tool], tool_choice=tool)
    return json.loads(answer.content[0].arguments)


async def structured(url, model):
    describer = agent(url, model, output_content_type=Number)
    return (await describer.run(task=DESCRIBE)).messages[-1].content.model_dump()


async def turns(url, model):
    ada = agent(url, model)
    await ada.run(task=INTRODUCTION)
    return (await ada.run(task=WHO)).messages[-1].content
