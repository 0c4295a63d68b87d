"""Workflows for agent frameworks. Each imports its framework only when it is used.

The user's `function` is a factory: it receives the framework's LLM object, which points at the
run's base URL, and returns an agent. Nothing else is needed, because the gateway records the calls.
"""

import importlib
from collections.abc import Callable
from typing import Any

from kit.errors import NotInstalled
from trainer.harness.llm import Llm, Workflow
from trainer.harness.types import Example
from trainer.harness.user_code import call

Factory = Callable[..., Any]


def _import(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as exc:
        raise NotInstalled(
            f"This workflow needs `{package}`: {exc}",
            hint=f"Install it with `pip install {package}`",
        ) from exc


def _langchain_llm(llm: Llm) -> Any:
    chat_openai = _import("langchain_openai", "langchain-openai").ChatOpenAI
    return chat_openai(
        model=llm.model,
        base_url=llm.base_url,
        api_key=llm.api_key,
        max_retries=llm.config.max_retries,
        timeout=llm.config.request_timeout,
        **llm.config.sampling,
    )


def langchain(factory: Factory, arguments: dict[str, Any]) -> Workflow:
    """Run a chain on the question. Its text is the output."""

    async def run(example: Example, llm: Llm) -> Any:
        chain = await call(factory, _langchain_llm(llm), **arguments)
        answer = await chain.ainvoke(example.question)
        return getattr(answer, "content", answer)

    return run


def langgraph(factory: Factory, arguments: dict[str, Any]) -> Workflow:
    """Run a graph of messages on the question. The last message is the output."""

    async def run(example: Example, llm: Llm) -> Any:
        graph = await call(factory, _langchain_llm(llm), **arguments)
        state = await graph.ainvoke({"messages": [("user", str(example.question))]})
        return state["messages"][-1].content

    return run


def llama_index(factory: Factory, arguments: dict[str, Any]) -> Workflow:
    """Run a LlamaIndex agent or chat engine on the question."""

    async def run(example: Example, llm: Llm) -> Any:
        openai_like = _import(
            "llama_index.llms.openai_like", "llama-index-llms-openai-like"
        ).OpenAILike
        sampling = {"temperature": 1.0, **llm.config.sampling}  # LlamaIndex defaults to 0.1
        model = openai_like(
            model=llm.model,
            api_base=llm.base_url,
            api_key=llm.api_key,
            is_chat_model=True,
            max_retries=llm.config.max_retries,
            timeout=llm.config.request_timeout,
            **{
                name: sampling.pop(name) for name in ("temperature", "max_tokens") & sampling.keys()
            },
            additional_kwargs=sampling,
        )
        agent = await call(factory, model, **arguments)
        question = str(example.question)
        if hasattr(agent, "run"):
            return str(await agent.run(user_msg=question))
        return str(await agent.achat(question))

    return run


def google_adk(factory: Factory, arguments: dict[str, Any]) -> Workflow:
    """Run a Google ADK agent on the question, in a new session."""

    async def run(example: Example, llm: Llm) -> Any:
        models = _import("google.adk.models.lite_llm", "google-adk litellm")
        runners = importlib.import_module("google.adk.runners")
        types = importlib.import_module("google.genai.types")
        model = models.LiteLlm(
            # LiteLLM's prefix for any OpenAI-compatible endpoint.
            model=f"openai/{llm.model}",
            api_base=llm.base_url,
            api_key=llm.api_key,
            num_retries=llm.config.max_retries,
            timeout=llm.config.request_timeout,
            **llm.config.sampling,
        )
        agent = await call(factory, model, **arguments)
        runner = runners.InMemoryRunner(agent=agent, app_name="finetune")
        session = await runner.session_service.create_session(app_name="finetune", user_id="user")
        question = types.Content(role="user", parts=[types.Part(text=str(example.question))])
        output = ""
        async for event in runner.run_async(
            user_id="user", session_id=session.id, new_message=question
        ):
            if event.is_final_response() and event.content and event.content.parts:
                output = "".join(part.text or "" for part in event.content.parts)
        return output

    return run


WORKFLOWS: dict[str, Callable[[Factory, dict[str, Any]], Workflow]] = {
    "langchain": langchain,
    "langgraph": langgraph,
    "llama_index": llama_index,
    "google_adk": google_adk,
}
