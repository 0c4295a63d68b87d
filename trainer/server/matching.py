"""Matches the choices of a train request with the ledger's entries, so that exact tokens train.

A choice's id names its entry. The id counts only if the tokens, logprobs or text of the choice
agree with that entry. If they do not, or the entry is gone, another entry counts only if it has the
same tokens, logprobs and prompt. The same holds for a choice whose logprobs name tokens by their
text. Without an id, an entry must have the same token ids and logprobs. Those prove the match if
several logprobs are far from zero. The logprobs of short and of confident answers fit many prompts,
so there the conversation before the choice decides: it is rendered and encoded as it was for
sampling, or continues the tokens of the choice before. A choice whose prompt stays in doubt is
marked, and the learner counts it and does not train on it. A choice without id and logprobs is
never matched, because its text alone may have been sampled in another conversation.
"""

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from kit.errors import KitError
from kit.types import Json
from trainer import exact_tokens
from trainer.base_model.tokenizer import Tokenizer
from trainer.exact_tokens import PREFIX
from trainer.server import digests
from trainer.server.chat.tool_calls import ToolCallParser
from trainer.server.digests import TextDigest, text_digest
from trainer.server.ledger import Entry, Ledger, Row, entry_of

# A step holds hundreds of thousands of tokens: a Python expression for each would be too slow.
_TOKEN_AND_LOGPROB = itemgetter("token", "logprob")
_SAME = 2e-4  # frameworks round logprobs, the coarsest known one to four digits
# Logprobs below -0.01 have at least a hundred rounded values. Four different ones that are equal
# after another prompt would be a coincidence of one in a hundred million.
_FAR_FROM_ZERO, _ENOUGH = -0.01, 4


def recall(
    ledger: Ledger, groups: Sequence[Json], tokenizer: Tokenizer, *, model: str | None = None
) -> None:
    """Put the exact tokens into every choice that was sampled here, and its step of `model`.

    They replace the logprobs, which hold an object per token. This makes the journal and the
    learner's request a quarter as long.
    """
    for history in histories_of(groups):
        _Conversation(ledger, history, tokenizer).recall(model)


def find(
    ledger: Ledger, choice: Json, tokenizer: Tokenizer, history: Json | None = None
) -> Entry | None:
    """The entry of a choice, the last item of `history`; None if there is none or it is in doubt.

    Without a history, an entry counts if no other one fits.
    """
    whole = history or {"messages_and_choices": [choice]}
    conversation = _Conversation(ledger, whole, tokenizer)
    rows, certain = conversation.match(len(whole["messages_and_choices"]) - 1)
    only = len(_prompts(rows)) == 1 and history is None
    return entry_of(rows[-1]) if certain or only else None


class _Conversation:
    """The choices of one history. Each match helps to find the next one."""

    def __init__(self, ledger: Ledger, history: Json, tokenizer: Tokenizer) -> None:
        self._ledger = ledger
        self._tokenizer = tokenizer
        self._tools = history.get("tools") or None
        self._items: list[Json] = history.get("messages_and_choices") or []
        self._previous: Row | None = None

    def recall(self, model: str | None) -> None:
        for index, item in enumerate(self._items):
            if not is_choice(item):
                continue
            item.pop(exact_tokens.FIELD, None)  # only the ledger says what is exact
            id = exact_tokens.choice_id(item)
            rows, certain = self.match(index)
            self._previous = rows[-1] if certain else None
            if row := self._previous:
                tokens = row.prompt_ids, row.completion_ids, row.logprobs
                step = row.step if row.model == model else None
                constrained = bool(row.constrained)
                exact_tokens.put(item, *tokens, constrained=constrained, step=step, id=id)
            elif rows:
                exact_tokens.mark_ambiguous(item)

    def match(self, index: int) -> tuple[list[Row], bool]:
        """The entries that fit a choice, and whether it is certain that they are its own."""
        choice = self._items[index]
        id = exact_tokens.choice_id(choice)
        if id and (row := self._ledger.with_id(id)) and self._agrees(choice, row):
            return [row], True
        rows = self._candidates(choice)
        if id or not fingerprint(choice):
            # The entry of the id is gone, the choice was edited, or its tokens are given by their
            # text: an entry counts only if its prompt is this conversation.
            rows = self._with_rendered_prompt(
                index, rows, own_template=False
            ) or self._with_rendered_prompt(index, rows, own_template=True)
            return rows, len(_prompts(rows)) == 1
        if len(_prompts(rows)) > 1:
            rows = _with_equal_logprobs(choice, rows) or rows
        if len(_prompts(rows)) == 1 and _is_distinctive(choice):
            return rows, True
        tests: tuple[Callable[[], list[Row]], ...] = (
            lambda: self._with_rendered_prompt(index, rows, own_template=False),
            lambda: self._with_rendered_prompt(index, rows, own_template=True),
            lambda: self._continuing(rows),
        )
        for test in tests:
            if fitting := test():
                rows = fitting
                if len(_prompts(rows)) == 1:
                    return rows, True
        return rows, False

    def _candidates(self, choice: Json) -> list[Row]:
        if identity := fingerprint(choice):
            return self._ledger.with_fingerprint(identity)
        logprobs = _logprobs(choice)
        content = _message(choice).get("content")
        if not logprobs or not isinstance(content, str) or not content:
            return []
        # Tokens by their text: their number and logprobs must be those of the entry.
        return [row for row in self._ledger.with_content(content) if _same(logprobs, row)]

    def _agrees(self, choice: Json, row: Row) -> bool:
        """Whether nothing in a choice contradicts the entry that its id names."""
        if identity := fingerprint(choice):
            if identity == row.fingerprint:
                return True
            names = [token["token"] for token in choice["logprobs"]["content"]]
            ids = [f"{PREFIX}{token}" for token in array("i", row.completion_ids)]
            return names == ids and _same(_logprobs(choice), row)
        if logprobs := _logprobs(choice):
            return _same(logprobs, row)
        return self._has_text(_message(choice), row)

    def _has_text(self, message: Mapping[str, Any], row: Row) -> bool:
        """Whether a message says what was sampled, or nothing that contradicts it."""
        content = message.get("content") or ""
        names = [_name(call) for call in message.get("tool_calls") or []]
        if not isinstance(content, str):
            return False
        if not (content or names) or text_digest(content) == row.content:
            return True
        # The server splits the sampled text into content and calls.
        text = self._tokenizer.text(array("i", row.completion_ids))
        parser = ToolCallParser()
        said = parser.add(text) + parser.finish()
        called = [_name(call) for call in parser.calls]
        return content.strip() in (said.strip(), text.strip()) and names in ([], called)

    def _with_rendered_prompt(
        self, index: int, rows: list[Row], *, own_template: bool
    ) -> list[Row]:
        """The rows whose prompt is the conversation before the choice, as a template renders it.

        By default with the tools of the trajectory; with `own_template` with those of the request
        that sampled the row, because some frameworks send trajectories without tools.
        """
        rendered: dict[bytes | None, tuple[bytes, ...]] = {}
        for row in rows:
            if row.template not in rendered:
                variables = self._ledger.variables(row) or {}
                if not own_template or "tools" not in variables:
                    variables = {**variables, "tools": self._tools}
                rendered[row.template] = self._render(index, variables)
        return [
            row
            for row in rows
            # An older server wrote no digest, and encoded every prompt as a whole.
            if (row.prompt_text or row.prompt_ids) in rendered[row.template]
        ]

    def _render(self, index: int, variables: Json) -> tuple[bytes, ...]:
        """The digest and the tokens of the conversation before a choice."""
        before = [_message(item) if is_choice(item) else item for item in self._items[:index]]
        try:
            text = self._tokenizer.render(before, **variables)
            ids = self._tokenizer.encode(text)
        except (KitError, TypeError):  # not the messages that were sampled from
            return ()
        digest = TextDigest(self._tokenizer.digest).add(text)
        return digest, array("i", ids).tobytes()

    def _continuing(self, rows: list[Row]) -> list[Row]:
        """The rows whose prompt begins with the prompt and tokens of the choice before."""
        if self._previous is None:
            return []
        beginning = self._previous.prompt_ids + self._previous.completion_ids
        return [row for row in rows if row.prompt_ids.startswith(beginning)]


