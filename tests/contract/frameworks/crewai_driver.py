"""CrewAI."""

from common import DESCRIBE, HELLO, INTRODUCTION, KEY, SUM, WHO, Number, add, assistant, user
from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool

adder = tool("add")(add)


def llm(url, model, **settings):
    return LLM(model=f"openai/{model}", base_url=url, api_key=KEY, **settings)


def agent(url, model, **settings):
    return Agent(role="Helper", goal="Help", backstory="Helps", llm=llm(url, model), **settings)


def chat(url, model):
    return llm(url, model).call(HELLO)


def stream(url, model):
    helper = Agent(role="Helper", goal="Help", backstory="Helps", llm=llm(url, model, stream=True))
    task = Task(description=HELLO, expected_output="text", agent=helper)
    chunks = Crew(agents=[helper], tasks=[task], stream=True).kickoff()
    return [chunk.content for chunk in chunks if chunk.content]


def tools(url, model):
    return agent(url, model, tools=[adder]).kickoff(SUM).raw


def structured(url, model):
    return agent(url, model).kickoff(DESCRIBE, response_format=Number).pydantic.model_dump()


def turns(url, model):
    first = llm(url, model).call([user(INTRODUCTION)])
    return llm(url, model).call([user(INTRODUCTION), assistant(first), user(WHO)])
