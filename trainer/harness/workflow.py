"""Turns the configured workflow into one async function: `workflow(example, llm)`."""

from collections.abc import Callable
from typing import Any

from trainer.harness import frameworks
from trainer.harness.components import CustomConfig
from trainer.harness.llm import Llm, Workflow
from trainer.harness.types import Example
from trainer.harness.user_code import call, create_component, import_object
from trainer.harness.workflow_config import PythonWorkflowConfig


def load_workflow(config: PythonWorkflowConfig | CustomConfig) -> Workflow:
    """Load the user's function, class or framework agent.

    A class is created once, and its object is called for every run.
    """
    if isinstance(config, CustomConfig):
        arguments = {name: value for name, value in config.arguments.items() if name != "llm"}
        workflow = create_component(CustomConfig(_type=config.type, **arguments))
        return _as_async(workflow, {})
    function = import_object(config.function)
    if config.type == "python":
        return _as_async(function, config.args)
    return frameworks.WORKFLOWS[config.type](function, config.args)


def _as_async(function: Callable[..., Any], arguments: dict[str, Any]) -> Workflow:
    async def run(example: Example, llm: Llm) -> Any:
        return await call(function, example, llm, **arguments)

    return run
