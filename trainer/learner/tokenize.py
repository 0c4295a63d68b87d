"""Converts trajectories from a train request to token ids, and marks those the policy chose.

Training uses exactly the tokens that were sampled. Exact ids from the ledger (`art` in a choice)
come first, then the ids in `token_id:N` logprobs, whose prompt the chat template renders. A choice
with neither is tokenised again and counted.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os.path import commonprefix
from typing import Any

from trainer import exact_tokens
from trainer.base_model.messages import normalise
from trainer.base_model.tokenizer import Tokenizer
from trainer.errors import BadRequest
from trainer.learner.choices import Choice, Item, is_choice, read_choice

LONGEST_TAG = 64  # characters that a chat template may put before an answer, e.g. `<think>`


@dataclass
class TokenSequence:
    """One sequence of tokens for the model."""

    ids: list[int]
    mask: list[bool]
    """True where the policy chose the token."""
    logprobs: list[float]
    """The sampler's logprobs; NaN where unknown or where the policy did not choose the token."""

    def extend(self, ids: Sequence[int], *, chosen: bool, logprobs: Sequence[float] = ()) -> None:
        self.ids += ids
        self.mask += [chosen] * len(ids)
        self.logprobs += logprobs if chosen and logprobs else [math.nan] * len(ids)


@dataclass
class Tokenized:
    """A trajectory's sequences, and how many of its choices are exact or left out."""

    sequences: list[TokenSequence] = field(default_factory=list)
    retokenized: int = 0
    """Trained choices whose text was tokenised again."""
    exact_prompts: int = 0
    """Trained choices with the prompt that they were sampled from, as the ledger has it."""
    rendered_prompts: int = 0
    """Trained choices whose prompt was rendered again: the other ones."""
    constrained: int = 0
    """Trained choices whose text a request limited, e.g. to a JSON schema."""
    choices_without_logprobs: int = 0
    """Choices that are not trained because the probabilities of their tokens are unknown."""
    ambiguous_choices: int = 0
    """Choices that could have been sampled from several prompts, which are not trained."""
    sampled_at: Counter[int] = field(default_factory=Counter)
    """Trained tokens by the step that sampled them, where it is known."""

    def counts(self, *, dropped: bool = False) -> dict[str, int]:
        """Every count by its name; of a trajectory that is dropped, only choices left out."""
        names = vars(self).keys() - {"sequences", "sampled_at"}
        if dropped:
            names = {"choices_without_logprobs", "ambiguous_choices"}
        return {name: getattr(self, name) for name in names}

    @property
    def chosen(self) -> int:
        return sum(sum(sequence.mask) for sequence in self.sequences)


def tokenize_trajectory(
    tokenizer: Tokenizer, trajectory: Mapping[str, Any], *, allow_without_logprobs: bool = False
) -> Tokenized:
    """Tokenise a trajectory's histories. Choices without logprobs are skipped unless allowed."""
    result = Tokenized()
    histories = [trajectory, *(trajectory.get("additional_histories") or [])]
    for history in histories:
        _History(tokenizer, history, allow_without_logprobs, result).run()
    return result


