"""Prompts that go on from the tokens of an earlier answer.

Agents send conversations as text. If an answer is encoded again, it may become other tokens than
were sampled: the engine then does not find it in its cache, and the learner reads the conversation
once for every turn. So the ledger knows each answer by the text up to its end, and a prompt that
begins with this text begins with the tokens that were sampled.
"""

import itertools
from array import array

from trainer.base_model.tokenizer import Tokenizer
from trainer.server import prompts
from trainer.server.digests import TextDigest, text_digest
from trainer.server.ledger import Ledger, Row

_LAST = 64  # ends of turns that are tried, so that a long conversation costs no more


def encode(
    text: str, tokenizer: Tokenizer, ledger: Ledger, rollout: str | None = None
) -> list[int]:
    """The tokens of a rendered conversation, with the newest answer's own where it is known.

    Runs of one example may write the same text in other tokens: `rollout` prefers its own.
    """
    prompts.check_size(text, tokenizer)
    ids = _continued(text, tokenizer, ledger, rollout)
    if ids is None:
        ids = tokenizer.encode(text)
    prompts.check_tokens(ids, tokenizer)
    return ids


def _continued(
    text: str, tokenizer: Tokenizer, ledger: Ledger, rollout: str | None
) -> list[int] | None:
    ends = [found.start() for found in tokenizer.end_pattern.finditer(text)][-_LAST:]
    digest = TextDigest(tokenizer.digest)
    turns = [(end, digest.add(text[start:end])) for start, end in itertools.pairwise([0, *ends])]
    for end, conversation in reversed(turns):
        row = ledger.newest_of(conversation, rollout)
        if row and (ids := _visible(row, tokenizer)):
            return ids + tokenizer.encode(text[end:])
    return None


def _visible(row: Row, tokenizer: Tokenizer) -> list[int] | None:
    """The tokens of an entry without its end of turn; None if the text does not show them all.

    Texts are cut at a stop string, and leave out special tokens.
    """
    ids = array("i", row.completion_ids).tolist()
    if ids[-1] in tokenizer.eos_ids:
        ids.pop()
    if any(map(tokenizer.is_special, ids)) or text_digest(tokenizer.text(ids)) != row.content:
        return None
    return [*array("i", row.prompt_ids), *ids]
