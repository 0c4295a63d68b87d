"""The agent, with the OpenAI Agents SDK: it picks the tool that knows the answer."""

from typing import Any

from agents import Agent, ModelSettings, OpenAIProvider, RunConfig, Runner, function_tool
from agents.exceptions import ModelBehaviorError

from shop_agent.tools import price, stock

PROMPT = "You answer questions about a shop. Call the tool that knows the answer."


async def answer(example: Any, llm: Any) -> str:
    """One run. The server records every call to `llm.base_url`."""
    settings = ModelSettings(
        tool_choice="required", parallel_tool_calls=False, **llm.config.sampling
    )
    agent = Agent(
        name="shop",
        instructions=PROMPT,
        model=llm.model,
        tools=[function_tool(price), function_tool(stock)],
        tool_use_behavior="stop_on_first_tool",
        model_settings=settings,
    )
    provider = OpenAIProvider(base_url=llm.base_url, api_key=llm.api_key)
    config = RunConfig(model_provider=provider, tracing_disabled=True)
    try:
        result = await Runner.run(agent, example.question, run_config=config, max_turns=1)
    except ModelBehaviorError:  # a call that was cut off: no answer, and no reward
        return ""
    return str(result.final_output)
