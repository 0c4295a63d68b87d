from typing import Any

from trainer.server.policy_spans import policy_spans


def bounds(spans: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(span["start_token"], span["end_token"]) for span in spans]


def test_the_chunks_of_a_stream_partition_the_completion_and_describe_the_prompt_once() -> None:
    chunks = [
        policy_spans("m", 3, prompt=9, start=start, end=end)
        for start, end in ((0, 0), (0, 2), (2, 2), (2, 5))
    ]
    spans = [span for chunk in chunks for span in chunk["policy_token_spans"]]
    assert bounds(spans) == [(0, 2), (2, 5)]
    assert "prompt_policy_token_spans" not in chunks[-1]
    assert bounds(chunks[1]["prompt_policy_token_spans"]) == [(1, 9)]
    assert policy_spans("m", 3, prompt=1, start=0, end=1)["prompt_policy_token_spans"] == []


def test_spans_name_the_weights_whatever_name_was_asked_for() -> None:
    for asked in ("m", "m@3", "wandb-artifact:///e/p/m:step3"):
        [span] = policy_spans(asked, 3, prompt=9, start=0, end=2)["policy_token_spans"]
        assert span["generation_id"] == "m@3" and span["lora_slot"] == asked
        assert span["policy_version"] == span["update_seq"] == 3
    [base] = policy_spans("Org/Base@base", 0, prompt=9, start=0, end=2)["policy_token_spans"]
    assert base["generation_id"] == "Org/Base@base@0"
