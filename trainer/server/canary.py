"""The canary: after every step, do engine and learner still hold the same weights?

The engine continues a fixed prompt greedily, the learner scores the same tokens. In bf16 the two
differ a little; more than a little means that the engine serves something else. Nobody waits for
it: the step is served, and the next rollouts go on beside the check.
"""

import logging

from trainer.base_model.tokenizer import Tokenizer
from trainer.engines.engine import Engine, SampleRequest
from trainer.learner.process import LearnerProcess
from trainer.server.models import Model

logger = logging.getLogger(__name__)
PROMPT = "Count from one to ten."
TOKENS = 8
# Mean absolute difference of a logprob. bf16 alone gives up to about 0.05. fp8 magnifies what bf16
# rounds differently: a value near the middle of two of its few steps falls to either side.
BOUNDS = {None: 0.1, "fp8": 0.3}


async def check(
    engine: Engine, learner: LearnerProcess, tokenizer: Tokenizer, model: Model, bound: float
) -> dict[str, float]:
    """Mean absolute difference of engine's and learner's logprobs at the model's newest step."""
    lora = model.lora_name(max(model.steps))
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": PROMPT}])
    request = SampleRequest(prompt, lora=lora, max_tokens=TOKENS, temperature=0)
    tokens: list[int] = []
    sampled: list[float] = []
    async for delta in engine.sample(request):
        tokens += delta.token_ids
        sampled += delta.logprobs
    scored = await learner.score(model.checkpoints, model.lora, prompt, tokens)
    difference = sum(abs(a - b) for a, b in zip(sampled, scored, strict=True)) / len(tokens)
    if not difference <= bound:
        logger.warning(
            "`%s`: engine and learner differ by %.3f a logprob (bound %s): the engine may serve "
            "other weights than those that were trained",
            lora,
            difference,
            bound,
        )
    return {"canary/logprob_difference": difference, "canary/bound": bound}