def fingerprint(choice: Json) -> bytes | None:
    """Identify a choice by tokens named `token_id:N` and their logprobs; None without them."""
    try:
        content = (choice.get("logprobs") or {}).get("content") or []
        tokens, logprobs = zip(*map(_TOKEN_AND_LOGPROB, content), strict=True)
        names = "".join(tokens)
        ours = names.count(PREFIX) == len(tokens) and None not in logprobs
        return digests.fingerprint(names, logprobs) if ours else None
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        return None  # not a choice that was sampled here


def histories_of(groups: Sequence[Json]) -> Iterator[Json]:
    """Every conversation of the trajectories of `groups`."""
    for group in groups:
        for trajectory in group.get("trajectories") or []:
            yield trajectory
            yield from trajectory.get("additional_histories") or []


def choices_of(groups: Sequence[Json]) -> Iterator[Json]:
    """Every choice in the trajectories of `groups`, including their additional histories."""
    for history in histories_of(groups):
        yield from filter(is_choice, history.get("messages_and_choices") or [])


def is_choice(item: Json) -> bool:
    return isinstance(item.get("message"), dict) and ("finish_reason" in item or "role" not in item)


def _message(choice: Json) -> Json:
    message = choice.get("message")
    return message if isinstance(message, dict) else {}


def _name(call: Any) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    return str(function.get("name")) if isinstance(function, dict) else str(call)


def _prompts(rows: Sequence[Row]) -> set[bytes]:
    return {row.prompt_ids for row in rows}


def _logprobs(choice: Json) -> list[float]:
    """The logprobs of a choice; empty if it has none, or if they are not numbers."""
    try:
        content = (choice.get("logprobs") or {}).get("content") or []
        return [float(token["logprob"]) for token in content]
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        return []


def _same(logprobs: Sequence[float], row: Row) -> bool:
    stored = np.frombuffer(row.logprobs)
    return len(stored) == len(logprobs) and bool(np.allclose(stored, logprobs, rtol=0, atol=_SAME))


def _is_distinctive(choice: Json) -> bool:
    """Whether the logprobs of a choice are so particular that no other prompt gives the same."""
    logprobs = _logprobs(choice)
    different = {round(logprob, 4) for logprob in logprobs if logprob < _FAR_FROM_ZERO}
    return len(different) >= _ENOUGH


def _with_equal_logprobs(choice: Json, rows: list[Row]) -> list[Row]:
    """The rows whose logprobs are equal to the last digit, if the choice still has all digits."""
    logprobs = _logprobs(choice)
    if all(round(logprob, 4) == logprob for logprob in logprobs):
        return []
    exact = array("d", logprobs).tobytes()
    return [row for row in rows if row.logprobs == exact]
