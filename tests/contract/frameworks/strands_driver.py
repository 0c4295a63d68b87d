"""Strands Agents, whose structured output is a tool, forced if the model does not call it."""

import json

from common import CALL_IT, DESCRIBE, HELLO, INTRODUCTION, KEY, SUM, WHO, Number, add
from strands import Agent, tool
from strands.models.openai import OpenAIModel

adder = tool(add)


def llm(url, model):
    return OpenAIModel(client_args={"base_url": url, "api_key": KEY}, model_id=model)


def agent(url, model, **settings):
    return Agent(model=llm(url, model), callback_handler=None, **settings)


def chat(url, model):
    return str(agent(url, model)(HELLO)).strip()


async def stream(url, model):
    events = agent(url, model).stream_async(HELLO)
    return [event["data"] async for event in events if "data" in event]


def tools(url, model):
    return str(agent(url, model, tools=[adder])(SUM)).strip()


async def forced(url, model):
    said = [{"role": "user", "content": [{"text": CALL_IT}]}]
    events = llm(url, model).stream(said, [adder.tool_spec], tool_choice={"tool": {"name": "add"}})
    deltas = [event.get("contentBlockDelta", {}).get("delta", {}) async for event in events]
    text = "".join(delta.get("toolUse", {}).get("input", "") for delta in deltas)
    return json.loads(text)


def structured(url, model):
    answer = agent(url, model)(DESCRIBE, structured_output_model=Number)
    return answer.structured_output.model_dump()


def turns(url, model):
    ada = agent(url, model)
    ada(INTRODUCTION)
    return str(ada(WHO)).strip()
