"""openpipe-art 0.5.23, unmodified, through both of its backends: CONTROL_URL OPENAI_URL."""

import asyncio
import sys

import art
from art.serverless.backend import ServerlessBackend
from art.types import TrainSFTConfig
from common import BASE, QUESTION, fingerprint, report, reward

from trainer.client import ArtBackend
from trainer.errors import TrainerError


async def rollout(model: art.TrainableModel, number: int) -> art.Trajectory:
    answer = await model.openai_client().chat.completions.create(
        model=model.get_inference_name(), messages=QUESTION, max_tokens=8
    )
    return art.Trajectory(
        messages_and_choices=[*QUESTION, answer.choices[0]], reward=reward(number)
    )


async def group_of(model: art.TrainableModel) -> art.TrajectoryGroup:
    return art.TrajectoryGroup([await rollout(model, number) for number in range(4)])


async def serverless(openai: str) -> dict[str, object]:
    backend = ServerlessBackend(api_key="any", base_url=f"{openai}/v1")
    # Two runs share an alias, but nothing else.
    names = ("newest-serverless", "newest-serverless-again")
    models = [
        art.TrainableModel(
            name="shared", run_name=name, project="contract", base_model=BASE, base_path="art-local"
        )
        for name in names
    ]
    for model in models:
        await model.register(backend)
    first, second = models
    steps, fingerprints = [], [fingerprint(openai, first.get_inference_name())]
    for settings in ({}, {"kl_penalty_coef": 0.1}, {"kl_penalty_coef": 0.1, "loss_fn": "ppo"}):
        if "loss_fn" in settings:
            settings["kl_penalty_step_lag"] = 1
        result = await backend.train(
            first,
            [await group_of(first)],
            learning_rate=1e-3,
            optimizer_save_interval=2,
            **settings,
        )
        steps.append(result.step)
        fingerprints.append(fingerprint(openai, first.get_inference_name()))
    choice = (await rollout(first, 0)).messages_and_choices[-1]
    async with backend.exact_adapter_lease(first, 1):
        leased = first.get_inference_name()
    other = await second.get_step()
    await backend.close()
    return {
        "steps": steps,
        "other": other,
        "fingerprints": fingerprints,
        "metrics": result.metrics,
        "leased": leased,
        "spans": choice.model_extra["policy_token_spans"],
        "prompt_spans": choice.model_extra["prompt_policy_token_spans"],
        "tokens": [len(choice.model_extra[key]) for key in ("prompt_token_ids", "token_ids")],
    }


async def over_http(control: str, openai: str) -> dict[str, object]:
    backend = ArtBackend(control)
    model = art.TrainableModel(
        name="shared",
        run_name="newest-backend",
        project="contract",
        base_model=BASE,
        base_path="art-local",
        lora_config={"rank": 4, "alpha": 8},
    )
    await model.register(backend)
    steps, fingerprints = [], [fingerprint(openai, model.get_inference_name())]
    for _ in range(3):
        group = await group_of(model)
        result = await backend.train(
            model,
            [group],
            learning_rate=1e-3,
            normalize_advantages=True,
            kl_penalty_coef=0.1,
            kl_penalty_source="sample",
            kl_penalty_reference_step=0,
            optimizer_save_interval=5,
        )
        await model.log([group], metrics=result.metrics, step=result.step, split="train")
        steps.append(result.step)
        fingerprints.append(fingerprint(openai, model.get_inference_name()))
    async with backend.exact_adapter_lease(model, 1):
        leased = model.get_inference_name()
        await backend._delete_checkpoint_files(model, [])
        inside = fingerprint(openai, leased)
    await backend._delete_checkpoint_files(model, [])
    lesson = [*QUESTION, {"role": "assistant", "content": "a"}]
    turns = art.Trajectory(messages_and_choices=[*lesson, *lesson])
    for which in ("all", "last"):
        config = TrainSFTConfig(learning_rate=1e-3, batch_size=1, assistant_turns=which)
        await model.train_sft([turns], config=config)
    refused = {}
    for name, settings in {
        "colour": {"colour": "blue"},
        "loss_fn": {"loss_fn": "dro"},
        "kl_penalty_step_lag": {"kl_penalty_step_lag": 2, "kl_penalty_reference_step": 0},
    }.items():
        try:
            await backend.train(model, [group], **settings)
        except TrainerError as error:
            refused[name] = error.message
    wide = art.TrainableModel(
        name="wide",
        run_name="wide",
        project="contract",
        base_model=BASE,
        lora_config={"modules_to_save": ["lm_head"]},
    )
    for name, attempt in {
        "modules_to_save": wide.register(backend),
        "lease": backend.exact_adapter_lease(model, 1).__aenter__(),
    }.items():
        try:
            await attempt
        except TrainerError as error:
            refused[name] = error.message
    found = {
        "steps": steps,
        "fingerprints": fingerprints,
        "leased": [leased, inside],
        "last": model.get_inference_name(),
        "refused": refused,
    }
    await backend.close()
    return found


async def main(control: str, openai: str) -> None:
    report(serverless=await serverless(openai), backend=await over_http(control, openai))


asyncio.run(main(*sys.argv[1:]))
