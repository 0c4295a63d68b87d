"""Turns the trajectories of any ART client into the attempts that the page shows."""

import hashlib
import json
import math
from array import array
from collections.abc import Sequence
from typing import Any

from kit.types import Json
from trainer import exact_tokens
from trainer.exact_tokens import PREFIX
from trainer.page.batches import PREVIEW, Attempt, Group, TokenSequence
from trainer.rewards import are_equal
from trainer.server.journal import JournaledRequest
from trainer.server.learner_tokens import LearnerTokens
from trainer.server.matching import is_choice
from trainer.server.policy_spans import COMPLETION

EXAMPLE_KEYS = ("example_id", "scenario_id", "task_id", "example", "scenario", "id")
"""Metadata by which clients name the example of a trajectory, in order of preference."""
MOST_LOGS = 100


def groups_of(request: JournaledRequest, tokens: LearnerTokens | None) -> list[Group]:
    """The groups of a trained step. Supervised training has a group for each trajectory."""
    groups = request.groups
    supervised = request.config.get("kind") == "sft"
    dropped = tokens.dropped if tokens else []
    if supervised:
        members = [member for group in groups for member in group.get("trajectories") or []]
        groups = [{"trajectories": [member]} for member in members]
        dropped = [{**drop, "group": drop["trajectory"], "trajectory": 0} for drop in dropped]
    reasons: dict[tuple[int, int | None], str] = {
        (drop["group"], drop.get("trajectory")): drop["reason"] for drop in dropped
    }
    result = []
    for place, group in enumerate(groups):
        built = logged_group(group)
        for attempt in built.attempts:
            found = tokens.sequences.get((place, attempt.number)) if tokens else None
            if found and not attempt.error:
                _add_sequences(attempt, found, _choices(group["trajectories"][attempt.number]))
            if supervised:
                attempt.reward = None
            if reason := reasons.get((place, attempt.number)):
                attempt.error = f"Not trained: {reason}"
        built.trainable = any(attempt.advantage is not None for attempt in built.attempts)
        if not built.trainable:
            built.dropped = _reason(built, place, reasons)
        result.append(built)
    return result


def _reason(group: Group, place: int, reasons: dict[tuple[int, int | None], str]) -> str | None:
    """Why a group was not trained on: the learner's reason, or the one of most attempts."""
    if whole := reasons.get((place, None)):
        return whole
    each = [reason for (at, _), reason in reasons.items() if at == place]
    if each:
        return max(sorted(set(each)), key=each.count)
    rewards = group.rewards
    return "equal_rewards" if rewards and are_equal(rewards) else None


def logged_groups(groups: Sequence[Json]) -> list[Group]:
    """Groups that a client logs, for example of a validation."""
    return [logged_group(group) for group in groups]


def logged_group(group: Json) -> Group:
    """A group with its attempts, and those that ended with an exception."""
    attempts = [
        _attempt(number, member) for number, member in enumerate(_objects(group, "trajectories"))
    ]
    about = group.get("metadata")
    example = _named(about) if isinstance(about, dict) else None
    example = example or next((it.example for it in attempts if it.example), None)
    for fault in _listed(group, "exceptions"):
        about = fault if isinstance(fault, dict) else {"message": fault}
        error = ": ".join(str(about[key]) for key in ("type", "message") if about.get(key))
        attempts.append(Attempt(len(attempts), None, [], example, error=error or "An exception"))
    return Group(attempts, example)


def _attempt(number: int, trajectory: Json) -> Attempt:
    histories = [trajectory, *_objects(trajectory, "additional_histories")]
    choices = _choices(trajectory)
    metadata = trajectory.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    parts = trajectory.get("metrics")
    sequences = exact_sequences(choices)
    last = choices[-1] if choices else {}
    conversations = [_conversation(history) for history in histories]
    answers = [it["content"] for it in conversations[0]["messages"] if it["role"] == "assistant"]
    return Attempt(
        number=number,
        reward=_number(trajectory.get("reward")),
        conversations=conversations,
        example=_example(metadata, conversations[0]["messages"]),
        parts={
            str(name): value
            for name, found in (parts.items() if isinstance(parts, dict) else ())
            if (value := _number(found)) is not None
        },
        metadata=metadata,
        logs=[str(line) for line in _listed(trajectory, "logs")[:MOST_LOGS]],
        turns=len(choices) or len(answers),
        tokens=sum(sum(sequence.mask) for sequence in sequences),
        finish=None if (finish := last.get("finish_reason")) is None else str(finish)[:PREVIEW],
        preview=answers[-1] if answers else "",
        sequences=sequences,
    )


def _listed(value: Json, name: str) -> list[Any]:
    """A list of a client's object: what is no list counts as its only member, nothing as none."""
    found = value.get(name)
    return found if isinstance(found, list) else [] if not found else [found]


def _objects(value: Json, name: str) -> list[Json]:
    return [one for one in _listed(value, name) if isinstance(one, dict)]


def _number(value: Any) -> float | None:
    try:
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
    except OverflowError:  # an integer may be too large for a double
        return None


def _choices(trajectory: Json) -> list[Json]:
    histories = [trajectory, *_objects(trajectory, "additional_histories")]
    items = (item for history in histories for item in _objects(history, "messages_and_choices"))
    return [item for item in items if is_choice(item)]


