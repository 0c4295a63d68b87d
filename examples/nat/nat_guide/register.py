"""The guide's `my_workflow` and `my_custom_evaluator`: replace them with your agent and reward."""

from collections.abc import AsyncIterator

from nat.builder.builder import Builder, EvalBuilder
from nat.builder.evaluator import EvaluatorInfo
from nat.builder.framework_enum import LLMFrameworkEnum
from nat.builder.function_info import FunctionInfo
from nat.cli.register_workflow import register_evaluator, register_function
from nat.data_models.component_ref import LLMRef
from nat.data_models.evaluator import EvalInput, EvaluatorBaseConfig
from nat.data_models.function import FunctionBaseConfig
from nat.plugins.eval.data_models.evaluator_io import EvalOutput, EvalOutputItem


class MyWorkflowConfig(FunctionBaseConfig, name="my_workflow"):  # type: ignore[call-arg]
    llm: LLMRef


@register_function(config_type=MyWorkflowConfig, framework_wrappers=[LLMFrameworkEnum.LANGCHAIN])
async def my_workflow(config: MyWorkflowConfig, builder: Builder) -> AsyncIterator[FunctionInfo]:
    llm = await builder.get_llm(config.llm, wrapper_type=LLMFrameworkEnum.LANGCHAIN)

    async def answer(question: str) -> str:
        """Ask the model being trained."""
        reply = await llm.ainvoke([("system", "Answer in plain words."), ("human", question)])
        return str(reply.content)

    yield FunctionInfo.from_fn(answer, description="Answers a question.")


class MyRewardConfig(EvaluatorBaseConfig, name="my_custom_evaluator"):  # type: ignore[call-arg]
    pass


def reward(text: str) -> float:
    """Return the share of ASCII letters, which even a random model can improve."""
    return sum(c.isascii() and c.isalpha() for c in text) / max(len(text), 1)


@register_evaluator(config_type=MyRewardConfig)
async def my_custom_evaluator(
    config: MyRewardConfig, builder: EvalBuilder
) -> AsyncIterator[EvaluatorInfo]:
    async def evaluate(eval_input: EvalInput) -> EvalOutput:
        items = [
            EvalOutputItem(
                id=item.id, score=reward(str(item.output_obj or "")), reasoning="share of letters"
            )
            for item in eval_input.eval_input_items
        ]
        mean = sum(item.score for item in items) / max(len(items), 1)
        return EvalOutput(average_score=mean, eval_output_items=items)

    yield EvaluatorInfo(config=config, evaluate_fn=evaluate, description="Share of letters")
