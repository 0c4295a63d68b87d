"""Packed rows with shared prefixes give the same results as each sequence alone."""

import math
import random

import numpy as np
import pytest
import torch
from torch import Tensor

from trainer.base_model.resolve import resolve
from trainer.config import LoraConfig
from trainer.learner.gradient import row_logprobs
from trainer.learner.grpo import LossInputs, grpo_loss
from trainer.learner.pack import Row, pack
from trainer.learner.plot import panels_of
from trainer.learner.prefix_tree import Sample
from trainer.policy.lora import lora_parameters
from trainer.policy.model import Policy, load_model
from trainer.step_config import GrpoConfig


@pytest.fixture
def policy() -> Policy:
    """tiny-random with a LoRA whose B is not zero, so that every LoRA weight has a gradient."""
    policy = load_model(
        resolve("tiny-random"), lora=LoraConfig(), dtype=torch.float32, device=torch.device("cpu")
    )
    generator = torch.Generator().manual_seed(1)
    for parameter in lora_parameters(policy).values():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.1
    return policy


def sample(ids: list[int], chosen: list[int], *, group: int, number: int) -> Sample:
    logprobs = [-5.0 - 0.01 * at if at in chosen else math.nan for at in range(len(ids))]
    return Sample(
        ids=ids,
        mask=[at in chosen for at in range(len(ids))],
        logprobs=logprobs,
        advantage=(-1.0) ** number * (1 + number),
        weight=1.0 + 0.1 * number,
        group=group,
        trajectory=number,
    )


def forest() -> list[Sample]:
    """Two groups; the first forks, and one of its branches forks again in a second turn."""
    draw = random.Random(0)

    def text(length: int) -> list[int]:
        return [draw.randrange(260) for _ in range(length)]

    prompt, first, second, other = text(30), text(12), text(9), text(17)
    after_first = prompt + first + text(8)
    fork, other_fork = text(7), text(11)
    samples = [
        # A full completion, and two second turns that fork from it.
        sample(after_first + fork, [*range(30, 42), *range(50, 57)], group=0, number=0),
        sample(after_first + other_fork, list(range(50, 61)), group=0, number=1),
        sample(prompt + second, list(range(30, 39)), group=0, number=2),
        # Shares half of `second`, including chosen tokens.
        sample(prompt + second[:4] + text(6), list(range(30, 40)), group=0, number=3),
        # A prefix of another sequence.
        sample(prompt + first[:5], list(range(30, 35)), group=0, number=4),
        sample(other + text(8), list(range(17, 25)), group=1, number=5),
        sample(other + text(3), list(range(17, 20)), group=1, number=6),
    ]
    return samples


def loss_and_gradients(policy: Policy, rows: list[Row]) -> tuple[Tensor, dict[str, Tensor]]:
    policy.zero_grad()
    total = torch.zeros(())
    for row in rows:
        logprobs, entropies = row_logprobs(policy, row)
        output = grpo_loss(
            LossInputs(
                logprobs=logprobs,
                entropies=entropies,
                old_logprobs=row.sampler_logprobs,
                sampler_logprobs=row.sampler_logprobs,
                advantages=row.advantages,
                weights=row.weights,
                sequences=row.sequences,
            ),
            GrpoConfig(importance_sampling_level="average"),
        )
        output.loss.backward()
        total = total + output.loss.detach()
    gradients = {name: value.grad for name, value in lora_parameters(policy).items()}
    assert all(gradient is not None for gradient in gradients.values())
    return total, gradients  # type: ignore[return-value]


def test_every_shared_prefix_is_stored_once() -> None:
    samples = forest()
    (row,) = pack(samples, length=None)
    # prompt 30, first 5+7, its tail 8, forks 6 and 10, second 4, 4, 5; other 17, 7, 2
    assert len(row.tokens) == 30 + 12 + 8 + 6 + 10 + 4 + 4 + 5 + 17 + 7 + 2
    assert row.unshared == sum(len(one.ids) - 1 for one in samples)
    assert len(row.targets) == sum(sum(one.mask) for one in samples)


def test_a_token_sees_its_own_sequence_and_nothing_else() -> None:
    samples = forest()
    (row,) = pack(samples, length=None)
    mask = row.mask()
    for target, position in zip(row.predictors.tolist(), range(len(row.targets)), strict=True):
        seen = row.tokens[mask[target]].tolist()
        owner = samples_by_row(samples)[int(row.sequences[position])]
        assert seen == owner.ids[: len(seen)]
        assert owner.ids[len(seen)] == int(row.targets[position])
        assert row.positions[mask[target]].tolist() == list(range(len(seen)))


