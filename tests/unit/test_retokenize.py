"""Choices without token ids get the tokens that the model sees, and their end of turn."""

import json
import shutil
from pathlib import Path

import pytest
import tokenizers

from tests.unit.test_tokenize import USER, choice, chosen, trajectory
from trainer.base_model.resolve import resolve
from trainer.base_model.tokenizer import Tokenizer
from trainer.learner.tokenize import tokenize_trajectory


@pytest.fixture
def pieces(tmp_path: Path) -> Tokenizer:
    """A tokenizer like Llama 2's: it puts `▁` before every text, and `▁yes` is one token."""
    letters = ["<unk>", *"▁abcdefghijklmnopqrstuvwxyz[]/", "ye", "yes", "▁yes", "▁n", "▁no"]
    vocab = {letter: at for at, letter in enumerate(letters)}
    merges = [("y", "e"), ("ye", "s"), ("▁", "yes"), ("▁", "n"), ("▁n", "o")]
    built = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges, unk_token="<unk>"))
    built.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    built.add_special_tokens(["<s>", "</s>"])
    built.save(str(tmp_path / "tokenizer.json"))
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}<s>[i] {{ m.content }} [/i]"
        "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
    )
    settings = {"chat_template": template, "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return Tokenizer(tmp_path)


@pytest.fixture
def thinking(tmp_path: Path) -> Tokenizer:
    """A tokenizer whose template is like DeepSeek-R1's: past answers are without `<think>`."""
    directory = Path(shutil.copytree(resolve("tiny-random"), tmp_path / "thinking"))
    (directory / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}"
        "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n"
        "{% endif %}"
    )
    return Tokenizer(directory)


def test_an_answer_is_encoded_with_the_text_before_it(pieces: Tokenizer) -> None:
    """An answer alone would get the space that SentencePiece puts before every text."""
    talk = trajectory(USER, choice("yes"), USER, choice("no"))
    (sequence,) = tokenize_trajectory(pieces, talk, allow_without_logprobs=True).sequences
    messages = [USER, choice("yes")["message"], USER, choice("no")["message"]]
    assert sequence.ids == pieces.encode(pieces.render(messages, None, False))
    trained = [token for token, mine in zip(sequence.ids, sequence.mask, strict=True) if mine]
    assert trained == [pieces.encode("yes")[0], *pieces.eos_ids, *pieces.encode("no</s>")]


def test_a_prompt_after_tokens_without_text_has_no_extra_space(pieces: Tokenizer) -> None:
    called = choice("", pieces.encode("yes"))  # truncated: without the end of its turn
    talk = trajectory(USER, called, USER, choice("no"))
    (sequence,) = tokenize_trajectory(pieces, talk, allow_without_logprobs=True).sequences
    prompt, rest = pieces.encode(pieces.render([USER])), pieces.encode("</s><s>[i] hi [/i] no</s>")
    assert sequence.ids == [*prompt, *pieces.encode("yes"), *rest]


@pytest.mark.parametrize(
    ("content", "trained"),
    [
        ("4", "4"),
        ("<think>\nTwo and two</think>4", "Two and two</think>4"),
        ("<think>\nTwo and two</think><b>4", "Two and two</think><b>4"),
        ("<b>4", "<b>4"),
    ],
)
def test_a_turn_that_the_template_rewrites_is_trained_with_its_end(
    thinking: Tokenizer, content: str, trained: str
) -> None:
    given = trajectory(USER, choice(content))
    tokenized = tokenize_trajectory(thinking, given, allow_without_logprobs=True)
    assert chosen(thinking, tokenized) == [[trained + "<|im_end|>"]]
    assert thinking.decode(tokenized.sequences[0].ids).count("<think>") == 1


def test_a_rewritten_turn_with_calls_does_not_teach_to_stop_before_them(
    thinking: Tokenizer,
) -> None:
    given = choice("Wait")
    given["message"]["tool_calls"] = [{"function": {"name": "add", "arguments": "{}"}}]
    tokenized = tokenize_trajectory(thinking, trajectory(USER, given), allow_without_logprobs=True)
    assert chosen(thinking, tokenized) == [["Wait"]]
