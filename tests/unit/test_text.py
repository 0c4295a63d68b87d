import shutil
from pathlib import Path

import pytest

from trainer.base_model.resolve import resolve
from trainer.base_model.tokenizer import Tokenizer
from trainer.engines.text import TextStream


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer(resolve("tiny-random"))


def pieces(tokenizer: Tokenizer, text: str, stop: tuple[str, ...] = ()) -> list[str]:
    stream = TextStream(tokenizer, stop)
    returned = []
    for token in tokenizer.encode(text):
        returned.append(stream.add(token))
        if stream.stopped:
            break
    return [*returned, stream.finish()]


def test_a_character_of_several_bytes_is_returned_whole(tokenizer: Tokenizer) -> None:
    assert pieces(tokenizer, "aé€") == ["a", "", "é", "", "", "€", ""]


def test_text_ends_before_the_first_stop_string(tokenizer: Tokenizer) -> None:
    assert "".join(pieces(tokenizer, "one two END three", ("END", "three"))) == "one two "


def test_no_part_of_a_stop_string_is_returned_too_early(tokenizer: Tokenizer) -> None:
    returned = pieces(tokenizer, "aENxEND", ("END",))
    assert "".join(returned) == "aENx"
    assert returned[:3] == ["", "", "a"]


def test_an_incomplete_character_becomes_a_replacement(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer)
    assert stream.add(tokenizer.encode("é")[0]) == ""
    assert stream.finish() == "\ufffd"


def test_a_stop_token_ends_the_text_and_is_not_part_of_it(tokenizer: Tokenizer) -> None:
    stream = TextStream(tokenizer, ("bcd",), stop_tokens={ord("d")})
    assert [stream.add(token) for token in b"abc"] == ["", "", "a"]
    assert stream.add(ord("d")) == "" and stream.stopped
    assert stream.finish() == "bc"


def test_a_stop_string_counts_only_if_it_ends_after_the_least_number_of_tokens(
    tokenizer: Tokenizer,
) -> None:
    def until_stop(text: str, least: int) -> str:
        stream = TextStream(tokenizer, ("xy", "long stop"), min_tokens=least)
        returned = ""
        for token in tokenizer.encode(text):
            returned += stream.add(token)
            if stream.stopped:
                break
        return returned + stream.finish()

    assert until_stop("axybxyc", 0) == "a"
    assert until_stop("axybxyc", 2) == "a"
    assert until_stop("axybxyc", 3) == "axyb"
    assert until_stop("axybxyc", 6) == "axybxyc"


def test_tags_of_calls_are_text_also_as_special_tokens(tmp_path: Path) -> None:
    model = Path(shutil.copytree(resolve("tiny-random"), tmp_path / "model"))
    file = model / "tokenizer.json"
    file.write_text(file.read_text().replace("<|im_start|>", "<tool_call>"))
    tokenizer = Tokenizer(model)
    ids = tokenizer.encode("<tool_call>{}</tool_call><|im_end|>")
    assert len(ids) < len("{}</tool_call>") + 3  # the tag is one token
    stream = TextStream(tokenizer)
    text = "".join(stream.add(token) for token in ids) + stream.finish()
    assert text == tokenizer.text(ids) == "<tool_call>{}</tool_call>"


@pytest.mark.parametrize("stop", [(), ("€b",)])
@pytest.mark.parametrize("stop_tokens", [{ord("d")}, set()])
def test_tokens_added_together_give_what_they_give_one_by_one(
    tokenizer: Tokenizer, stop: tuple[str, ...], stop_tokens: set[int]
) -> None:
    end = next(iter(tokenizer.eos_ids))  # a special token, which is no text
    tokens = [*tokenizer.encode("aé€"), end, *tokenizer.encode("b€cd€")]
    single, together = (TextStream(tokenizer, stop, stop_tokens) for _ in range(2))
    texts = []
    for token in tokens:
        texts.append(single.add(token))
        if single.stopped:
            break
    count, text = together.add_all(tokens[:4])  # up to the middle of a character
    if not together.stopped:
        more, rest = together.add_all(tokens[4:])
        count, text = count + more, text + rest
    assert (count, text) == (len(texts), "".join(texts))
    assert (together.stopped, together.finish()) == (single.stopped, single.finish())
