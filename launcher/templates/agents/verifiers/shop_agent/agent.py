"""The agent as an environment of `verifiers`: examples, tools and reward in one."""

import json
from pathlib import Path
from typing import Any

import verifiers as vf
from datasets import Dataset

from shop_agent.reward import item, right, tool
from shop_agent.tools import price, stock

PROMPT = "You answer questions about a shop. Call the tool that knows the answer."
DATA = Path(__file__).parent / "data"


class ShopEnv(vf.ToolEnv):
    """One turn, in which the model must call a tool."""

    async def get_model_response(
        self,
        state: Any,
        prompt: Any,
        client: Any = None,
        model: Any = None,
        tool_defs: Any = None,
        sampling_args: Any = None,
    ) -> Any:
        sampling = {
            **(sampling_args or state["sampling_args"] or {}),
            "tool_choice": "required",
            "parallel_tool_calls": False,
        }
        return await super().get_model_response(state, prompt, client, model, tool_defs, sampling)


def load_environment() -> vf.Environment:
    return ShopEnv(
        tools=[price, stock],
        max_turns=1,
        system_prompt=PROMPT,
        dataset=read("train"),
        eval_dataset=read("validation"),
        rubric=vf.Rubric(funcs=[tool, item, right], weights=[0.3, 0.3, 0.4]),
    )


def read(name: str) -> Dataset:
    lines = (DATA / f"{name}.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return Dataset.from_list(
        [{"question": row["question"], "answer": row["answer"], "info": row} for row in rows]
    )
