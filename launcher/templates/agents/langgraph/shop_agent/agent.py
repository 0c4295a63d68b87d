"""The agent, in LangGraph: it picks the tool that knows the answer, and returns its result."""

from typing import Any

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from shop_agent.tools import price, stock

PROMPT = "You answer questions about a shop. Call the tool that knows the answer."
TOOLS = [price, stock]


async def answer(example: Any, llm: Any) -> str:
    """One run. The server records every call to `llm.base_url`."""
    chat = ChatOpenAI(
        model=llm.model, base_url=llm.base_url, api_key=llm.api_key, **llm.config.sampling
    )
    model = chat.bind_tools(TOOLS, tool_choice="required", parallel_tool_calls=False)

    async def ask(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("ask", ask)
    graph.add_node("tools", ToolNode(TOOLS))
    graph.add_edge(START, "ask")
    graph.add_conditional_edges("ask", tools_condition)
    graph.add_edge("tools", END)
    messages = [("system", PROMPT), ("user", example.question)]
    state = await graph.compile().ainvoke({"messages": messages})
    return str(state["messages"][-1].content)
