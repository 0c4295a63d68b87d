"""The agent, with Pydantic AI: it picks the tool that knows the answer."""

from typing import Any

from pydantic_ai import Agent, ToolOutput
from pydantic_ai.exceptions import UnexpectedModelBehavior
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from shop_agent.tools import price, stock

PROMPT = "You answer questions about a shop. Call the tool that knows the answer."


async def answer(example: Any, llm: Any) -> str:
    """One run. The server records every call to `llm.base_url`."""
    provider = OpenAIProvider(base_url=llm.base_url, api_key=llm.api_key)
    agent = Agent(
        OpenAIChatModel(llm.model, provider=provider),
        instructions=PROMPT,
        # The result of either function is the answer of the agent.
        output_type=[ToolOutput(price, name="price"), ToolOutput(stock, name="stock")],
        model_settings={"parallel_tool_calls": False, **llm.config.sampling},
        retries=0,
    )
    try:
        return str((await agent.run(example.question)).output)
    except UnexpectedModelBehavior:  # a call that was cut off: no answer, and no reward
        return ""
