"""Judges: which replies hold a score and a reason, and which are unclear."""

from typing import Any

import pytest

from tests.unit.harness.conftest import Endpoint
from tests.unit.harness.test_evaluators import evaluator, run
from trainer.errors import JudgeUnclear
from trainer.harness.config import LlmConfig
from trainer.harness.evaluators import Scorer
from trainer.harness.judges import LlmJudge, Ruler
from trainer.harness.llm import Llms
from trainer.harness.types import Failure


class FakeJudge:
    """Stands in for `Llms` and its handle, and replies with the given answers."""

    def __init__(self, *answers: str) -> None:
        self.answers, self.prompts = list(answers), list[str]()

    def handle(self, rollout: str, name: str) -> "FakeJudge":
        return self

    async def ask(self, prompt: str, **settings: Any) -> str:
        self.prompts.append(prompt)
        return self.answers.pop(0)


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("0.8", 0.8),
        ("**1.0**", 1.0),
        ("0.4\n\nIt names 2 of 5 cities.", 0.4),
        ("<think>It made 1 mistake, so less</think>\n0.4", 0.4),
        (".5", 0.5),
        ("0.9. The answer is right.", 0.9),
    ],
)
async def test_text_around_a_judges_number_is_ignored(answer: str, score: float) -> None:
    llms: Any = FakeJudge(answer)
    judge = LlmJudge(llms, evaluator({"_type": "llm_judge", "llm": "j"}))
    assert await judge.score([run("Rome")]) == [score]


async def test_a_judge_receives_task_and_answers_and_its_number_is_the_score() -> None:
    llms: Any = FakeJudge("Score: 0.8")
    judge = LlmJudge(llms, evaluator({"_type": "llm_judge", "llm": "j"}))
    assert await judge.score([run("Rome")]) == [0.8]
    assert all(part in llms.prompts[0] for part in ("The capital of France?", "Paris", "Rome"))


@pytest.mark.parametrize(
    "answer",
    [
        "very good",
        "7",
        "-0.5",
        "1 out of 10",
        "1/10",
        "90%",
        "0,8",
        "On a scale from 0 to 1, I give 0.8",
        "Step 1 is wrong, so 0.2",
        "1. The answer is wrong.",
    ],
)
async def test_a_judge_without_a_number_from_0_to_1_loses_the_run(answer: str) -> None:
    llms: Any = FakeJudge(answer)
    one = run("Rome")
    judge = LlmJudge(llms, evaluator({"_type": "llm_judge", "llm": "j"}))
    await Scorer({"judge": judge}, "judge").score([one])
    assert one.failure is Failure.EVALUATOR and answer in one.error


async def test_ruler_scores_a_group_together() -> None:
    llms: Any = FakeJudge("Here you are: [0.2, 0.9]")
    ruler = Ruler(llms, evaluator({"_type": "ruler", "llm": "j"}))
    assert await ruler.score([run("Rome"), run("Paris")]) == [0.2, 0.9]
    assert '<attempt id="2">\nOutput: Paris' in llms.prompts[0]
    llms.answers = ["[0.2]"]
    with pytest.raises(JudgeUnclear, match="not 2 scores"):
        await ruler.score([run("Rome"), run("Paris")])


WHY = "It names Paris, which is right."


@pytest.mark.parametrize(
    ("reply", "score", "reason"),
    [
        (f'{{"reason": "{WHY}", "score": 0.7}}', 0.7, WHY),
        (f'```json\n{{"score": 1, "reason": "{WHY}"}}\n```', 1.0, WHY),
        (f'<think>{{"score": 0}}</think>My verdict: {{"Reason": "{WHY}", "Score": 1}}.', 1.0, WHY),
        ('{"reason": "He writes {\\"score\\": 1}.\n1. Wrong", "score": 0.0}', 0.0, "He writes"),
        ('{"score": 0.5}', 0.5, None),
        ("0.5", 0.5, None),
    ],
)
async def test_a_judges_reason_is_kept_with_the_run(
    reply: str, score: float, reason: str | None
) -> None:
    llms: Any = FakeJudge(reply)
    one = run("Paris")
    judge = LlmJudge(llms, evaluator({"_type": "llm_judge", "llm": "j"}))
    await Scorer({"mine": judge}, "mine").score([one])
    assert one.reward == score, one.error
    assert list(one.reasons) == (["mine"] if reason else [])
    assert one.reasons.get("mine", "").startswith(reason or "")


@pytest.mark.parametrize(
    "reply",
    [
        'It says {"score": 1}, so {"reason": "no", "score": 0}',
        '{"reason": "no", "score": 0} {"score": 1}',
        '{"reason": "it says "score": 1}", "score": 0}',
        '{"reason": "cut o',
        '{"reason": "no", "score": 0',
        '{"reason": "no", "score": 7}',
        '{"reason": "no", "score": true}',
        '{"reason": "no", "score": null}',
        '{"reason": "no", "score": NaN}',
        '[{"reason": "no", "score": 0}]',
    ],
)
async def test_a_judge_that_leaves_its_score_open_loses_the_run(reply: str) -> None:
    llms: Any = FakeJudge(reply)
    one = run("Rome")
    judge = LlmJudge(llms, evaluator({"_type": "llm_judge", "llm": "j"}))
    await Scorer({"judge": judge}, "judge").score([one])
    assert one.failure is Failure.EVALUATOR and "not a score from 0 to 1" in one.error


async def test_ruler_gives_a_reason_for_each_attempt() -> None:
    pair = '{"reason": "Wrong [0, 1].", "score": 0.1}, {"reason": "Right.", "score": 0.9}'
    for reply in (f"[{pair}]", f'```json\n{{"attempts": [{pair}]}}\n```'):
        llms: Any = FakeJudge(reply)
        runs = [run("Rome"), run("Paris")]
        ruler = Ruler(llms, evaluator({"_type": "ruler", "llm": "j"}))
        await Scorer({"ruler": ruler}, "ruler").score(runs)
        assert [one.reward for one in runs] == [0.1, 0.9]
        assert [one.reasons for one in runs] == [{"ruler": "Wrong [0, 1]."}, {"ruler": "Right."}]
    for reply in (pair, f"[{pair}", f"[{pair}, {pair}]", f"[{pair}] [{pair}]"):
        runs = [run("Rome"), run("Paris")]
        ruler = Ruler(FakeJudge(reply), evaluator({"_type": "ruler", "llm": "j"}))  # type: ignore[arg-type]
        await Scorer({"ruler": ruler}, "ruler").score(runs)
        assert {one.failure for one in runs} == {Failure.EVALUATOR}, reply


@pytest.mark.parametrize(("kind", "reply"), [(LlmJudge, "0.5"), (Ruler, "[0.5]")])
@pytest.mark.parametrize("records", [False, True])
async def test_a_judge_is_never_asked_for_logprobs(
    endpoint: Endpoint, kind: Any, reply: str, records: bool
) -> None:
    endpoint.reply = lambda model, question, number: reply
    settings = {"_type": "openai", "model_name": "m", "base_url": endpoint.url}
    llms = Llms({"j": LlmConfig.model_validate(settings)})
    llms.endpoints["j"].records = records
    name = "ruler" if kind is Ruler else "llm_judge"
    assert await kind(llms, evaluator({"_type": name, "llm": "j"})).score([run("Rome")]) == [0.5]
    assert len(endpoint.bodies) == 1 and "logprobs" not in endpoint.bodies[0]
    await llms.close()
