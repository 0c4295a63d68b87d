"""A LlamaIndex function agent."""

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike

calls: list[list[int]] = []


def add(a: int, b: int) -> int:
    """Add two numbers."""
    calls.append([a, b])
    return a + b


async def ask(question: str, base_url: str, model: str) -> str:
    llm = OpenAILike(
        model=model,
        api_base=base_url,
        api_key="any",
        is_chat_model=True,
        is_function_calling_model=True,
    )
    return str(await FunctionAgent(tools=[add], llm=llm).run(question))
