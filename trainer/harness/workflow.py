"""The workflow of the config as one async call: (example, llm) in, output out."""

from collections.abc import Callable
from typing import Any

from trainer.harness import frameworks
from trainer.harness.components import CustomConfig, PythonWorkflow
from trainer.harness.llm import Llm, Workflow
from trainer.harness.types import Example
from trainer.harness.user_code import call, instance, load


def load_workflow(config: PythonWorkflow | CustomConfig) -> Workflow:
    """The user's function, class, or framework's agent.

    A class of the user's own is made once and called as `workflow(example, llm)`.
    """
    if isinstance(config, CustomConfig):
        arguments = {name: value for name, value in config.arguments.items() if name != "llm"}
        made = instance(CustomConfig(_type=config.type, **arguments))
        return _called(made, {})
    function = load(config.function)
    if config.type == "python":
        return _called(function, config.args)
    return frameworks.WORKFLOWS[config.type](function, config.args)


def _called(function: Callable[..., Any], arguments: dict[str, Any]) -> Workflow:
    async def run(example: Example, llm: Llm) -> Any:
        return await call(function, example, llm, **arguments)

    return run
