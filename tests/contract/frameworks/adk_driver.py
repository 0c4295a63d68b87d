"""Google's Agent Development Kit, which reaches other models through LiteLLM."""

import json

from common import DESCRIBE, HELLO, INTRODUCTION, KEY, SUM, WHO, Number, add
from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types


async def events(url, model, *questions, config=None, **settings):
    llm = LiteLlm(model=f"openai/{model}", api_base=url, api_key=KEY)
    agent = LlmAgent(name="agent", model=llm, instruction="Answer questions.", **settings)
    runner = InMemoryRunner(agent=agent, app_name="matrix")
    session = await runner.session_service.create_session(app_name="matrix", user_id="user")
    found = []
    for question in questions:
        found = [
            event
            async for event in runner.run_async(
                user_id="user",
                session_id=session.id,
                new_message=types.Content(role="user", parts=[types.Part(text=question)]),
                run_config=config or RunConfig(),
            )
        ]
    return found


async def ask(*arguments, **settings):
    return (await events(*arguments, **settings))[-1].content.parts[-1].text


async def chat(url, model):
    return await ask(url, model, HELLO)


async def stream(url, model):
    config = RunConfig(streaming_mode=StreamingMode.SSE)
    found = await events(url, model, HELLO, config=config)
    return [event.content.parts[-1].text for event in found if event.partial]


async def tools(url, model):
    return await ask(url, model, SUM, tools=[add])


async def structured(url, model):
    return json.loads(await ask(url, model, DESCRIBE, output_schema=Number))


async def turns(url, model):
    return await ask(url, model, INTRODUCTION, WHO)
