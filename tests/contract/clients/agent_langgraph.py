"""A LangGraph agent that alternates between model and tool nodes, and streams."""

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

calls: list[list[int]] = []


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    calls.append([a, b])
    return a + b


async def ask(question: str, base_url: str, model: str) -> str:
    llm = ChatOpenAI(base_url=base_url, api_key="any", model=model, streaming=True)
    bound = llm.bind_tools([add])

    async def think(state: MessagesState) -> dict[str, object]:
        return {"messages": [await bound.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("think", think)
    graph.add_node("tools", ToolNode([add]))
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", tools_condition)
    graph.add_edge("tools", "think")
    state = await graph.compile().ainvoke({"messages": [("human", question)]})
    return str(state["messages"][-1].content)
