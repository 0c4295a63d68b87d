"""Which policy sampled each token of a choice, as openpipe-art 0.5.23 reads it.

A request samples from one step from its first token to its last, so there is one span for the
prompt and one for the completion. `PipelineTrainer` checks them after every evaluation.
"""

from kit.types import Json
from trainer.server.models import SERVED

COMPLETION = "policy_token_spans"
PROMPT = "prompt_policy_token_spans"


def policy_spans(model: str, step: int, *, prompt: int, start: int, end: int) -> Json:
    """The fields of a choice that was sampled from the served name `model` at `step`.

    `start` and `end` limit the tokens of the completion that a chunk adds. Only the first chunk
    describes the `prompt` tokens, without the first one, which has no logprob.
    """
    served = SERVED.fullmatch(model)
    parts = (served["project"], served["name"]) if served else (model,)
    generation = f"{'/'.join(part for part in parts if part)}@{step}"
    identity = {
        "generation_id": generation,
        "policy_version": step,
        "lora_slot": model,
        "update_seq": step,
    }
    spans: Json = {COMPLETION: _span(start, end, identity)}
    if start == 0:
        spans[PROMPT] = _span(1, prompt, identity)
    return spans


def _span(start: int, end: int, identity: Json) -> list[Json]:
    return [{"start_token": start, "end_token": end, **identity}] if end > start else []
