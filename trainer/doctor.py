"""`trainer doctor`: find out why a run does not learn, from the metrics that the server logged.

Each check reads the history of the last steps and returns a finding or None.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kit.types import Json
from trainer.runs import ModelRun

RECENT = 10  # steps to examine


@dataclass(frozen=True)
class Finding:
    problem: str
    hint: str


def examine(run: ModelRun) -> list[Finding]:
    """Return the problems that keep `run` from learning, likeliest cause first."""
    steps: dict[int, Json] = {}
    for row in run.history():  # a step's canary is logged as a separate line
        steps.setdefault(row.get("step", 0), {}).update(row)
    history = [row for row in steps.values() if "num_gradient_steps" in row][-RECENT:]
    if not history:
        return findings_of(history, run.name)
    damaged = [Finding(fault, "Delete it to use the step before it") for fault in run.damaged()]
    return findings_of(history, run.name) + damaged


def findings_of(history: list[Json], name: str) -> list[Finding]:
    """The problems that the newest steps of a run show, without a look at its checkpoints."""
    if not history:
        return [
            Finding(
                f"`{name}` has not trained a step yet",
                "Send trajectories with `backend.train(model, groups)`",
            )
        ]
    return [finding for check in _CHECKS if (finding := check(history))]


def _mean(history: list[Json], name: str) -> float | None:
    values = [row[name] for row in history if name in row]
    return sum(values) / len(values) if values else None


def _share(history: list[Json], part: str, whole: str, *, above: float) -> float | None:
    """Return the sum of `part` divided by the sum of `whole` if it is above `above`."""
    total = sum(row.get(whole, 0) for row in history)
    share = sum(row.get(part, 0) for row in history) / total if total else 0.0
    return share if share > above else None


def _retokenized(history: list[Json]) -> Finding | None:
    each = _share(history, "data/retokenized", "data/step_num_trajectories", above=0.1)
    if each is None:
        return None
    return Finding(
        f"{each:.2f} choices per trajectory were not sampled by this server, or have no logprobs",
        "Send chats to this server's OpenAI port, and keep each `choice` with its logprobs",
    )


def _ambiguous(history: list[Json]) -> Finding | None:
    each = _share(history, "data/ambiguous_choices", "data/step_num_trajectories", above=0.0)
    if each is None:
        return None
    return Finding(
        f"{each:.2f} choices per trajectory have no certain prompt, and are not trained",
        "Send every choice with its `choice_id`, or build trajectories with "
        "`trainer.client.rollout`: the framework drops the ids and rewrites messages",
    )


def _without_logprobs(history: list[Json]) -> Finding | None:
    each = _share(history, "data/choices_without_logprobs", "data/step_num_trajectories", above=0.0)
    if each is None:
        return None
    return Finding(
        f"{each:.2f} choices per trajectory came without log probabilities, and are not trained",
        "Request `logprobs: true` and keep each `choice` as the server returned it",
    )


def _equal_rewards(history: list[Json]) -> Finding | None:
    share = _share(
        history, "data/dropped_equal_rewards", "data/step_num_groups_submitted", above=0.5
    )
    if share is None:
        return None
    return Finding(
        f"Only {1 - share:.0%} of the groups teach anything: in the others all rewards are equal",
        "Grade more finely, raise `num_generations`, or choose examples that are sometimes solved",
    )


def _truncated(history: list[Json]) -> Finding | None:
    each = _share(history, "data/step_num_truncated", "data/step_num_trajectories", above=0.2)
    if each is None:
        return None
    return Finding(
        f"{each:.2f} completions per trajectory were cut off by `max_tokens`",
        "Raise `max_tokens`, or reward short answers",
    )


def _too_long(history: list[Json]) -> Finding | None:
    share = _share(history, "data/dropped_too_long", "data/step_num_trajectories", above=0.1)
    if share is None:
        return None
    return Finding(
        f"{share:.0%} of the trajectories are longer than `max_seq_length` and are dropped",
        "Raise `max_seq_length` and `packed_sequence_length`, or shorten the conversations",
    )


def _stale(history: list[Json]) -> Finding | None:
    gap = _mean(history, "loss/sampler_kl")
    if gap is None or gap <= 0.1:
        return None
    return Finding(
        f"The sampled tokens are far from the policy that trains on them (KL {gap:.2f})",
        "Sample from `NAME` or the base model's name, which follow the newest step, and train on "
        "new trajectories immediately",
    )


def _off_policy(history: list[Json]) -> Finding | None:
    age = _mean(history, "policy_age/mean") or 0.0
    size = _mean(history, "loss/effective_sample_size")
    if size is not None and size < 0.5:
        return Finding(
            f"The trained tokens, {age:.1f} steps old on average, count as {size:.0%} of their "
            "number: the policy has moved away from the one that sampled them",
            "Set a lower `max_steps_off_policy`, or lower `learning_rate`",
        )
    if age <= 4:
        return None
    return Finding(
        f"The trained tokens are {age:.1f} steps old on average",
        "Set `max_steps_off_policy`, sample from `NAME`, which follows the newest step, or run "
        "fewer agents at once",
    )


def _canary(history: list[Json]) -> Finding | None:
    difference, bound = (_mean(history, f"canary/{it}") for it in ("logprob_difference", "bound"))
    if difference is None or bound is None or difference <= bound:
        return None
    return Finding(
        f"Engine and learner differ by {difference:.2f} per logprob on the canary",
        "Restart the server: engine and learner may have different weights",
    )


def _learning_rate(history: list[Json]) -> Finding | None:
    rate = _mean(history, "loss/learning_rate")
    if rate is None:
        return None
    if rate < 1e-6:
        return Finding(
            f"The learning rate is {rate:.1e}, too small to change a LoRA",
            "Try a `learning_rate` from 1e-5 to 5e-4",
        )
    entropy = _mean(history, "loss/entropy")
    if entropy is not None and entropy < 0.01:
        return Finding(
            f"The policy has collapsed (entropy {entropy:.3f}) at learning rate {rate:.1e}",
            "Start again from an earlier step with a lower `learning_rate`, or add a KL penalty",
        )
    return None


_CHECKS: list[Callable[[list[Json]], Finding | None]] = [
    _retokenized,
    _ambiguous,
    _without_logprobs,
    _equal_rewards,
    _truncated,
    _too_long,
    _stale,
    _off_policy,
    _canary,
    _learning_rate,
]
