"""Agno."""

from agno.agent import Agent
from agno.db.in_memory import InMemoryDb
from agno.models.openai import OpenAILike
from common import CALL_IT, DESCRIBE, HELLO, INTRODUCTION, KEY, NAMED, SUM, WHO, Number, add, calls


def agent(url, model, **settings):
    llm = OpenAILike(id=model, base_url=url, api_key=KEY)
    return Agent(model=llm, telemetry=False, **settings)


def chat(url, model):
    return agent(url, model).run(HELLO).content


def stream(url, model):
    events = agent(url, model).run(HELLO, stream=True)
    return [event.content for event in events if event.event == "RunContent"]


def tools(url, model):
    return agent(url, model, tools=[add]).run(SUM).content


def forced(url, model):
    agent(url, model, tools=[add], tool_choice=NAMED, tool_call_limit=1).run(CALL_IT)
    return dict(zip("ab", calls[0], strict=True))


def structured(url, model):
    return agent(url, model, output_schema=Number).run(DESCRIBE).content.model_dump()


def turns(url, model):
    ada = agent(url, model, db=InMemoryDb(), session_id="one", add_history_to_context=True)
    ada.run(INTRODUCTION)
    return ada.run(WHO).content
