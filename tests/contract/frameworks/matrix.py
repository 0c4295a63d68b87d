"""The matrix of frameworks: which there are, how they run, and their table in the manual.

`WRITE_TABLE=1 scripts/test all tests/contract/test_matrix.py` writes the table.
"""

import functools
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.environments import ROOT, client_environment, node_modules_of, python_of
from tests.serving import Serving

HERE = Path(__file__).parent
PAGE = ROOT / "docs" / "frameworks.md"
BASE = "tiny-random"
MODEL = {"name": "matrix", "project": "contract", "base_model": BASE}
COLUMNS = {
    "chat": "Chat",
    "stream": "Stream",
    "tools": "Tool agent",
    "forced": "Forced tool",
    "structured": "Structured",
    "turns": "Turns",
    "completions": "Completions",
}
WORKS, ABSENT = "✓", "-"


@dataclass(frozen=True)
class Framework:
    """One row: the driver's name, what the framework is called, and its package."""

    driver: str
    name: str
    package: str
    environment: str
    structured: str
    """How it asks for structured output unless told otherwise."""


SCHEMA, TOOL, TEXT, NONE = "JSON schema", "forced tool", "text that it parses", ABSENT
FRAMEWORKS = [
    Framework("openai", "OpenAI", "openai", "openai-3", SCHEMA),
    Framework("openai_responses", "OpenAI, Responses API", "openai", "openai-3", SCHEMA),
    Framework("openai_agents", "OpenAI Agents SDK", "openai-agents", "openai-3", SCHEMA),
    Framework("anthropic", "Anthropic, Messages API", "anthropic", "openai-3", SCHEMA),
    Framework("langchain", "LangChain and LangGraph", "langchain-openai", "openai-3", SCHEMA),
    Framework("pydantic_ai", "PydanticAI", "pydantic-ai-slim", "openai-3", TOOL),
    Framework("smolagents", "smolagents", "smolagents", "openai-3", SCHEMA),
    Framework(
        "agent_framework", "Microsoft Agent Framework", "agent-framework-core", "openai-3", SCHEMA
    ),
    Framework("agno", "Agno", "agno", "openai-3", SCHEMA),
    Framework("inspect_ai", "Inspect", "inspect-ai", "openai-3", SCHEMA),
    Framework("lm_eval", "lm-evaluation-harness", "lm-eval", "openai-3", NONE),
    Framework("vercel", "Vercel AI SDK", "ai", "vercel", SCHEMA),
    Framework("litellm", "LiteLLM", "litellm", "openai-2", SCHEMA),
    Framework("llama_index", "LlamaIndex", "llama-index-core", "openai-2", TOOL),
    Framework("dspy", "DSPy", "dspy", "openai-2", TEXT),
    Framework("autogen", "AutoGen", "autogen-agentchat", "openai-2", SCHEMA),
    Framework("strands", "Strands Agents", "strands-agents", "openai-2", TOOL),
    Framework("adk", "Google ADK", "google-adk", "openai-2", SCHEMA),
    Framework("crewai", "CrewAI", "crewai", "crewai", SCHEMA),
    Framework("instructor", "Instructor", "instructor", "crewai", TOOL),
    Framework("verifiers", "verifiers", "verifiers", "verifiers", NONE),
]


def _fields(**fields: str) -> str:
    """An answer as DSPy wants it."""
    text = "".join(f"[[ ## {name} ## ]]\n{value}\n\n" for name, value in fields.items())
    return f"{text}[[ ## completed ## ]]"


def _call(name: str, **arguments: object) -> str:
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"


_AGAIN = r"I am Ada\.[\s\S]*Nice to meet you\.[\s\S]*What is my name\?"
SCRIPT = [
    {"when": when, "replies": [reply]}
    for when, reply in (
        # DSPy's agent: its second step, its first, and its answer. Then its other programs.
        (
            r"## next_tool_args ## \]\][\s\S]*## observation_0 ##",
            _fields(next_thought="I know it.", next_tool_name="finish", next_tool_args="{}"),
        ),
        (
            r"## next_tool_args ##",
            _fields(next_thought="I add.", next_tool_name="add", next_tool_args='{"a": 2, "b": 3}'),
        ),
        (
            r"## reasoning ## \]\][\s\S]*What is 2 \+ 3",
            _fields(reasoning="I added.", answer="The answer is 5."),
        ),
        (r"## value ## \]\]", _fields(value="4", even="True")),
        (rf"## answer ## \]\][\s\S]*{_AGAIN}", _fields(answer="You are Ada.")),
        (r"## answer ## \]\][\s\S]*I am Ada\.", _fields(answer="Nice to meet you.")),
        (r"## answer ## \]\][\s\S]*Say hello\.", _fields(answer="Hello there.")),
        # smolagents ends with a tool, and shows what a tool gave as an observation.
        (
            r"final_answer[\s\S]*(<tool_response>|Observation:\n5)",
            _call("final_answer", answer="The answer is 5."),
        ),
        (r"<tool_response>", "The answer is 5."),
        (r"<tools>[\s\S]*What is 2 \+ 3\?", _call("add", a=2, b=3)),
        (_AGAIN, "You are Ada."),
        (r"I am Ada\.", "Nice to meet you."),
        (r"Say hello\.", "Hello there."),
    )
]
"""Everything else is sampled: forced tools, structured output and completions."""


