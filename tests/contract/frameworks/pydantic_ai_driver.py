"""PydanticAI."""

from common import CALL_IT, DESCRIBE, HELLO, INTRODUCTION, KEY, SUM, WHO, Number, add, calls
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


def llm(url, model):
    return OpenAIChatModel(model, provider=OpenAIProvider(base_url=url, api_key=KEY))


async def chat(url, model):
    return (await Agent(llm(url, model)).run(HELLO)).output


async def stream(url, model):
    async with Agent(llm(url, model)).run_stream(HELLO) as result:
        return [text async for text in result.stream_text(delta=True, debounce_by=None)]


async def tools(url, model):
    return (await Agent(llm(url, model), tools=[add]).run(SUM)).output


async def forced(url, model):
    await Agent(llm(url, model), output_type=add).run(CALL_IT)  # an output function is forced
    return dict(zip("ab", calls[0], strict=True))


async def structured(url, model):
    return (await Agent(llm(url, model), output_type=Number).run(DESCRIBE)).output.model_dump()


async def turns(url, model):
    agent = Agent(llm(url, model))
    first = await agent.run(INTRODUCTION)
    return (await agent.run(WHO, message_history=first.all_messages())).output
