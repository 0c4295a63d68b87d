"""The canary: checks after every step that engine and learner hold the same weights.

The engine continues a fixed prompt greedily, and the learner scores the same tokens. In bf16 the
logprobs differ slightly; a larger difference means that the engine serves other weights. The step
is already served, and chats and the next step run beside the check. If the learner trains another
step meanwhile, it scores afterwards, with the LoRA of the checked step.

A client that waits for its steps gets the answer of a step after the engine's part, because a chat
in one batch with the check would round differently from run to run.
"""

import asyncio
import logging

from trainer.base_model.tokenizer import Tokenizer
from trainer.engines.engine import Engine, SampleRequest
from trainer.learner.process import LearnerProcess
from trainer.server.gate import Gate
from trainer.server.model import Model

logger = logging.getLogger(__name__)
PROMPT = "Count from one to ten."
TOKENS = 8
# Mean absolute difference of a logprob. bf16 alone causes up to about 0.05. fp8 magnifies bf16's
# rounding differences: a value halfway between two fp8 numbers can round either way.
BOUNDS = {None: 0.1, "fp8": 0.3}


async def check(
    engine: Engine,
    learner: LearnerProcess,
    tokenizer: Tokenizer,
    model: Model,
    step: int,
    bound: float,
    gate: Gate,
    engine_done: asyncio.Event,
) -> dict[str, float]:
    """Return the mean absolute difference of their logprobs at a step of the model.

    `engine_done` is set after the engine's part, or immediately if the engine has other requests.
    """
    if gate.in_use:
        engine_done.set()
    lora = model.lora_name(step)
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": PROMPT}])
    request = SampleRequest(prompt, lora=lora, max_tokens=TOKENS, temperature=0)
    tokens: list[int] = []
    logprobs: list[float] = []
    # Not longer: while the learner trains, its score waits for it, and so would all requests.
    async with gate.sampling():
        async for delta in engine.sample(request):
            tokens += delta.token_ids
            logprobs += delta.logprobs
    engine_done.set()
    scored = await learner.score(model.checkpoints, step, model.lora, prompt, tokens)
    difference = sum(abs(a - b) for a, b in zip(logprobs, scored, strict=True)) / len(tokens)
    if not difference <= bound:
        logger.warning(
            "`%s`: engine and learner differ by %.3f per logprob (bound %s): the engine may serve "
            "other weights than the trained ones",
            lora,
            difference,
            bound,
        )
    return {"canary/logprob_difference": difference, "canary/bound": bound}
