"""Tokenising trajectories: training uses exactly the tokens that were sampled."""

import math
from typing import Any

import pytest

from trainer.base_model.resolve import resolve
from trainer.base_model.tokenizer import Tokenizer
from trainer.errors import BadRequest, Unsupported
from trainer.exact_tokens import ExactTokens, mark_ambiguous
from trainer.learner.tokenize import Tokenized, tokenize_trajectory

END = 258  # <|im_end|>
USER = {"role": "user", "content": "hi"}


@pytest.fixture
def tokenizer() -> Tokenizer:
    return Tokenizer(resolve("tiny-random"))


def choice(content: str | None, ids: list[int] | None = None) -> dict[str, Any]:
    """A choice as a client sends it back; with `ids`, its logprobs name token ids like ours."""
    logprobs = None
    if ids is not None:
        tokens = [{"token": f"token_id:{one}", "logprob": -0.5, "top_logprobs": []} for one in ids]
        logprobs = {"content": tokens, "refusal": None}
    message = {"role": "assistant", "content": content, "tool_calls": None}
    return {"finish_reason": "stop", "index": 0, "logprobs": logprobs, "message": message}


def sampled(prompt: list[int], ids: list[int], logprobs: list[float]) -> dict[str, Any]:
    """A choice with exact tokens from the ledger."""
    item = choice("other", [70, 71, 72])
    ExactTokens(prompt, ids, logprobs).put(item)
    return item


def trajectory(*items: dict[str, Any], **extra: Any) -> dict[str, Any]:
    return {"messages_and_choices": list(items), "tools": None, "reward": 1.0, **extra}


def chosen(tokenizer: Tokenizer, tokenized: Tokenized) -> list[list[str]]:
    """The runs of chosen tokens of each sequence, as text."""
    found = []
    for sequence in tokenized.sequences:
        runs: list[list[int]] = [[]]
        for token, mine in zip(sequence.ids, sequence.mask, strict=True):
            if mine:
                runs[-1].append(token)
            elif runs[-1]:
                runs.append([])
        found.append([tokenizer.decode(run) for run in runs if run])
    return found


def test_ledger_ids_take_precedence(tokenizer: Tokenizer) -> None:
    item = sampled([1, 2, 3], [4, 5], [-0.1, -0.2])
    tokenized = tokenize_trajectory(tokenizer, trajectory(USER, item))
    (sequence,) = tokenized.sequences
    assert sequence.ids == [1, 2, 3, 4, 5]
    assert sequence.mask == [False, False, False, True, True]
    assert sequence.logprobs[3:] == [-0.1, -0.2] and math.isnan(sequence.logprobs[0])
    assert tokenized.retokenized == 0


def test_turns_that_extend_each_other_are_one_sequence(tokenizer: Tokenizer) -> None:
    first = sampled([1, 2], [3, 4], [-1.0, -1.0])
    second = sampled([1, 2, 3, 4, 9], [5], [-2.0])
    (sequence,) = tokenize_trajectory(tokenizer, trajectory(USER, first, USER, second)).sequences
    assert sequence.ids == [1, 2, 3, 4, 9, 5]
    assert sequence.mask == [False, False, True, True, False, True]


def test_a_rewritten_history_is_a_separate_sequence(tokenizer: Tokenizer) -> None:
    first = sampled([1, 2], [3, 4], [-1.0, -1.0])
    second = sampled([1, 2, 4, 9], [5], [-2.0])
    sequences = tokenize_trajectory(tokenizer, trajectory(USER, first, USER, second)).sequences
    assert [sequence.ids for sequence in sequences] == [[1, 2, 3, 4], [1, 2, 4, 9, 5]]
    assert [sum(sequence.mask) for sequence in sequences] == [2, 1]


def test_token_ids_in_logprobs_are_used_unchanged(tokenizer: Tokenizer) -> None:
    # `yes` would be tokenised differently: a model may spell a text in several ways.
    ids = [*b"yes", 300 - 260, END]
    tokenized = tokenize_trajectory(tokenizer, trajectory(USER, choice("yes", ids)))
    (sequence,) = tokenized.sequences
    prompt = tokenizer.apply_chat_template([USER])
    assert sequence.ids == prompt + ids
    assert sequence.mask == [False] * len(prompt) + [True] * len(ids)
    assert tokenized.retokenized == 0


