"""DSPy, which asks for fields in text and parses them."""

import dspy
from common import DESCRIBE, HELLO, INTRODUCTION, KEY, SUM, WHO, add


def lm(url, model):
    return dspy.context(
        lm=dspy.LM(f"openai/{model}", api_base=url, api_key=KEY, cache=False, temperature=1.0)
    )


def chat(url, model):
    with lm(url, model):
        return dspy.settings.lm(HELLO)[0]


async def stream(url, model):
    with lm(url, model):
        listener = dspy.streaming.StreamListener(signature_field_name="answer")
        program = dspy.streamify(dspy.Predict("question -> answer"), stream_listeners=[listener])
        return [part.chunk async for part in program(question=HELLO) if hasattr(part, "chunk")]


def tools(url, model):
    with lm(url, model):
        return dspy.ReAct("question -> answer", tools=[add])(question=SUM).answer


def structured(url, model):
    with lm(url, model):
        found = dspy.Predict("question -> value: int, even: bool")(question=DESCRIBE)
        return {"value": found.value, "even": found.even}


def turns(url, model):
    class Talk(dspy.Signature):
        question: str = dspy.InputField()
        history: dspy.History = dspy.InputField()
        answer: str = dspy.OutputField()

    with lm(url, model):
        program = dspy.Predict(Talk)
        first = program(question=INTRODUCTION, history=dspy.History(messages=[]))
        history = dspy.History(messages=[{"question": INTRODUCTION, "answer": first.answer}])
        return program(question=WHO, history=history).answer
