"""The OpenAI Agents SDK with its default, the Responses API."""

from agents import Agent, ModelSettings, OpenAIProvider, RunConfig, Runner, function_tool
from common import CALL_IT, DESCRIBE, HELLO, INTRODUCTION, KEY, SUM, WHO, Number, add, calls, user


def agent(model, **settings):
    return Agent(name="agent", instructions="Answer questions.", model=model, **settings)


def config(url):
    provider = OpenAIProvider(base_url=url, api_key=KEY)
    return RunConfig(model_provider=provider, tracing_disabled=True)


async def chat(url, model):
    return (await Runner.run(agent(model), HELLO, run_config=config(url))).final_output


async def stream(url, model):
    result = Runner.run_streamed(agent(model), HELLO, run_config=config(url))
    return [
        event.data.delta
        async for event in result.stream_events()
        if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
    ]


async def tools(url, model):
    adder = agent(model, tools=[function_tool(add)])
    return (await Runner.run(adder, SUM, run_config=config(url))).final_output


async def forced(url, model):
    adder = agent(
        model,
        tools=[function_tool(add)],
        model_settings=ModelSettings(tool_choice="add"),
        tool_use_behavior="stop_on_first_tool",
    )
    await Runner.run(adder, CALL_IT, run_config=config(url))
    return dict(zip("ab", calls[0], strict=True))


async def structured(url, model):
    result = await Runner.run(agent(model, output_type=Number), DESCRIBE, run_config=config(url))
    return result.final_output.model_dump()


async def turns(url, model):
    first = await Runner.run(agent(model), INTRODUCTION, run_config=config(url))
    said = [*first.to_input_list(), user(WHO)]
    return (await Runner.run(agent(model), said, run_config=config(url))).final_output
