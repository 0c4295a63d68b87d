"""LangChain, and its agent, which is a LangGraph graph."""

from common import CALL_IT, DESCRIBE, HELLO, INTRODUCTION, KEY, SUM, WHO, Number, add, user
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver


def llm(url, model):
    return ChatOpenAI(base_url=url, api_key=KEY, model=model)


def chat(url, model):
    return llm(url, model).invoke(HELLO).content


def stream(url, model):
    return [chunk.content for chunk in llm(url, model).stream(HELLO) if chunk.content]


def tools(url, model):
    graph = create_agent(llm(url, model), tools=[add])
    return graph.invoke({"messages": [user(SUM)]})["messages"][-1].content


def forced(url, model):
    bound = llm(url, model).bind_tools([add], tool_choice="add")
    return bound.invoke(CALL_IT).tool_calls[0]["args"]


def structured(url, model):
    return llm(url, model).with_structured_output(Number).invoke(DESCRIBE).model_dump()


def turns(url, model):
    graph = create_agent(llm(url, model), checkpointer=InMemorySaver())
    thread = {"configurable": {"thread_id": "one"}}
    graph.invoke({"messages": [user(INTRODUCTION)]}, thread)
    return graph.invoke({"messages": [user(WHO)]}, thread)["messages"][-1].content
