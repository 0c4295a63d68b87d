"""A Google ADK agent, which reaches the server through LiteLLM."""

from google.adk.agents import LlmAgent
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types

calls: list[list[int]] = []


def add(a: int, b: int) -> int:
    """Add two numbers."""
    calls.append([a, b])
    return a + b


async def ask(question: str, base_url: str, model: str) -> str:
    llm = LiteLlm(model=f"hosted_vllm/{model}", api_base=base_url, api_key="any")
    agent = LlmAgent(name="adder", model=llm, instruction="Answer questions.", tools=[add])
    runner = InMemoryRunner(agent=agent, app_name="contract")
    session = await runner.session_service.create_session(app_name="contract", user_id="user")
    message = types.Content(role="user", parts=[types.Part(text=question)])
    answer = ""
    async for event in runner.run_async(user_id="user", session_id=session.id, new_message=message):
        if event.is_final_response() and event.content and event.content.parts:
            answer = "".join(part.text or "" for part in event.content.parts)
    return answer
