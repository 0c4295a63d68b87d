"""Matching choices with the ledger: a choice trains under the prompt it was sampled from."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest

from trainer import exact_tokens
from trainer.base_model.resolve import resolve
from trainer.base_model.tokenizer import Tokenizer
from trainer.exact_tokens import ExactTokens
from trainer.server import exact_prompts
from trainer.server.ledger import Entry, Ledger
from trainer.server.matching import choices_of, find, recall

END = 258  # <|im_end|>
SURE = -1e-7  # a confident token: it rounds to zero, as the logprobs of confident answers do
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {}}}]


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(tmp_path / "ledger.db")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(resolve("tiny-random"))


def choice(ids: list[int], logprobs: list[float], content: str = "text") -> dict[str, Any]:
    entries = [
        {"token": f"token_id:{token}", "logprob": logprob}
        for token, logprob in zip(ids, logprobs, strict=True)
    ]
    return {
        "finish_reason": "stop",
        "message": {"role": "assistant", "content": content},
        "logprobs": {"content": entries},
    }


def entry(prompt: list[int], ids: list[int], logprobs: list[float], **more: Any) -> Entry:
    fields = {"model": "p/m", "step": 0, "lora_sha256": "", "rollout": None, **more}
    return Entry(prompt_ids=prompt, completion_ids=ids, logprobs=logprobs, **fields)


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def sampled(
    ledger: Ledger,
    tokenizer: Tokenizer,
    messages: list[dict[str, Any]],
    text: str,
    logprob: float = SURE,
    **template: Any,
) -> dict[str, Any]:
    """A choice that the server sampled after `messages`, as the client gets it."""
    ids = [*text.encode(), END]
    logprobs = [logprob] * len(ids)
    prompt = tokenizer.apply_chat_template(messages, **template)
    made = entry(prompt, ids, logprobs, template=template)
    ledger.record(made, text)
    return {**choice(ids, logprobs, text), "choice_id": made.id}


def without_id(item: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in item.items() if key != "choice_id"}


def recalled(
    ledger: Ledger, tokenizer: Tokenizer, *items: dict[str, Any], tools: Any = None
) -> list[ExactTokens | None]:
    """The exact tokens of every choice of a trajectory."""
    trajectory = {"messages_and_choices": copy.deepcopy(list(items)), "tools": tools}
    recall(ledger, [{"trajectories": [trajectory]}], tokenizer)
    return [exact_tokens.take(one) for one in choices_of([{"trajectories": [trajectory]}])]


def prompts(found: list[ExactTokens | None]) -> list[list[int] | None]:
    return [one.prompt_ids if one else None for one in found]


def test_a_choice_finds_the_prompt_it_was_sampled_from(
    ledger: Ledger, tokenizer: Tokenizer
) -> None:
    one = entry([1, 2], [7, 8], [-0.5, -1.25])
    other = entry([1, 3], [7, 8], [-0.5, -1.5])
    ledger.record(one, "text")
    ledger.record(other, "text")
    assert find(ledger, choice([7, 8], [-0.5, -1.25]), tokenizer) == one
    assert find(ledger, choice([7, 8], [-0.5, -1.5]), tokenizer) == other
    assert find(ledger, choice([7, 9], [-0.5, -1.5]), tokenizer) is None


def test_a_choice_gets_the_step_of_the_trained_model_that_sampled_it(
    ledger: Ledger, tokenizer: Tokenizer
) -> None:
    found = []
    for number, model in enumerate(("p/m", "p/other", "")):
        made = entry([1, 2], [7], [-0.5], model=model, step=5 + number)
        ledger.record(made, "text")
        item = {**choice([7], [-0.5], "text"), "choice_id": made.id}
        recall(
            ledger,
            [{"trajectories": [{"messages_and_choices": [item]}]}],
            tokenizer,
            model="p/m",
        )
        exact = exact_tokens.take(item)
        found.append(exact and exact.step)
    assert found == [5, None, None]


def test_the_id_tells_two_confident_answers_apart(ledger: Ledger, tokenizer: Tokenizer) -> None:
    first, second = ([user(name)] for name in ("one", "two"))
    answers = [sampled(ledger, tokenizer, messages, "yes") for messages in (first, second)]
    for answer, messages in zip(answers, (first, second), strict=True):
        # Even if the conversation around the choice was rewritten.
        found = recalled(ledger, tokenizer, user("rewritten"), answer)
        assert prompts(found) == [tokenizer.apply_chat_template(messages)]
        # Some frameworks keep only the logprobs, whose first token has the id too.
        lean = without_id(answer)
        lean["logprobs"]["content"][0]["choice_id"] = answer["choice_id"]
        assert prompts(recalled(ledger, tokenizer, lean)) == prompts(found)


def test_without_ids_the_prompt_tells_two_confident_answers_apart(
    ledger: Ledger, tokenizer: Tokenizer
) -> None:
    """Every logprob rounds to zero, in two conversations of two turns each."""
    conversations = []
    for question in ("one", "two"):
        messages: list[dict[str, Any]] = []
        items = []
        for text in (question, "sure?"):
            messages.append(user(text))
            answer = without_id(sampled(ledger, tokenizer, messages, "yes", tools=TOOLS))
            items += [messages[-1], answer]
            messages.append(answer["message"])
        conversations.append((items, messages))
    for items, messages in conversations:
        expected = [
            tokenizer.apply_chat_template(messages[:1], TOOLS),
            tokenizer.apply_chat_template(messages[:3], TOOLS),
        ]
        assert prompts(recalled(ledger, tokenizer, *items, tools=TOOLS)) == expected
        # NAT sends trajectories without tools.
        assert prompts(recalled(ledger, tokenizer, *items)) == expected


def test_tools_of_the_trajectory_decide_between_equal_messages(
    ledger: Ledger, tokenizer: Tokenizer
) -> None:
    asked = [user("one")]
    answer = without_id(sampled(ledger, tokenizer, asked, "yes"))
    sampled(ledger, tokenizer, asked, "yes", tools=TOOLS)
    found = recalled(ledger, tokenizer, *asked, answer, tools=TOOLS)
    assert prompts(found) == [tokenizer.apply_chat_template(asked, TOOLS)]
    assert prompts(recalled(ledger, tokenizer, *asked, answer)) == [
        tokenizer.apply_chat_template(asked)
    ]


def test_a_turn_continues_the_tokens_of_the_turn_before(
    ledger: Ledger, tokenizer: Tokenizer
) -> None:
    """Messages that a framework rewrote render to no sampled prompt, but the tokens go on."""
    conversations = []
    for question in ("one", "two"):
        first = sampled(ledger, tokenizer, [user(question)], "look")
        start = [*tokenizer.apply_chat_template([user(question)]), *b"look", END]
        made = entry([*start, 9], [*b"yes", END], [SURE] * 4)
        ledger.record(made, "yes")
        conversations.append((first, made))
    for first, made in conversations:
        second = choice(made.completion_ids, made.logprobs, "yes")
        found = recalled(ledger, tokenizer, user("lost"), first, user("lost"), second)
        assert prompts(found)[1] == made.prompt_ids


def test_logprobs_with_all_digits_tell_answers_apart(ledger: Ledger, tokenizer: Tokenizer) -> None:
    for prompt, logprob in ((2, -0.50001), (3, -0.50002)):
        ledger.record(entry([1, prompt], [7], [logprob]), "yes")
    found = find(ledger, choice([7], [-0.50002]), tokenizer)
    assert found and found.prompt_ids == [1, 3]


def test_a_choice_that_fits_two_prompts_is_marked_and_not_guessed(
    ledger: Ledger, tokenizer: Tokenizer
) -> None:
    for prompt in ([1, 2], [1, 3]):
        ledger.record(entry(prompt, [7], [0.0]), "yes")
    item = choice([7], [0.0])
    assert find(ledger, item, tokenizer) is None
    recall(ledger, [{"trajectories": [{"messages_and_choices": [item]}]}], tokenizer)
    assert exact_tokens.is_ambiguous(item) and exact_tokens.take(item) is None


def test_an_edited_choice_is_not_trained_under_the_id_it_carries(
    ledger: Ledger, tokenizer: Tokenizer
) -> None:
    answer = sampled(ledger, tokenizer, [user("one")], "yes", logprob=-0.5)
    edits: list[dict[str, Any]] = [copy.deepcopy(answer) for _ in range(4)]
    edits[0]["logprobs"]["content"][0]["token"] = "token_id:9"
    edits[1]["logprobs"]["content"][0]["logprob"] = -0.7
    edits[2]["logprobs"]["content"].pop()
    edits[3] |= {"logprobs": None, "message": {"role": "assistant", "content": "no"}}
    for edited in edits:
        assert recalled(ledger, tokenizer, user("one"), edited) == [None]
    rounded = copy.deepcopy(answer)
    rounded["logprobs"]["content"][0]["logprob"] = -0.50008
    assert recalled(ledger, tokenizer, rounded) != [None]


def test_a_choice_whose_entry_is_gone_does_not_get_that_of_another_prompt(
    ledger: Ledger, tokenizer: Tokenizer
) -> None:
    sampled(ledger, tokenizer, [user("other")], "yes")
    gone = {**choice([*b"yes", END], [SURE] * 4, "yes"), "choice_id": "f" * 32}
    assert recalled(ledger, tokenizer, user("one"), gone) == [None]
    found = recalled(ledger, tokenizer, user("other"), gone)
    assert prompts(found) == [tokenizer.apply_chat_template([user("other")])]


def test_an_impossible_token_is_recorded_with_the_number_that_answers_hold(
    ledger: Ledger, tokenizer: Tokenizer
) -> None:
    ledger.record(entry([1], [7, 8], [-0.5, -math.inf]), "")
    found = find(ledger, choice([7, 8], [-0.5, -9999.0]), tokenizer)
    assert found and found.logprobs == [-0.5, -9999.0]


def test_a_choice_that_lost_its_logprobs_is_found_by_id_if_its_text_agrees(
    ledger: Ledger, tokenizer: Tokenizer
) -> None:
    text = 'Let me see.<tool_call>{"name": "look", "arguments": {}}</tool_call>'
    answer = {**sampled(ledger, tokenizer, [user("one")], text), "logprobs": None}
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    other = {**call, "function": {"name": "leave", "arguments": "{}"}}
    message = {"role": "assistant", "content": "Let me see.", "tool_calls": [call]}
    assert recalled(ledger, tokenizer, answer) != [None]
    assert recalled(ledger, tokenizer, {**answer, "message": message}) != [None]
    edited = {**message, "tool_calls": [other]}
    assert recalled(ledger, tokenizer, {**answer, "message": edited}) == [None]


@pytest.mark.parametrize(
    "logprobs",
    [
        None,
        {"content": None},
        {"content": [{"token": "token_id:7", "logprob": None}]},
        {"content": [{"token": "token_id:7", "logprob": 10**400}]},
        {"content": [{"token": 7, "logprob": "low"}]},
        {"content": [5]},
        {"content": 5},
        [1],
    ],
)
def test_a_text_that_was_once_sampled_is_no_match(
    ledger: Ledger, tokenizer: Tokenizer, logprobs: object
) -> None:
    """Without logprobs, another conversation may have said the same."""
    sampled(ledger, tokenizer, [user("one")], "lone \ud800".replace("\ud800", "x"))
    bare = {**choice([7], [-0.5], content="lone x"), "logprobs": logprobs}
    assert recalled(ledger, tokenizer, user("one"), bare) == [None]


def test_tokens_given_by_their_text_need_the_same_prompt_text_and_logprobs(
    ledger: Ledger, tokenizer: Tokenizer
) -> None:
    asked = [user("one")]
    answer = without_id(sampled(ledger, tokenizer, asked, "yes", logprob=-0.5, tools=TOOLS))
    for token in answer["logprobs"]["content"]:
        token["token"] = "text"
    for tools in (TOOLS, None):
        found = recalled(ledger, tokenizer, user("one"), answer, tools=tools)
        assert prompts(found) == [tokenizer.apply_chat_template(asked, TOOLS)]
    assert recalled(ledger, tokenizer, user("other"), answer) == [None]
    answer["logprobs"]["content"][0]["logprob"] = -0.6
    assert recalled(ledger, tokenizer, user("one"), answer) == [None]


def test_exact_tokens_that_a_client_sends_are_not_taken(
    ledger: Ledger, tokenizer: Tokenizer
) -> None:
    item = choice([7], [-0.5])
    ExactTokens([1], [7], [-0.5]).put(item)
    assert recalled(ledger, tokenizer, item) == [None]


def test_a_choice_that_no_model_sampled_is_not_found(ledger: Ledger, tokenizer: Tokenizer) -> None:
    assert find(ledger, choice([99999999999], [-0.5]), tokenizer) is None
    parts = {"message": {"content": [{"type": "text", "text": "x"}]}, "logprobs": None}
    assert find(ledger, parts, tokenizer) is None
    assert find(ledger, {**parts, "choice_id": 7}, tokenizer) is None


def test_messages_that_the_template_rejects_match_nothing(
    ledger: Ledger, tokenizer: Tokenizer
) -> None:
    for name in ("one", "two"):
        sampled(ledger, tokenizer, [user(name)], "yes")
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}
    item = choice([*b"yes", END], [0.0] * 4, "yes")
    assert recalled(ledger, tokenizer, picture, item) == [None]


def test_choices_are_found_in_additional_histories_too() -> None:
    first, second = choice([1], [-1.0]), choice([2], [-1.0])
    trajectory = {
        "messages_and_choices": [user("x"), first],
        "additional_histories": [{"messages_and_choices": [user("x"), second]}],
    }
    assert list(choices_of([{"trajectories": [trajectory]}])) == [first, second]


@pytest.mark.parametrize(
    "logprobs",
    [
        [SURE] * 4,  # a confident answer
        [-0.5, -0.5, -0.5, -0.5],
        [-0.001, -0.002, -0.003, -0.004],
        [-0.25, -1.5, -2.75, SURE],  # a short one
    ],
)
def test_without_an_id_common_logprobs_count_only_after_the_prompt_they_were_sampled_from(
    ledger: Ledger, tokenizer: Tokenizer, logprobs: list[float]
) -> None:
    ids = [*b"yes", END]
    asked = [user("one")]
    prompt = tokenizer.apply_chat_template(asked, TOOLS)
    ledger.record(entry(prompt, ids, logprobs, template={"tools": TOOLS}), "yes")
    answer = choice(ids, logprobs, "yes")
    # With the tools of the trajectory, or as NAT sends it, without them.
    for tools in (TOOLS, None):
        assert prompts(recalled(ledger, tokenizer, *asked, answer, tools=tools)) == [prompt]
    other = {"messages_and_choices": [user("two"), copy.deepcopy(answer)]}
    recall(ledger, [{"trajectories": [other]}], tokenizer)
    item = other["messages_and_choices"][-1]
    assert exact_tokens.is_ambiguous(item) and exact_tokens.take(item) is None


def test_particular_logprobs_prove_the_prompt_though_the_conversation_was_rewritten(
    ledger: Ledger, tokenizer: Tokenizer
) -> None:
    ids, logprobs = [*b"four", END], [-0.25, -1.5, -2.75, -0.125, SURE]
    prompt = tokenizer.apply_chat_template([user("one")])
    ledger.record(entry(prompt, ids, logprobs), "four")
    found = recalled(ledger, tokenizer, user("rewritten"), choice(ids, logprobs, "four"))
    assert prompts(found) == [prompt]


def test_the_id_of_a_matched_choice_stays_when_its_logprobs_go(
    ledger: Ledger, tokenizer: Tokenizer
) -> None:
    """Steps count the choices that several trajectories share by it."""
    answer = sampled(ledger, tokenizer, [user("one")], "yes")
    lean = without_id(answer)
    lean["logprobs"]["content"][0]["choice_id"] = answer["choice_id"]
    recall(ledger, [{"trajectories": [{"messages_and_choices": [lean]}]}], tokenizer)
    assert lean["choice_id"] == answer["choice_id"] and "logprobs" not in lean


@pytest.mark.parametrize("rollout", ["one", None])
@pytest.mark.parametrize("first", [True, False])
def test_a_prompt_is_found_by_its_text_whatever_tokens_it_went_on_from(
    ledger: Ledger, tokenizer: Tokenizer, rollout: str | None, first: bool
) -> None:
    """Another run wrote the same text in other tokens, before or after this one."""
    asked, more = user("Say something."), user("Go on.")

    def answer(messages: list[dict[str, Any]], ids: list[int], by: str | None) -> dict[str, Any]:
        text = tokenizer.render(messages)
        made = entry(
            exact_prompts.encode(text, tokenizer, ledger, by),
            ids,
            [SURE] * len(ids),
            rollout=by,
            prompt_text=text,
            tokenizer=tokenizer.digest,
        )
        content = tokenizer.text(ids)
        ledger.record(made, content)
        prompts.append(made.prompt_ids)
        return choice(ids, made.logprobs, content)

    prompts: list[list[int]] = []
    one = answer([asked], [*b"a", 0xC3, END], rollout)
    if first:
        answer([asked], [*b"a", 0xC4, END], rollout and "other")
    two = answer([asked, one["message"], more], [*b"yes", END], rollout)
    sampled_from = prompts[-1]
    if not first:
        answer([asked], [*b"a", 0xC4, END], rollout and "other")
    (found,) = recalled(ledger, tokenizer, asked, one["message"], more, two)
    assert found is not None and found.prompt_ids == sampled_from