def test_without_the_ledger_a_prompt_is_rendered_and_encoded_as_the_server_did(
    tokenizer: Tokenizer,
) -> None:
    """The server encodes the whole conversation again, whatever tokens spelled the first turn."""
    spelled = [*b"yes", 40, END]
    first, second = choice("yes", spelled), choice("no", [*b"no", END])
    tokenized = tokenize_trajectory(tokenizer, trajectory(USER, first, USER, second))
    prompts = (
        tokenizer.apply_chat_template([USER]),
        tokenizer.apply_chat_template([USER, first["message"], USER]),
    )
    assert [sequence.ids for sequence in tokenized.sequences] == [
        [*prompts[0], *spelled],
        [*prompts[1], *b"no", END],
    ]
    assert (tokenized.exact_prompts, tokenized.rendered_prompts) == (0, 2)


def test_turns_that_render_to_the_sampled_tokens_are_one_sequence(tokenizer: Tokenizer) -> None:
    first, second = choice("yes", [*b"yes", END]), choice("no", [*b"no", END])
    (sequence,) = tokenize_trajectory(tokenizer, trajectory(USER, first, USER, second)).sequences
    assert chosen(tokenizer, Tokenized([sequence])) == [["yes<|im_end|>", "no<|im_end|>"]]


def test_an_ambiguous_choice_is_counted_and_not_trained(tokenizer: Tokenizer) -> None:
    unsure = choice("yes", [*b"yes", END])
    mark_ambiguous(unsure)
    exact = sampled([1, 2], [4, 5], [-0.1, -0.2])
    tokenized = tokenize_trajectory(tokenizer, trajectory(USER, unsure, USER, exact))
    assert [sequence.ids for sequence in tokenized.sequences] == [[1, 2, 4, 5]]
    assert (tokenized.ambiguous_choices, tokenized.exact_prompts) == (1, 1)


def test_a_truncated_turn_gets_the_end_of_turn_of_the_template(tokenizer: Tokenizer) -> None:
    (sequence,) = tokenize_trajectory(
        tokenizer, trajectory(USER, choice("ye", [*b"ye"]), USER, choice("no", [*b"no", END]))
    ).sequences
    text = tokenizer.decode(sequence.ids)
    assert text == tokenizer.render([USER, {"role": "assistant", "content": "ye"}, USER]) + (
        "no<|im_end|>"
    )
    assert chosen(tokenizer, Tokenized([sequence])) == [["ye", "no<|im_end|>"]]


def test_a_tool_call_that_is_only_in_the_tokens(tokenizer: Tokenizer) -> None:
    """NeMo Agent Toolkit sends empty content, and the tool's result as a plain message."""
    call = '<tool_call>{"name": "add"}</tool_call>'
    tokenized = tokenize_trajectory(
        tokenizer,
        trajectory(
            USER,
            choice("", [*call.encode(), END]),
            {"role": "assistant", "content": "2"},
            choice("two", [*b"two", END]),
        ),
    )
    assert chosen(tokenizer, tokenized) == [[call + "<|im_end|>", "two<|im_end|>"]]


def test_a_choice_without_ids_is_rendered_tokenised_and_counted(tokenizer: Tokenizer) -> None:
    given = choice("yes")
    content = [{"token": letter, "logprob": -0.5} for letter in ("y", "e", "s", "<|im_end|>")]
    given["logprobs"] = {"content": content}
    tokenized = tokenize_trajectory(tokenizer, trajectory(USER, given))
    assert chosen(tokenizer, tokenized) == [["yes<|im_end|>"]]
    assert tokenized.retokenized == 1
    assert tokenized.sequences[0].logprobs[-4:] == [-0.5] * 4


