"""Instructor, whose default is a tool of the model's schema, forced by name."""

import instructor
import pydantic
from common import CALL_IT, DESCRIBE, HELLO, INTRODUCTION, KEY, WHO, Number, assistant, user
from openai import OpenAI


class Adding(pydantic.BaseModel):
    """Add two numbers."""

    a: int
    b: int


def client(url):
    return instructor.from_openai(OpenAI(base_url=url, api_key=KEY))


def ask(url, model, *messages, kind=None):
    return client(url).chat.completions.create(
        model=model, messages=list(messages), response_model=kind
    )


def chat(url, model):
    return ask(url, model, user(HELLO)).choices[0].message.content


def stream(url, model):
    chunks = client(url).chat.completions.create(
        model=model, messages=[user(HELLO)], response_model=None, stream=True
    )
    return [chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content]


def forced(url, model):
    return ask(url, model, user(CALL_IT), kind=Adding).model_dump()


def structured(url, model):
    return ask(url, model, user(DESCRIBE), kind=Number).model_dump()


def turns(url, model):
    first = ask(url, model, user(INTRODUCTION)).choices[0].message.content
    answer = ask(url, model, user(INTRODUCTION), assistant(first), user(WHO))
    return answer.choices[0].message.content
