"""Agents built with other frameworks, each trained for an epoch by `trainer finetune`."""

import json
from typing import Any

import pytest

from tests.environments import python_of

AGENTS = {
    "langgraph": """
def make(llm):
    from langgraph.graph import END, START, MessagesState, StateGraph

    async def answer(state):
        return {"messages": [await llm.ainvoke(state["messages"])]}

    async def again(state):
        return {"messages": [await llm.ainvoke([*state["messages"], ("user", "Are you sure?")])]}

    graph = StateGraph(MessagesState)
    graph.add_node("answer", answer)
    graph.add_node("again", again)
    graph.add_edge(START, "answer")
    graph.add_edge("answer", "again")
    graph.add_edge("again", END)
    return graph.compile()
""",
    "llama_index": """
def make(llm):
    from llama_index.core.chat_engine import SimpleChatEngine

    return SimpleChatEngine.from_defaults(llm=llm)
""",
    "google_adk": """
def make(llm):
    from google.adk.agents import Agent

    return Agent(name="agent", model=llm, instruction="Answer.")
""",
    "python": """
def make(example, llm):
    import openai

    with openai.OpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
        answer = client.chat.completions.create(
            model=llm.model,
            messages=[{"role": "user", "content": example.question}],
            max_tokens=6,
        )
    return answer.choices[0].message.content
""",
}
CALLS = {"langgraph": 2, "llama_index": 1, "google_adk": 1, "python": 1}


@pytest.mark.parametrize("framework", AGENTS)
def test_a_framework_agent_trains_for_an_epoch(project: Any, framework: str) -> None:
    project.python = str(python_of("agents"))
    path = project.directory / "agent.py"
    path.write_text(path.read_text() + AGENTS[framework])
    project.config["workflow"].update(_type=framework, function="agent:make")
    project.config["llms"]["training_llm"]["max_tokens"] = 6
    project.finetune("-o", "finetuning.num_epochs", "1")
    (row,) = project.read("training_metrics.jsonl")
    assert row["failures"] == {} and row["num_trajectories"] == 8
    assert row["step"] == 1 and row["data/step_num_groups_trainable"] >= 1
    # The sampled tokens were trained on, although the framework rewrote the messages.
    assert row["data/retokenized"] == 0
    runs = project.directory / ".tmp/nat/finetuning/eval/epoch_0001.jsonl"
    assert {json.loads(line)["calls"] for line in runs.read_text().splitlines()} == {
        CALLS[framework]
    }
