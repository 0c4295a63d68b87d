"""Builds episodes from the recorded calls of a run, and ART's JSON from episodes."""

import itertools
from collections.abc import Sequence

from kit.types import Json
from trainer.client.conversations import Turn, is_choice, join, text_of
from trainer.errors import OutOfOrder
from trainer.harness.types import (
    Completion,
    EpisodeItem,
    EpisodeItemRole,
    Failure,
    LostRun,
    Trajectory,
    TrajectoryCollection,
    WorkflowRun,
)

NO_LOGPROBS = "No valid assistant messages with logprobs"


def select_completions(
    completions: Sequence[Completion], functions: Sequence[str] | None, llm: str | None
) -> list[Completion]:
    """Return the calls of these functions and this LLM. None selects all."""
    return [
        completion
        for completion in completions
        if (functions is None or completion.function in functions)
        and (llm is None or completion.llm == llm)
    ]


def build(run: WorkflowRun, completions: Sequence[Completion]) -> Trajectory | None:
    """Build the run's trajectory. If there is none, set the run's failure and return None."""
    if not completions:
        run.fail(
            Failure.NO_CALLS, "no call to the target model from a target function was recorded"
        )
        return None
    sampled = [completion for completion in completions if completion.has_logprobs]
    if not sampled:
        run.fail(Failure.NO_LOGPROBS, NO_LOGPROBS)
        return None
    conversations = join(Turn(call.messages, call.choice, call.tools) for call in sampled)
    episodes = [list(map(_item, conversation.items)) for conversation in conversations]
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
            **({} if run.group is None else {"group": run.group}),
            "tools": conversations[0].tools,
            "additional_tools": [conversation.tools for conversation in conversations[1:]],
            "recorded": all(completion.recorded for completion in sampled),
            **_reasons(run),
        },
    )


def _reasons(run: WorkflowRun) -> Json:
    """The reasons of evaluators as metadata, which the page shows beside the reward."""
    return {f"reason/{name}": reason for name, reason in run.reasons.items()}


def _item(item: Json) -> EpisodeItem:
    return _choice_item(item) if is_choice(item) else _message_item(item)


def _message_item(message: Json) -> EpisodeItem:
    role = message.get("role")
    known = role if role in set(EpisodeItemRole) else EpisodeItemRole.OTHER
    return EpisodeItem(
        role=EpisodeItemRole(known),
        content=text_of(message.get("content")),
        metadata={"message": message},
    )


def _choice_item(choice: Json) -> EpisodeItem:
    return EpisodeItem(
        role=EpisodeItemRole.ASSISTANT,
        content=text_of(choice["message"].get("content")),
        logprobs=choice["logprobs"],
        metadata={"choice": choice},
    )


def check_order(episode: Sequence[EpisodeItem]) -> None:
    """Raise if no chat template can render the episode as it was sampled."""
    if not episode:
        raise OutOfOrder("An episode is empty")
    first = episode[0].role
    if first not in (EpisodeItemRole.USER, EpisodeItemRole.SYSTEM):
        raise OutOfOrder(f"An episode starts with `{first}`, not with a user or system message")
    for before, after in itertools.pairwise(episode):
        if before.role == after.role == EpisodeItemRole.ASSISTANT:
            raise OutOfOrder("An episode has two assistant messages in a row")


def to_wire(trajectory: Trajectory) -> Json:
    """Convert a trajectory to the JSON of ART's control API."""
    metadata = trajectory.metadata or {}
    episodes = [trajectory.episode, *trajectory.additional_episodes]
    tools = [metadata.get("tools")] * len(episodes)
    tools[1:] = metadata.get("additional_tools", tools[1:])
    first, *more = (
        {"messages_and_choices": [_wire_item(item) for item in episode], "tools": own}
        for episode, own in zip(episodes, tools, strict=True)
    )
    # The API accepts only plain values as metadata.
    plain = {k: v for k, v in metadata.items() if isinstance(v, str | int | float | bool)}
    return {
        **first,
        "additional_histories": more,
        "reward": trajectory.reward,
        "metrics": trajectory.metrics,
        "metadata": plain,
        "logs": [],
    }


def lost(groups: Sequence[Sequence[WorkflowRun]]) -> list[LostRun]:
    """Return the runs without a trajectory, with their reasons."""
    return [
        LostRun(
            example_id=run.example.id, reason=run.failure.value, error=run.error, group=run.group
        )
        for group in groups
        for run in group
        if run.failure is not None
    ]


def wire_groups(collection: TrajectoryCollection) -> list[Json]:
    """Convert an epoch to ART's groups, with the lost runs of each example as exceptions.

    An example without trajectories has a group of exceptions alone. These come last, and the
    backend counts them but trains on nothing in them.
    """
    exceptions: dict[tuple[str, int | None], list[Json]] = {}
    for run in collection.lost:
        key = run.example_id, run.group
        exceptions.setdefault(key, []).append(_exception(run.reason, run.error))
    groups = []
    for group in collection.trajectories:
        metadata = (group[0].metadata or {}) if group else {}
        key = str(metadata.get("example_id", "")), metadata.get("group")
        members = [to_wire(trajectory) for trajectory in group]
        groups.append({"trajectories": members, "exceptions": exceptions.pop(key, [])})
    return groups + [_lost_group(example, errors) for (example, _), errors in exceptions.items()]


def _lost_group(example: str, exceptions: list[Json]) -> Json:
    return {"trajectories": [], "exceptions": exceptions, "metadata": {"example_id": example}}


def _exception(reason: str, error: str) -> Json:
    return {"type": reason, "message": error, "traceback": ""}


def validation_group(run: WorkflowRun) -> Json:
    """Convert a validation run to an ART group: its last conversation and its reward."""
    if run.reward is None:
        return _lost_group(run.example.id, [_exception(str(run.failure), run.error)])
    last = run.completions[-1:]
    messages = [message for call in last for message in (*call.messages, call.choice)]
    metadata = {"example_id": run.example.id, **_reasons(run)}
    trajectory = {"messages_and_choices": messages, "reward": run.reward, "metadata": metadata}
    return {"trajectories": [{**trajectory, "metrics": run.metrics}], "exceptions": []}


def _wire_item(item: EpisodeItem) -> Json:
    metadata = item.metadata or {}
    if item.role == EpisodeItemRole.ASSISTANT and item.logprobs is not None:
        return metadata.get("choice") or {
            "index": 0,
            "finish_reason": "stop",
            "logprobs": item.logprobs,
            "message": {"role": "assistant", "content": item.content},
        }
    return metadata.get("message") or {"role": item.role.value, "content": item.content}
