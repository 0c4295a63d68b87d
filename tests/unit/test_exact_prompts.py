"""Prompts that go on from sampled tokens: as they were sampled, wherever the text shows them."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers

from trainer.base_model.resolve import resolve
from trainer.base_model.tokenizer import Tokenizer
from trainer.errors import TooLong
from trainer.server import exact_prompts
from trainer.server.ledger import Entry, Ledger

ASKED = [{"role": "user", "content": "Say something."}]
GO_ON = {"role": "user", "content": "Go on."}
END, START = 258, 257  # <|im_end|> and <|im_start|>
HALF = [*b"a", 0xC3]  # half of a character, which the text shows as another one


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger.db")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(resolve("tiny-random"))


class Server:
    """Samples given tokens, and records them as the backend does."""

    def __init__(self, ledger: Ledger, tokenizer: Tokenizer) -> None:
        self.ledger = ledger
        self.tokenizer = tokenizer

    def prompt(self, messages: list[Any], rollout: str | None = None, **template: Any) -> list[int]:
        text = self.tokenizer.render(messages, **template)
        return exact_prompts.encode(text, self.tokenizer, self.ledger, rollout)

    def answer(
        self,
        messages: list[Any],
        ids: list[int],
        text: str | None = None,
        rollout: str | None = None,
        **template: Any,
    ) -> dict[str, Any]:
        content = self.tokenizer.text(ids) if text is None else text
        entry = Entry(
            model="p/m",
            step=0,
            lora_sha256="",
            rollout=rollout,
            prompt_ids=self.prompt(messages, **template),
            completion_ids=ids,
            logprobs=[-1.0] * len(ids),
            template=template,
            prompt_text=self.tokenizer.render(messages, **template),
            tokenizer=self.tokenizer.digest,
        )
        self.ledger.record(entry, content)
        return {"role": "assistant", "content": content}


@pytest.fixture
def server(ledger: Ledger, tokenizer: Tokenizer) -> Server:
    return Server(ledger, tokenizer)


@pytest.mark.parametrize("end", [[], [END]])
def test_every_turn_goes_on_from_the_tokens_of_the_turns_before(
    server: Server, tokenizer: Tokenizer, end: list[int]
) -> None:
    messages: list[Any] = [*ASKED]
    for _ in range(3):
        before = server.prompt(messages)
        messages.append(server.answer(messages, [*HALF, *end]))
        messages.append(GO_ON)
        prompt = server.prompt(messages)
        assert prompt[: len(before) + len(HALF) + 1] == [*before, *HALF, END]
        assert tokenizer.decode(prompt) == tokenizer.render(messages)
        assert prompt != tokenizer.apply_chat_template(messages)


def test_the_longest_known_conversation_counts(server: Server, tokenizer: Tokenizer) -> None:
    known = [*ASKED, server.answer(ASKED, [*HALF, END]), GO_ON]
    edited = [*known, {"role": "assistant", "content": "edited"}, GO_ON]
    prompt = server.prompt(edited)
    assert prompt[: len(server.prompt(known))] == server.prompt(known)
    assert tokenizer.decode(prompt) == tokenizer.render(edited)


@pytest.mark.parametrize(
    "change",
    [
        {"messages": [{"role": "user", "content": "Say something!"}]},
        {"answer": {"role": "assistant", "content": "a"}},
        {"answer": {"role": "user", "content": "a\ufffd"}},
        {"tools": [{"type": "function", "function": {"name": "look", "parameters": {}}}]},
    ],
)
def test_another_conversation_is_encoded_anew(
    server: Server, tokenizer: Tokenizer, change: dict[str, Any]
) -> None:
    answer = server.answer(ASKED, [*HALF, END])
    asked = change.pop("messages", ASKED)
    changed = [*asked, change.pop("answer", answer), GO_ON]
    assert server.prompt(changed, **change) == tokenizer.apply_chat_template(changed, **change)


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([*HALF, *b"STOP"], "a\ufffd"),  # cut at a stop string
        ([*HALF, START, *b"user", END], None),  # a turn that the client cannot see
    ],
)
def test_tokens_that_the_text_does_not_show_are_left_out(
    server: Server, tokenizer: Tokenizer, ids: list[int], text: str | None
) -> None:
    messages = [*ASKED, server.answer(ASKED, ids, text), GO_ON]
    assert server.prompt(messages) == tokenizer.apply_chat_template(messages)


def test_the_newest_of_equal_answers_counts(server: Server) -> None:
    server.answer(ASKED, [*HALF, END])
    answer = server.answer(ASKED, [*b"a", 0xC4, END])  # the same text
    before = server.prompt(ASKED)
    assert server.prompt([*ASKED, answer, GO_ON])[len(before) :][:3] == [*b"a", 0xC4, END]


def test_a_rollout_goes_on_from_its_own_of_equal_answers(server: Server) -> None:
    answer = server.answer(ASKED, [*HALF, END], rollout="one")
    server.answer(ASKED, [*b"a", 0xC4, END], rollout="other")
    messages, before = [*ASKED, answer, GO_ON], server.prompt(ASKED)
    assert server.prompt(messages, "one")[len(before) :][:3] == [*HALF, END]
    assert server.prompt(messages, "third")[len(before) :][:3] == [*b"a", 0xC4, END]


def test_a_conversation_that_outgrew_the_context_is_refused(
    server: Server, tokenizer: Tokenizer
) -> None:
    assert tokenizer.context is not None
    answer = server.answer(ASKED, [*HALF] * (tokenizer.context // 2))
    with pytest.raises(TooLong):
        server.prompt([*ASKED, answer, GO_ON])


def test_the_tokens_of_another_base_model_are_not_used(
    server: Server, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    messages = [*ASKED, server.answer(ASKED, [*HALF, END]), GO_ON]
    anew = tokenizer.apply_chat_template(messages)
    assert server.prompt(messages) != anew
    other = shutil.copytree(resolve("tiny-random"), tmp_path / "other") / "tokenizer.json"
    other.write_text(other.read_text() + "\n")
    server.tokenizer = Tokenizer(other.parent)
    assert server.prompt(messages) == anew


def test_an_answer_of_a_sentencepiece_model_that_begins_with_a_space_is_continued(
    ledger: Ledger, tmp_path: Path
) -> None:
    server = Server(ledger, sentencepiece(tmp_path))
    ids = [server.tokenizer.encode(letter)[-1] for letter in "ab"]
    space = server.tokenizer.encode("a")[0]
    before = server.prompt(ASKED)
    answer = server.answer(ASKED, [space, *ids, 2])
    assert answer["content"] == " ab"
    assert server.prompt([*ASKED, answer, GO_ON])[: len(before) + 4] == [*before, space, *ids, 2]


def sentencepiece(directory: Path) -> Tokenizer:
    """A tokenizer like that of Llama 2, whose decoder removes the space before a text."""
    vocabulary = {name: number for number, name in enumerate(["<unk>", "<s>", "</s>"])}
    for name in [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "ab"]:
        vocabulary[name] = len(vocabulary)
    made = tokenizers.Tokenizer(
        models.BPE(vocabulary, [("a", "b")], unk_token="<unk>", byte_fallback=True)
    )
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [
            *(decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()),
            decoders.Strip(" ", 1, 0),
        ]
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.save(str(directory / "tokenizer.json"))
    template = (
        "{{ bos_token }}{% for it in messages %}{% if it.role == 'user' %}[{{ it.content }}]"
        "{% else %}{{ it.content }}{{ eos_token }}{% endif %}{% endfor %}"
    )
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return Tokenizer(directory)


def test_only_tokens_that_may_end_a_turn_are_looked_for(tmp_path: Path) -> None:
    """Some models have a thousand special tokens, which would take seconds in a long text."""
    directory = shutil.copytree(resolve("tiny-random"), tmp_path / "many")
    settings = json.loads((directory / "tokenizer.json").read_text())
    added = settings["added_tokens"]
    added += [
        {**added[0], "id": 260 + number, "content": f"<SPECIAL_{number}>"} for number in range(900)
    ]
    for one in added:
        one["normalized"] = one["content"] == "<|im_start|>"  # cut elsewhere, it may be no token
    (directory / "tokenizer.json").write_text(json.dumps(settings))
    pattern = Tokenizer(directory).end_pattern
    assert pattern.search("<|im_end|>")
    assert not pattern.search("<SPECIAL_3>") and not pattern.search("<|im_start|>")
