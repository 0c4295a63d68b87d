"""Settings of every kind of workflow, each chosen by its `_type`."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from kit.config import Config
from trainer.harness.components import Custom, type_of


class PythonWorkflowConfig(Config):
    """A function written by the user: `function(example, llm, **args)`, sync or async."""

    type: Literal["python", "langchain", "langgraph", "llama_index", "google_adk"] = Field(
        alias="_type"
    )
    """`python`, or the agent framework that the function builds an agent for."""
    function: str
    """`module:callable`. With a framework, a factory: it receives the framework's LLM object and
    returns an agent."""
    llm: str
    """The LLM that the workflow calls, by its name in `llms`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Extra keyword arguments for the function."""


class EnvironmentConfig(Config):
    """Settings of every workflow that brings its own examples and its own reward."""

    llm: str
    """The LLM that the workflow calls, by its name in `llms`."""
    args: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the environment."""
    validation_examples: int = Field(0, ge=0)
    """Number of examples to validate on every `--validation_interval` epochs. 0: no validation."""


class VerifiersConfig(EnvironmentConfig):
    """An environment of the package `verifiers`: its examples, tools, turns and rewards."""

    type: Literal["verifiers"] = Field(alias="_type")
    env: str
    """Name of the environment, as `verifiers` loads it: an installed package, or a module in the
    working directory."""
    max_examples: int | None = Field(None, ge=1)
    """Use only this many examples. An endless taskset needs it."""


class GymnasiumConfig(EnvironmentConfig):
    """An environment with `reset` and `step` as in Gymnasium, whose observations and actions are
    text."""

    type: Literal["gymnasium"] = Field(alias="_type")
    env: str
    """`module:Class`, or an id that is registered with Gymnasium."""
    episodes: int = Field(64, ge=1)
    """Number of training examples. Each is a seed, which `reset` receives."""
    max_turns: int = Field(16, ge=1)
    """An episode ends after this many steps at the latest."""
    system_prompt: str | None = None
    """First message of every conversation."""
    history: Literal["all", "last"] = "all"
    """`all` sends the whole conversation with each observation, `last` only the observation."""


WorkflowConfig = Annotated[
    Annotated[PythonWorkflowConfig, Tag("python")]
    | Annotated[PythonWorkflowConfig, Tag("langchain")]
    | Annotated[PythonWorkflowConfig, Tag("langgraph")]
    | Annotated[PythonWorkflowConfig, Tag("llama_index")]
    | Annotated[PythonWorkflowConfig, Tag("google_adk")]
    | Annotated[VerifiersConfig, Tag("verifiers")]
    | Annotated[GymnasiumConfig, Tag("gymnasium")]
    | Custom,
    Discriminator(type_of),
]