def test_logprobs_of_other_tokens_are_not_used(tokenizer: Tokenizer) -> None:
    given = choice("yes")
    given["logprobs"] = {"content": [{"token": "yes", "logprob": -0.5}]}
    tokenized = tokenize_trajectory(tokenizer, trajectory(USER, given))
    assert tokenized.sequences == [] and tokenized.choices_without_logprobs == 1
    assert tokenized.retokenized == 0
    allowed = tokenize_trajectory(tokenizer, trajectory(USER, given), allow_without_logprobs=True)
    assert chosen(tokenizer, allowed) == [["yes<|im_end|>"]]
    assert all(math.isnan(logprob) for logprob in allowed.sequences[0].logprobs)


def test_a_choice_without_logprobs_is_skipped_unless_allowed(tokenizer: Tokenizer) -> None:
    given = trajectory(USER, choice("yes"), USER, choice("no", [*b"no", END]))
    tokenized = tokenize_trajectory(tokenizer, given)
    assert chosen(tokenizer, tokenized) == [["no<|im_end|>"]]
    assert tokenized.choices_without_logprobs == 1
    allowed = tokenize_trajectory(tokenizer, given, allow_without_logprobs=True)
    assert chosen(tokenizer, allowed) == [["yes<|im_end|>", "no<|im_end|>"]]


def test_additional_histories_and_tools_are_tokenised_too(tokenizer: Tokenizer) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    other = {"messages_and_choices": [USER, choice("no", [*b"no", END])], "tools": [tool]}
    tokenized = tokenize_trajectory(
        tokenizer, trajectory(USER, choice("yes", [*b"yes", END]), additional_histories=[other])
    )
    assert chosen(tokenizer, tokenized) == [["yes<|im_end|>"], ["no<|im_end|>"]]
    assert '"name": "add"' in tokenizer.decode(tokenized.sequences[1].ids)
    assert '"name": "add"' not in tokenizer.decode(tokenized.sequences[0].ids)


@pytest.mark.parametrize("logprob", [math.nan, math.inf, -math.inf, 0.5, None, "low"])
def test_an_impossible_logprob_is_rejected(tokenizer: Tokenizer, logprob: float) -> None:
    given = choice("yes", [*b"yes"])
    given["logprobs"]["content"][1]["logprob"] = logprob
    with pytest.raises(BadRequest, match=f"logprob `{logprob}`"):
        tokenize_trajectory(tokenizer, trajectory(USER, given))


@pytest.mark.parametrize("logprobs", [[1], "abc", {"content": 5}, {"content": [5]}])
def test_logprobs_in_another_form_are_rejected(tokenizer: Tokenizer, logprobs: object) -> None:
    with pytest.raises(BadRequest, match="not a list of objects"):
        tokenize_trajectory(tokenizer, trajectory(USER, {**choice("yes"), "logprobs": logprobs}))


def test_logprobs_far_below_zero_are_accepted(tokenizer: Tokenizer) -> None:
    given = trajectory(USER, sampled([1], [4, 5], [-1e308, -1e308]))
    assert tokenize_trajectory(tokenizer, given).chosen == 2


@pytest.mark.parametrize("message", [None, "yes"])
def test_a_choice_without_a_message_is_rejected(tokenizer: Tokenizer, message: object) -> None:
    with pytest.raises(BadRequest, match=f"the message `{message}`"):
        tokenize_trajectory(tokenizer, trajectory(USER, {**choice("x"), "message": message}))


def test_logprobs_of_the_wrong_length_are_rejected(tokenizer: Tokenizer) -> None:
    with pytest.raises(BadRequest, match="`2` tokens and `1` logprobs"):
        tokenize_trajectory(tokenizer, trajectory(USER, sampled([1], [4, 5], [-0.1])))


@pytest.mark.parametrize("art", [{"prompt_ids": [1]}, {"prompt_ids": "AQ=="}, {"other": ""}, "x"])
def test_malformed_exact_tokens_are_rejected(tokenizer: Tokenizer, art: object) -> None:
    with pytest.raises(BadRequest, match="invalid `art`"):
        tokenize_trajectory(tokenizer, trajectory(USER, {**choice("yes", [1]), "art": art}))


def test_a_picture_is_rejected_with_its_type(tokenizer: Tokenizer) -> None:
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}
    with pytest.raises(Unsupported, match="`image_url`"):
        tokenize_trajectory(tokenizer, trajectory(picture, choice("", [1])))
