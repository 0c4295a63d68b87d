"""Constrained text is valid, in every engine."""

import asyncio
import json
import os
import re
from pathlib import Path

import jsonschema
import pytest

from tests.contract.engines.choices import BOUND, PROMPT, differences, sample
from tests.contract.loras import write_lora
from tests.contract.schemas import random_schema
from trainer.engines.engine import Constraint, Engine, SampleRequest
from trainer.errors import BadRequest

pytestmark = pytest.mark.asyncio(loop_scope="session")


CONSTRAINTS = [
    (Constraint("regex", "(ab|c){2,3}!"), "(ab|c){2,3}!"),
    (Constraint("choice", json.dumps(["yes", 'no "sir"', "a|b"])), 'yes|no "sir"|a\\|b'),
    (
        Constraint("grammar", 'start: "<t>" %json{"type": "boolean"} "</t>"'),
        "<t>(true|false)</t>",
    ),
]


@pytest.mark.parametrize(
    ("constraint", "pattern"), CONSTRAINTS, ids=lambda one: getattr(one, "kind", "")
)
async def test_a_constrained_text_matches_and_ends_with_a_sampled_end_of_turn(
    engine: Engine, constraint: Constraint, pattern: str
) -> None:
    for choice in await sample(engine, constraint=constraint, n=4, seed=2, max_tokens=400):
        assert choice.finish_reason == "stop" and choice.token_ids[-1] == 258
        assert re.fullmatch(pattern, choice.text, re.DOTALL), choice.text
        assert bytes(choice.token_ids[:-1]).decode() == choice.text


async def test_any_json_object_is_one_without_a_schema(engine: Engine) -> None:
    (choice,) = await sample(
        engine, constraint=Constraint("json_object"), logit_bias=((125, 90.0),), max_tokens=9
    )
    assert (choice.text, choice.finish_reason) == ("{}", "stop")


async def test_both_engines_give_the_same_constrained_tokens(
    engines: dict[str, Engine], tmp_path: Path
) -> None:
    lora_path = write_lora(tmp_path / "0001", seed=6)
    for engine in engines.values():
        await engine.load("constrained@1", lora_path)
    for lora, (constraint, _) in zip((None, "constrained@1", None), CONSTRAINTS, strict=True):
        request = {"constraint": constraint, "lora": lora, "temperature": 0, "n": 2}
        ours, theirs = [await sample(engine, **request) for engine in engines.values()]
        assert [c.token_ids for c in ours] == [c.token_ids for c in theirs]
        assert max(differences(ours[0], theirs[0])) < BOUND


async def test_a_constrained_choice_that_reaches_its_limit_ends_there(engine: Engine) -> None:
    (choice,) = await sample(engine, constraint=Constraint("regex", "[ab]{50}"), max_tokens=7)
    assert choice.finish_reason == "length"
    assert len(choice.token_ids) == len(choice.logprobs) == len(choice.text) == 7


async def test_the_text_of_a_constrained_stream_arrives_piece_by_piece(engine: Engine) -> None:
    request = SampleRequest(
        PROMPT, constraint=Constraint("regex", "[ab]{20}"), stream=True, max_tokens=40
    )
    pieces = [delta.text async for delta in engine.sample(request)]
    assert len([piece for piece in pieces if piece]) > 10 and len("".join(pieces)) == 20


SCHEMAS = int(os.environ.get("SCHEMAS", "200"))


async def test_every_answer_to_a_random_schema_is_valid(alone: Engine) -> None:
    schemas = [random_schema(seed) for seed in range(SCHEMAS)]
    found = await asyncio.gather(
        *(
            sample(
                alone,
                constraint=Constraint("json_schema", json.dumps(schema)),
                max_tokens=500,
                seed=seed,
            )
            for seed, schema in enumerate(schemas)
        )
    )
    finished = [
        (schema, choice)
        for schema, (choice,) in zip(schemas, found, strict=True)
        if choice.finish_reason == "stop"
    ]
    assert len(finished) > 0.95 * SCHEMAS
    formats = jsonschema.FormatChecker(["uuid", "ipv4"])
    for schema, choice in finished:
        validator = jsonschema.Draft202012Validator(schema, format_checker=formats)
        validator.validate(json.loads(choice.text))


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        (Constraint("json_schema", '{"type": "obj"}'), "JSON schema .*Invalid type: obj"),
        (Constraint("json_schema", '{"$ref": "#/$defs/no"}'), "JSON schema .*/\\$defs/no"),
        (Constraint("json_schema", '{"uniqueItems": true}'), "JSON schema .*uniqueItems"),
        (Constraint("json_schema", "[1"), "JSON schema .*not JSON"),
        (Constraint("json_schema", "false"), "JSON schema .*must be an object"),
        (Constraint("regex", "(["), "regular expression .*unclosed"),
        (Constraint("regex", "a(?=b)"), "regular expression .*look-around"),
        (Constraint("choice", "[]"), "choices .*one or more strings"),
        (Constraint("grammar", "start: nowhere"), "grammar .*nowhere"),
    ],
    ids=lambda one: getattr(one, "value", ""),
)
async def test_a_constraint_that_cannot_be_used_is_rejected_in_one_sentence(
    engine: Engine, constraint: Constraint, message: str
) -> None:
    with pytest.raises(BadRequest, match=message) as caught:
        await sample(engine, constraint=constraint, max_tokens=5)
    assert "\n" not in caught.value.message and caught.value.hint