def _named(metadata: Json) -> str | None:
    """The example that metadata names."""
    for key in EXAMPLE_KEYS:
        if isinstance(metadata.get(key), str | int) and metadata[key] != "":
            return str(metadata[key])[:200]
    return None


def _example(metadata: Json, messages: list[Json]) -> str | None:
    """The name of the example; a client that gives none gets one from the prompt."""
    if name := _named(metadata):
        return name
    prompt = []
    for message in messages:
        if message["role"] == "assistant":
            break
        prompt.append((message["role"], message["content"]))
    if not prompt:
        return None
    digest = hashlib.blake2b(json.dumps(prompt).encode(), digest_size=3).hexdigest()
    return f"{' '.join(prompt[-1][1].split())[:48]} ({digest})"


def _conversation(history: Json) -> Json:
    messages = [_message(item) for item in _objects(history, "messages_and_choices")]
    tools = history.get("tools")
    return {"messages": messages, "tools": tools if isinstance(tools, list) else []}


def _message(item: Json) -> Json:
    chosen = is_choice(item)
    message = item.get("message") if chosen else item
    message = message if isinstance(message, dict) else {}
    calls = message.get("tool_calls")
    result: Json = {
        "role": str(message.get("role") or ("assistant" if chosen else "")),
        "content": _text(message.get("content") or message.get("refusal")),
        "trained": chosen,
    }
    if isinstance(calls, list) and calls:
        result["tool_calls"] = calls
    for key in ("name", "tool_call_id"):
        if message.get(key):
            result[key] = str(message[key])
    if thought := message.get("reasoning_content") or message.get("reasoning"):
        result["reasoning"] = _text(thought)
    return result


def _text(content: Any) -> str:
    """The text of a message, whose content may be a list of parts."""
    if content is None or isinstance(content, str):
        return content or ""
    if isinstance(content, list):
        return "\n".join(
            str(part["text"])
            if isinstance(part, dict) and isinstance(part.get("text"), str)
            else json.dumps(part)
            for part in content
        )
    return json.dumps(content)


def exact_sequences(choices: Sequence[Json]) -> list[TokenSequence]:
    """The sampled tokens of choices as sequences: a turn that continues another one extends it."""
    result: list[TokenSequence] = []
    for choice in choices:
        prompt, ids, logprobs = _tokens(choice)
        if not ids:
            continue
        current = result[-1] if result else None
        if current is None or prompt[: len(current.ids)] != current.ids.tolist():
            current = TokenSequence(array("i"), b"", array("f"))
            result.append(current)
        added = prompt[len(current.ids) :]
        current.ids.extend(added)
        current.ids.extend(ids)
        current.mask += bytes(len(added)) + b"\1" * len(ids)
        current.logprobs.extend([math.nan] * len(added))
        current.logprobs.extend(logprobs or [math.nan] * len(ids))
        if (step := policy_step(choice)) is not None:
            current.policy_steps.append((len(current.ids) - len(ids), len(current.ids), step))
    return result


def _tokens(choice: Json) -> tuple[list[int], list[int], list[float]]:
    """Prompt, tokens and logprobs of a choice: the ledger's, or those that the client sends."""
    if exact := exact_tokens.take(choice):
        return exact.prompt_ids, exact.completion_ids, exact.logprobs
    found = choice.get("logprobs")
    content = found.get("content") if isinstance(found, dict) else None
    tokens = [token for token in content or [] if isinstance(token, dict)]
    names = [str(token.get("token", "")) for token in tokens]
    if not all(name.startswith(PREFIX) and name[len(PREFIX) :].isdigit() for name in names):
        return [], [], []
    ids = [int(name[len(PREFIX) :]) for name in names]
    if any(token >= 1 << 31 for token in ids):
        return [], [], []
    logprobs = [_number(token.get("logprob")) for token in tokens]
    return [], ids, [math.nan if it is None else it for it in logprobs]


def policy_step(choice: Json) -> int | None:
    """The step that sampled a choice, as the answer said."""
    spans = choice.get(COMPLETION)
    first = spans[0] if isinstance(spans, list) and spans else None
    found = first.get("policy_version") if isinstance(first, dict) else choice.get("policy_step")
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def _add_sequences(attempt: Attempt, found: list[TokenSequence], choices: list[Json]) -> None:
    """Replace the tokens of an attempt by those that the learner trained on."""
    attempt.sequences = found
    attempt.advantage = found[0].advantage
    attempt.tokens = sum(sum(sequence.mask) for sequence in found)
    steps = {step for choice in choices if (step := policy_step(choice)) is not None}
    lengths = [len(_tokens(choice)[1]) for choice in choices]
    chosen = [
        (sequence, place) for sequence in found for place, mask in enumerate(sequence.mask) if mask
    ]
    if len(steps) == 1:
        (step,) = steps
        for sequence in found:
            sequence.policy_steps = [(0, len(sequence.ids), step)]
    elif sum(lengths) == len(chosen):  # every choice was trained, in this order
        at = 0
        for choice, length in zip(choices, lengths, strict=True):
            part, at = chosen[at : at + length], at + length
            step = policy_step(choice)
            if part and step is not None:
                sequence, start = part[0]
                sequence.policy_steps.append((start, part[-1][1] + 1, step))
