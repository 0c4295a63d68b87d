"""LlamaIndex."""

from common import CALL_IT, DESCRIBE, HELLO, INTRODUCTION, KEY, SUM, WHO, Number, add
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike


def llm(url, model):
    return OpenAILike(
        model=model,
        api_base=url,
        api_key=KEY,
        is_chat_model=True,
        is_function_calling_model=True,
    )


def chat(url, model):
    return llm(url, model).chat([ChatMessage(HELLO)]).message.content


def stream(url, model):
    return [part.delta for part in llm(url, model).stream_chat([ChatMessage(HELLO)]) if part.delta]


async def tools(url, model):
    return str(await FunctionAgent(tools=[add], llm=llm(url, model)).run(SUM))


def forced(url, model):
    answer = llm(url, model).chat_with_tools(
        [FunctionTool.from_defaults(add)], user_msg=CALL_IT, tool_required=True
    )
    return llm(url, model).get_tool_calls_from_response(answer)[0].tool_kwargs


def structured(url, model):
    answer = llm(url, model).as_structured_llm(Number).chat([ChatMessage(DESCRIBE)])
    return answer.raw.model_dump()


def turns(url, model):
    engine = SimpleChatEngine.from_defaults(llm=llm(url, model))
    engine.chat(INTRODUCTION)
    return engine.chat(WHO).response
