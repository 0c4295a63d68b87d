"""Trajectories that openpipe-art recorded by itself, as histories of messages and choices.

Inside `with art.Trajectory() as trajectory:` every call to a model is recorded as an exchange of
request and response, in the form of the API that was called. Each sampled choice becomes a choice
of a history, and is trained once, with the tokens that the ledger recorded for it. An exchange that
cannot be trained is refused by name: it may be a call to another model.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kit.types import Json
from trainer.base_model.tokenizer import Tokenizer
from trainer.client.conversations import Turn, join
from trainer.errors import BadRequest
from trainer.exact_tokens import CHOICE_ID
from trainer.server.ledger import Ledger
from trainer.server.matching import find

KINDS = ("chat_completions", "completions", "responses", "messages")
_HINT = (
    "Make other calls inside `art.no_capture()`, or remove them with "
    "`trajectory.model_copy(include_models=...)`"
)


@dataclass(frozen=True)
class Captured:
    """One choice of an exchange, and where it was found."""

    turn: Turn
    kind: str
    model: str
    place: str

    def refuse(self, reason: str) -> BadRequest:
        return BadRequest(
            f"{self.place} has a `{self.kind}` exchange with `{self.model}` that {reason}",
            hint=_HINT,
        )


def to_histories(groups: list[Json], *, supervised: bool) -> list[Captured]:
    """Replace the exchanges of all trajectories by histories, and return their choices.

    Supervised training takes the messages of any model, so there every chat is a history.
    """
    found = []
    for number, group in enumerate(groups):
        for index, trajectory in enumerate(group.get("trajectories") or []):
            exchanges = trajectory.pop("exchanges", None)
            if not exchanges or (isinstance(exchanges, dict) and not any(exchanges.values())):
                continue  # ART's default is an object of empty lists
            place = f"Trajectory `{index}` of group `{number}`"
            if trajectory.get("messages_and_choices") or trajectory.get("additional_histories"):
                raise BadRequest(
                    f"{place} has both `exchanges` and `messages_and_choices`",
                    hint="Send one of them",
                )
            try:
                captured = list(_choices(exchanges, place))
                histories = [one.wire() for one in join(one.turn for one in captured)]
            except (AttributeError, KeyError, TypeError) as exc:
                raise BadRequest(
                    f"{place} has an invalid exchange: {exc!r}",
                    hint="Send exchanges as openpipe-art recorded them",
                ) from exc
            first, *more = histories or [{}]
            trajectory.update(first, additional_histories=more)
            found += [one for one in captured if not supervised or one.kind != KINDS[0]]
    return found


def check(captured: list[Captured], ledger: Ledger, run: str, tokenizer: Tokenizer) -> None:
    """Refuse every choice that the run with this key did not sample."""
    for one in captured:
        items = [*one.turn.messages, one.turn.choice]
        history = {"messages_and_choices": items, "tools": one.turn.tools}
        entry = find(ledger, one.turn.choice, tokenizer, history)
        if entry is None:
            raise one.refuse("this server did not sample")
        if entry.model != run:
            raise one.refuse(f"was sampled from `{entry.model or 'the base model'}`, not `{run}`")


def _choices(exchanges: Any, place: str) -> Iterator[Captured]:
    if not isinstance(exchanges, dict):
        raise BadRequest(f"{place} has `exchanges` that are not an object", hint="Send them as is")
    if unknown := exchanges.keys() - set(KINDS):
        raise BadRequest(
            f"{place} has exchanges of the kind `{min(unknown)}`, which is not supported",
            hint=_HINT,
        )
    listed = [(kind, exchange) for kind in KINDS for exchange in exchanges.get(kind) or []]
    for kind, exchange in sorted(listed, key=_start_time):
        request, response = exchange["request"], exchange["response"]
        model = str(exchange.get("model") or request.get("model") or response.get("model"))
        for turn in _TURNS[kind](request, response):
            yield Captured(turn, kind, model, place)


def _start_time(listed: tuple[str, Any]) -> str:
    exchange = listed[1]
    return str(exchange.get("start_time", "")) if isinstance(exchange, dict) else ""


def _chat_turns(request: Json, response: Json) -> Iterator[Turn]:
    for choice in response["choices"]:
        yield Turn(list(request["messages"]), choice, request.get("tools") or None)


# The tokens of the other APIs come from the ledger, by the id in their answer. Their messages are
# not translated, and their text may hold more than was sampled (`echo`), so it is left out.


def _completion_turns(request: Json, response: Json) -> Iterator[Turn]:
    for choice in response["choices"]:
        yield _turn(choice, choice.get("finish_reason"))


def _response_turns(request: Json, response: Json) -> Iterator[Turn]:
    yield _turn(response, response.get("status"))


def _message_turns(request: Json, response: Json) -> Iterator[Turn]:
    yield _turn(response, response.get("stop_reason"))


def _turn(answer: Json, finish_reason: str | None) -> Turn:
    message = {"role": "assistant", "content": ""}
    choice = {"finish_reason": finish_reason, "message": message, CHOICE_ID: _id_in(answer)}
    return Turn([], choice)


def _id_in(value: Any) -> str | None:
    """The id of a choice, wherever an answer holds it."""
    if isinstance(value, dict):
        if isinstance(value.get(CHOICE_ID), str):
            return str(value[CHOICE_ID])
        value = list(value.values())
    found = (_id_in(one) for one in value) if isinstance(value, list) else ()
    return next((one for one in found if one), None)


_TURNS = {
    "chat_completions": _chat_turns,
    "completions": _completion_turns,
    "responses": _response_turns,
    "messages": _message_turns,
}