def samples_by_row(samples: list[Sample]) -> list[Sample]:
    """Samples in the order in which a single row numbers them: by group, then by tokens."""
    groups = [sorted((s for s in samples if s.group == g), key=lambda s: s.ids) for g in (0, 1)]
    return [one for group in groups for one in group]


def test_shared_rows_give_the_logprobs_of_each_sequence_alone(policy: Policy) -> None:
    samples = forest()
    (row,) = pack(samples, length=None)
    with torch.no_grad():
        found, entropies = row_logprobs(policy, row)
        for number, one in enumerate(samples_by_row(samples)):
            alone = policy.logits(policy.hidden(torch.tensor([one.ids])))[0].log_softmax(-1)
            mine = row.sequences == number
            at = [index for index, chosen in enumerate(one.mask) if chosen]
            expected = torch.stack([alone[index - 1, one.ids[index]] for index in at])
            torch.testing.assert_close(found[mine], expected, atol=1e-5, rtol=0)
            entropy = torch.stack(
                [-(alone[index - 1].exp() * alone[index - 1]).sum() for index in at]
            )
            torch.testing.assert_close(entropies[mine], entropy, atol=1e-4, rtol=0)


@pytest.mark.parametrize("length", [None, 64, 100])
def test_sharing_and_packing_change_neither_loss_nor_lora_gradients(
    policy: Policy, length: int | None
) -> None:
    samples = forest()
    alone = [row for one in samples for row in pack([one], length=None)]
    expected_loss, expected = loss_and_gradients(policy, alone)
    for rows in (
        pack(samples, length=length),
        pack(samples, length=length, share=False),
        pack(samples, length=length, full=True),
    ):
        loss, gradients = loss_and_gradients(policy, rows)
        torch.testing.assert_close(loss, expected_loss, atol=1e-3, rtol=1e-5)
        for name, gradient in gradients.items():
            error = (gradient - expected[name]).norm() / expected[name].norm()
            assert error < 1e-4, name


def test_rows_respect_their_length_and_lose_nothing() -> None:
    samples = forest()
    rows = pack(samples, length=64)
    assert len(rows) > 1
    assert max(len(row.tokens) for row in rows) <= 64
    chosen = sorted(target for row in rows for target in row.targets.tolist())
    assert chosen == sorted(
        token for one in samples for token, mine in zip(one.ids, one.mask, strict=True) if mine
    )


def groups(count: int, *, prompt: int, own: int, size: int = 8) -> list[Sample]:
    draw = random.Random(0)
    prompts = [[draw.randrange(260) for _ in range(prompt)] for _ in range(count)]
    return [
        sample(
            prompts[group] + [draw.randrange(260) for _ in range(own)],
            list(range(prompt, prompt + own)),
            group=group,
            number=number,
        )
        for group in range(count)
        for number in range(size)
    ]


def test_a_gpu_divides_groups_to_fill_rows_but_never_stores_a_long_prompt_for_nothing() -> None:
    # Each group needs 520 of 800 tokens: three of them fit into two rows.
    samples = groups(12, prompt=40, own=60)
    assert len(pack(samples, length=800)) == 12
    rows = pack(samples, length=800, full=True)
    assert len(rows) == 8
    assert max(len(row.tokens) for row in rows) <= 800
    whole = [one for row in rows for one in row.samples]
    assert sorted(map(id, whole)) == sorted(map(id, samples))
    # What is free beside a long prompt does not hold that prompt again.
    samples = groups(4, prompt=500, own=25)
    (before, after) = (pack(samples, length=800, full=full) for full in (False, True))
    assert [row.tokens.tolist() for row in after] == [row.tokens.tolist() for row in before]


def test_the_picture_shows_every_chosen_token_at_its_predictor() -> None:
    samples = forest()
    rows = pack(samples, length=64)
    panels = panels_of(rows)
    chosen = panels["Chosen tokens predicted here"]
    assert np.nansum(chosen) == sum(sum(one.mask) for one in samples)
    assert {panel.shape for panel in panels.values()} == {chosen.shape}
    for line, row in enumerate(rows):
        assert panels["Token ids"][line, : len(row.tokens)].tolist() == row.tokens.tolist()
        assert np.isnan(panels["Token ids"][line, len(row.tokens) :]).all()
        assert np.isnan(panels["Advantages"][line][np.nan_to_num(chosen[line]) == 0]).all()
