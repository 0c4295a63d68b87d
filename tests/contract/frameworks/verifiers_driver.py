"""verifiers, with an environment of one turn, of two and with a tool."""

import os

import verifiers as vf
from common import HELLO, INTRODUCTION, KEY, SUM, WHO, add, user
from datasets import Dataset


async def evaluate(environment, url, model):
    os.environ["MATRIX_KEY"] = KEY
    client = vf.ClientConfig(api_base_url=url, api_key_var="MATRIX_KEY")
    found = await environment.evaluate(client, model, num_examples=1, rollouts_per_example=1)
    return found["outputs"][0]["completion"][-1]["content"]


def questions(text):
    return Dataset.from_list([{"question": text, "answer": ""}])


def rubric():
    return vf.Rubric(funcs=[lambda completion, **_: 1.0])


async def chat(url, model):
    environment = vf.SingleTurnEnv(dataset=questions(HELLO), rubric=rubric())
    return await evaluate(environment, url, model)


async def tools(url, model):
    environment = vf.ToolEnv(tools=[add], dataset=questions(SUM), rubric=rubric())
    return await evaluate(environment, url, model)


async def turns(url, model):
    class Introduction(vf.MultiTurnEnv):
        async def env_response(self, messages, state, **_):
            return [user(WHO)]

    environment = Introduction(dataset=questions(INTRODUCTION), rubric=rubric(), max_turns=2)
    return await evaluate(environment, url, model)
