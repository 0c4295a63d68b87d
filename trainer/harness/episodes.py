"""From the calls a run made to episodes, and from episodes to what the backend trains on."""

import itertools
from collections.abc import Sequence

from kit.types import Json
from trainer.errors import OutOfOrder
from trainer.harness.types import (
    Completion,
    EpisodeItem,
    EpisodeItemRole,
    Failure,
    Trajectory,
    WorkflowRun,
)

NO_LOGPROBS = "No valid assistant messages with logprobs"


def wanted(
    completions: Sequence[Completion], functions: Sequence[str] | None, llm: str | None
) -> list[Completion]:
    """The calls that are trained on: those of the named functions and of one LLM; None is all."""
    return [
        completion
        for completion in completions
        if (functions is None or completion.function in functions)
        and (llm is None or completion.llm == llm)
    ]


def build(run: WorkflowRun, completions: Sequence[Completion]) -> Trajectory | None:
    """The run's trajectory, or None with the run's failure set."""
    if not completions:
        run.fail(Failure.NO_CALLS, "no call of the target functions and model was recorded")
        return None
    sampled = [completion for completion in completions if completion.has_logprobs]
    if not sampled:
        run.fail(Failure.NO_LOGPROBS, NO_LOGPROBS)
        return None
    episodes = _episodes(sampled)
    if not all(completion.recorded for completion in sampled):
        try:
            for episode in episodes:
                check_order(episode)
        except OutOfOrder as error:
            run.fail(Failure.OUT_OF_ORDER, error.message)
            return None
    assert run.reward is not None
    return Trajectory(
        episode=episodes[0],
        additional_episodes=episodes[1:],
        reward=run.reward,
        shaped_rewards=run.step_rewards or None,
        metrics=run.metrics,
        metadata={
            "example_id": run.example.id,
            "generation": run.generation,
            "tools": sampled[0].tools,
            "recorded": all(completion.recorded for completion in sampled),
        },
    )


def _episodes(completions: Sequence[Completion]) -> list[list[EpisodeItem]]:
    """Calls that continue each other are one conversation; any other begins one of its own."""
    conversations: list[tuple[list[Json], list[EpisodeItem]]] = []
    for completion in completions:
        told = [_core(message) for message in completion.messages]
        continued = (c for c in conversations if told[: len(c[0])] == [_core(m) for m in c[0]])
        said, items = found = next(continued, ([], []))
        if not said:
            conversations.append(found)
        items += [_message_item(message) for message in completion.messages[len(said) :]]
        items.append(_choice_item(completion.choice))
        said[:] = [*completion.messages, completion.choice["message"]]
    return [items for _, items in conversations]


def _core(message: Json) -> Json:
    """What makes two messages the same: frameworks add and drop empty fields."""
    calls = [(call.get("function") or {}).get("name") for call in message.get("tool_calls") or ()]
    return {
        "role": message.get("role"),
        "content": _text(message.get("content")).strip(),
        "calls": calls,
    }


def _text(content: object) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return "" if content is None else str(content)


def _message_item(message: Json) -> EpisodeItem:
    role = message.get("role")
    known = role if role in set(EpisodeItemRole) else EpisodeItemRole.OTHER
    return EpisodeItem(
        role=EpisodeItemRole(known),
        content=_text(message.get("content")),
        metadata={"message": message},
    )


def _choice_item(choice: Json) -> EpisodeItem:
    return EpisodeItem(
        role=EpisodeItemRole.ASSISTANT,
        content=_text(choice["message"].get("content")),
        logprobs=choice["logprobs"],
        metadata={"choice": choice},
    )


def check_order(episode: Sequence[EpisodeItem]) -> None:
    """Refuse what no chat template can render as it was sampled."""
    if not episode:
        raise OutOfOrder("An episode is empty")
    first = episode[0].role
    if first not in (EpisodeItemRole.USER, EpisodeItemRole.SYSTEM):
        raise OutOfOrder(f"An episode starts with `{first}`, not with a user or system message")
    for before, after in itertools.pairwise(episode):
        if before.role == after.role == EpisodeItemRole.ASSISTANT:
            raise OutOfOrder("An episode has two assistant messages in a row")


def to_wire(trajectory: Trajectory) -> Json:
    """A trajectory as ART's control API takes it."""
    about = trajectory.metadata or {}
    tools = about.get("tools")
    # The API's metadata holds plain values only.
    plain = {k: v for k, v in about.items() if isinstance(v, str | int | float | bool)}
    return {
        "messages_and_choices": [_wire_item(item) for item in trajectory.episode],
        "additional_histories": [
            {"messages_and_choices": [_wire_item(item) for item in episode], "tools": tools}
            for episode in trajectory.additional_episodes
        ],
        "tools": tools,
        "reward": trajectory.reward,
        "metrics": trajectory.metrics,
        "metadata": plain,
        "logs": [],
    }


def measured(run: WorkflowRun) -> Json:
    """A run that is not trained on, as a group of ART's: its last conversation and its reward."""
    if run.reward is None:
        why = {"type": str(run.failure), "message": run.error, "traceback": ""}
        return {"trajectories": [], "exceptions": [why]}
    last = run.completions[-1:]
    said = [message for call in last for message in (*call.messages, call.choice)]
    about = {"example_id": run.example.id}
    trajectory = {"messages_and_choices": said, "reward": run.reward, "metadata": about}
    return {"trajectories": [{**trajectory, "metrics": run.metrics}], "exceptions": []}


def _wire_item(item: EpisodeItem) -> Json:
    about = item.metadata or {}
    if item.role == EpisodeItemRole.ASSISTANT and item.logprobs is not None:
        return about.get("choice") or {
            "index": 0,
            "finish_reason": "stop",
            "logprobs": item.logprobs,
            "message": {"role": "assistant", "content": item.content},
        }
    return about.get("message") or {"role": item.role.value, "content": item.content}
