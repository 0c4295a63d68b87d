"""Microsoft's agent framework with its default client, which uses the Responses API."""

from agent_framework import Agent
from agent_framework.openai import OpenAIChatClient
from common import CALL_IT, DESCRIBE, HELLO, INTRODUCTION, KEY, SUM, WHO, Number, add, calls


def agent(url, model, **settings):
    client = OpenAIChatClient(model=model, base_url=url, api_key=KEY)
    return Agent(client=client, instructions="Answer questions.", **settings)


async def chat(url, model):
    return (await agent(url, model).run(HELLO)).text


async def stream(url, model):
    updates = agent(url, model).run(HELLO, stream=True)
    # The last one repeats the whole text: the framework passes on OpenAI's closing event too.
    return [update.text async for update in updates if update.text][:-1]


async def tools(url, model):
    return (await agent(url, model, tools=[add]).run(SUM)).text


async def forced(url, model):
    choice = {"mode": "required", "required_function_name": "add"}
    await agent(url, model, tools=[add]).run(CALL_IT, options={"tool_choice": choice})
    return dict(zip("ab", calls[0], strict=True))


async def structured(url, model):
    answer = await agent(url, model).run(DESCRIBE, options={"response_format": Number})
    return answer.value.model_dump()


async def turns(url, model):
    ada = agent(url, model)
    session = ada.create_session()
    await ada.run(INTRODUCTION, session=session)
    return (await ada.run(WHO, session=session)).text