@contextmanager
def serving(directory: Path, **environment: str) -> Iterator[Serving]:
    """The server of all frameworks: a scripted engine around the embedded one, and a model."""
    script = directory / "script.json"
    script.write_text(json.dumps(SCRIPT))
    program = ("trainer.testing", str(script))
    with Serving(directory, BASE, program=program, **environment) as server:
        server.post("/_prepare_backend_for_training", {"model": MODEL})
        yield server


class Matrix:
    """Runs the frameworks of an environment in one process, once."""

    def __init__(self, server: Serving, cache: str, directory: Path) -> None:
        self.server = server
        self.tokenizer = next((Path(cache) / "models").glob(f"{BASE}-*/tokenizer.json")).parent
        self._directory = directory
        self._run = functools.cache(self._run_once)

    def results(self, environment: str) -> dict[tuple[str, str], str]:
        """What went wrong, by driver and column; an empty string where nothing did."""
        done = self._run(environment)
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        return {(line["framework"], line["column"]): line["error"] for line in lines}

    def _run_once(self, environment: str) -> subprocess.CompletedProcess[str]:
        arguments = [self.server.openai, str(MODEL["name"])]
        drivers = [f.driver for f in FRAMEWORKS if f.environment == environment]
        if environment == "vercel":
            node, modules = node_modules_of("vercel", python("openai-3"))
            shutil.copy(HERE / "vercel.mjs", modules)  # it finds packages beside it
            command = [str(node), str(modules / "vercel.mjs"), *arguments, ",".join(COLUMNS)]
        else:
            # Packages warn about each other's old interfaces.
            interpreter = [str(python(environment)), "-W", "ignore"]
            command = [*interpreter, str(HERE / "run.py"), *arguments, *drivers]
        variables = {**client_environment(), **_QUIET, "TOKENIZER": str(self.tokenizer)}
        return subprocess.run(
            command,
            cwd=self._directory,
            env={**variables, "HOME": str(self._directory)},
            capture_output=True,
            text=True,
        )


_QUIET = {
    "AGNO_TELEMETRY": "false",
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_DISABLE_VERSION_CHECK": "true",
    "CREWAI_TRACING_ENABLED": "false",
    "HF_HUB_OFFLINE": "1",
    "OTEL_SDK_DISABLED": "true",
}


def python(environment: str) -> Path:
    return python_of(f"matrix-{environment}", ours=False)


def version(framework: Framework) -> str:
    """The pinned version of a framework's package."""
    clients = ROOT / "requirements" / "clients"
    if framework.environment == "vercel":
        needs = json.loads((clients / "vercel" / "package.json").read_text())["dependencies"]
        return str(needs[framework.package])
    pins = (clients / f"matrix-{framework.environment}.txt").read_text()
    found = re.search(rf"^{framework.package}==(\S+)", pins, re.MULTILINE)
    assert found, f"{framework.package} is not pinned"
    return found[1]


def table(results: dict[tuple[str, str], str]) -> str:
    """The table of the manual, from what a run of all frameworks saw."""
    head = ["Framework", "Package", *COLUMNS.values(), "Asks for structured output by"]
    rows = [head, ["---", "---", *([":-:"] * len(COLUMNS)), "---"]]
    for framework in FRAMEWORKS:
        cells = [framework.name, f"`{framework.package}` {version(framework)}"]
        for column in COLUMNS:
            error = results.get((framework.driver, column))
            cells.append(ABSENT if error is None else "fails" if error else WORKS)
        rows.append([*cells, framework.structured])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


START, END = "<!-- written by the matrix -->\n\n", "\n<!-- end generated -->"


def table_in_manual() -> str:
    return PAGE.read_text().partition(START)[2].partition(END)[0]


def write_table(text: str) -> None:
    before, start, rest = PAGE.read_text().partition(START)
    PAGE.write_text(before + start + text + END + rest.partition(END)[2])
