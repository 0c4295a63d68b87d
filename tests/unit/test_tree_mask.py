"""The GPU's mask of a packed row equals the row's own mask, and its blocks are classified right."""

import random

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_mask

from trainer.learner.pack import Row, pack
from trainer.learner.prefix_tree import Sample
from trainer.policy.tree_mask import BLOCK, Lengths, tree_mask


def row_of(seed: int) -> Row:
    chance = random.Random(seed)
    samples = []
    for group in range(chance.randint(1, 3)):
        prompt = [chance.randrange(9) for _ in range(chance.randint(1, 150))]
        for _ in range(chance.randint(1, 5)):
            # A small alphabet also produces forks at the first tokens.
            own = [chance.randrange(9) for _ in range(chance.randint(1, 120))]
            mask = [False] * len(prompt) + [True] * len(own)
            ids = prompt + own
            samples.append(Sample(ids, mask, [0.0] * len(ids), 1.0, 1.0, group, len(samples)))
    (row,) = pack(samples, length=4096)
    return row


def test_the_mask_equals_the_rows_and_padding_sees_only_itself() -> None:
    for seed in range(8):
        row = row_of(seed)
        tokens, length = len(row.tokens), 4096
        mask = tree_mask(row.ends, length).blocks
        dense = create_mask(mask.mask_mod, 1, 1, length, length, device="cpu")[0, 0]
        expected = torch.eye(length, dtype=torch.bool)
        expected[:tokens, :tokens] = row.mask()
        assert torch.equal(dense, expected)


def test_full_blocks_show_every_pair_and_omitted_blocks_none() -> None:
    row = row_of(3)
    mask = tree_mask(row.ends, 2048).blocks
    pairs = create_mask(mask.mask_mod, 1, 1, 2048, 2048, device="cpu")[0, 0]
    blocks = pairs.view(16, BLOCK, 16, BLOCK).transpose(1, 2).flatten(2)  # [Q, K, pairs]
    for query in range(16):
        counts = (mask.kv_num_blocks, mask.full_kv_num_blocks)
        indices = (mask.kv_indices, mask.full_kv_indices)
        partial, full = (
            index[0, 0, query, : int(count[0, 0, query])].tolist()
            for count, index in zip(counts, indices, strict=True)
        )
        assert blocks[query, full].all()
        assert sorted(partial + full) == blocks[query].any(dim=-1).nonzero()[:, 0].tolist()


def test_blocks_by_key_are_the_transpose_of_blocks_by_query() -> None:
    tree = tree_mask(row_of(3).ends, 2048)

    def pairs(counts: Tensor, indices: Tensor) -> set[tuple[int, int]]:
        numbers = counts[0, 0].tolist()
        return {
            (one, other)
            for one, many in enumerate(numbers)
            for other in indices[0, 0, one, :many].tolist()
        }

    for which in (slice(0, 2), slice(2, 4)):  # partial and full blocks
        by_query = pairs(*tree.by_query()[which])
        assert by_query == {(query, key) for key, query in pairs(*tree.by_key()[which])}


def test_lengths_are_few_and_are_reused() -> None:
    lengths = Lengths()
    assert [lengths.fit(n) for n in (100, 2048, 2049, 5000, 5000)] == [2048, 2048, 3072, 6144, 6144]
    assert lengths.fit(3500) == 6144  # within twice the best, 4096
    assert lengths.fit(20_000) == 24_576