class _History:
    """Tokenises one conversation, choice by choice."""

    def __init__(
        self, tokenizer: Tokenizer, history: Mapping[str, Any], allow: bool, result: Tokenized
    ) -> None:
        self.tokenizer = tokenizer
        self.tools = history.get("tools") or None
        self.items: list[Item] = list(history.get("messages_and_choices") or [])
        self.messages = [_message(item) for item in self.items]
        self.allow = allow
        self.result = result
        self.current: TokenSequence | None = None
        self.rendered_to = 0  # number of messages whose tokens are in `current`

    def run(self) -> None:
        for index, item in enumerate(self.items):
            if not is_choice(item):
                continue
            if exact_tokens.is_ambiguous(item):
                self.result.ambiguous_choices += 1
                continue
            choice = read_choice(item)
            if not choice.logprobs and not self.allow:
                self.result.choices_without_logprobs += 1
                continue
            self._add(index, choice)

    def _add(self, index: int, choice: Choice) -> None:
        prompt = choice.prompt if choice.prompt is not None else self._prompt(index)
        completion = choice.completion
        logprobs = choice.logprobs
        if completion is None:
            completion = self._retokenize(index)
            if len(completion) != len(logprobs):
                # The engine's tokens differ from ours, so its logprobs belong to none of ours.
                if logprobs and not self.allow:
                    self.result.choices_without_logprobs += 1
                    return
                logprobs = []
        if not completion:
            return
        self.result.retokenized += choice.completion is None
        self.result.exact_prompts += choice.prompt is not None
        self.result.rendered_prompts += choice.prompt is None
        self.result.constrained += choice.constrained
        if choice.step is not None:
            self.result.sampled_at[choice.step] += len(completion)
        current = self.current
        if current is None or prompt[: len(current.ids)] != current.ids:
            # The first choice, or a template that rewrites history: start a new sequence.
            current = self.current = TokenSequence([], [], [])
            self.result.sequences.append(current)
        current.extend(prompt[len(current.ids) :], chosen=False)
        current.extend(completion, chosen=True, logprobs=logprobs)
        self.rendered_to = index + 1

    def _prompt(self, index: int) -> list[int]:
        """The ids of everything before choice `index`, rendered and encoded as for sampling."""
        text = self._render(index, generation=True)
        current = self.current
        if current is None or not self._only_in_tokens(index):
            return self.tokenizer.encode(text)
        # Append the text that the template adds to the last choice, and the messages after it.
        before = self._render(self.rendered_to - 1, generation=True)
        through = self._render(self.rendered_to, generation=False)
        if not (through.startswith(before) and text.startswith(through)):
            return self.tokenizer.encode(text)
        tail = self._after_turn(through[len(before) :], current.ids[-1])
        return current.ids + self._encode_after(through.removesuffix(tail), text)

    def _only_in_tokens(self, index: int) -> bool:
        """Whether a choice before `index` has tokens, but a message that says nothing.

        Some frameworks send tool calls this way. The prompt then needs those tokens.
        """
        return any(
            is_choice(item) and not message.get("content") and not message.get("tool_calls")
            for item, message in zip(self.items[:index], self.messages, strict=False)
        )

    def _after_turn(self, turn: str, last: int) -> str:
        """The part of a rendered assistant's turn that the policy did not write."""
        ends = [
            (turn.rfind(word), word)
            for word in (self.tokenizer.decode([eos]) for eos in self.tokenizer.eos_ids)
            if word in turn
        ]
        if not ends:
            return ""
        at, word = max(ends)
        # A truncated completion lacks the end of its turn, so keep the template's.
        return turn[at + len(word) :] if last in self.tokenizer.eos_ids else turn[at:]

    def _retokenize(self, index: int) -> list[int]:
        before = self._render(index, generation=True)
        through = self._render(index + 1, generation=False)
        if not through.startswith(before):
            return self._rewritten(normalise(self.messages[index]), before, through)
        ids = self._encode_after(before, through)
        ends = [at for at, token in enumerate(ids) if token in self.tokenizer.eos_ids]
        return ids[: ends[-1] + 1] if ends else ids

    def _rewritten(self, message: Item, before: str, through: str) -> list[int]:
        """The ids of an answer whose prompt ends otherwise than past answers begin.

        Templates of reasoning models end a prompt with `<think>` and leave it out of the past.
        """
        content = str(message["content"])
        same = len(commonprefix((before, through)))  # noqa: RUF071 - these are no paths
        # An answer that begins as the tag does, e.g. with `<`, shares that part of it.
        for at in range(same, max(same - LONGEST_TAG, -1), -1):
            if content.startswith(before[at:]):  # the prompt has this part already
                content = content[len(before) - at :]
                break
        ids = self._encode_after(before, before + content)
        old, new = (
            [token for token in self.tokenizer.encode(text) if token in self.tokenizer.eos_ids]
            for text in (before, through)
        )
        # Without its end, the policy would not learn to stop; with calls, the turn is not over.
        ended = ids and len(new) > len(old) and not message.get("tool_calls")
        return [*ids, new[-1]] if ended else ids

    def _encode_after(self, start: str, text: str) -> list[int]:
        """The ids of `text` without those of its beginning `start`.

        Both are encoded whole where that is possible, because SentencePiece's tokenizers put a
        space before every text.
        """
        first, ids = self.tokenizer.encode(start), self.tokenizer.encode(text)
        if ids[: len(first)] == first:
            return ids[len(first) :]
        return self.tokenizer.encode(text[len(start) :])

    def _render(self, count: int, *, generation: bool) -> str:
        return self.tokenizer.render(self.messages[:count], self.tools, generation)


def _message(item: Item) -> Item:
    if not is_choice(item):
        return item
    message = item.get("message")
    if not isinstance(message, Mapping):
        raise BadRequest(
            f"A choice has the message `{message}`", hint="Send choices as the server returned them"
        )
    return message
