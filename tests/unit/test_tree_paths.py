"""Attention of each segment to its path equals attention with the mask, and so do its gradients."""

import random

import pytest
import torch
from torch import Tensor

from trainer.learner.pack import Row, pack
from trainer.learner.prefix_tree import Sample
from trainer.policy.attention import attend
from trainer.policy.tree_mask import tree_mask
from trainer.policy.tree_paths import KEYS_PER_TOKEN, tree_paths

SIZE = 8


def row_of(*groups: list[list[int]]) -> Row:
    samples = [
        Sample(ids, [True] * len(ids), [0.0] * len(ids), 1.0, 1.0, group, number)
        for group, members in enumerate(groups)
        for number, members_ids in enumerate(members)
        if (ids := [*members_ids, 0])  # the model does not read the last token
    ]
    (row,) = pack(samples, length=4096)
    return row


def random_row(seed: int) -> Row:
    """Nested trees of sequences that go on from each other."""
    chance = random.Random(seed)
    groups = []
    for _ in range(chance.randint(1, 3)):
        members = [[chance.randrange(1, 9) for _ in range(chance.randint(1, 40))]]
        for _ in range(chance.randint(0, 4)):
            parent = chance.choice(members)
            start = parent[: chance.randint(len(parent) // 2, len(parent))]
            members.append(start + [chance.randrange(1, 9) for _ in range(chance.randint(1, 9))])
        groups.append(members)
    return row_of(*groups)


def by_paths(queries: Tensor, keys: Tensor, values: Tensor, ends: list[int], length: int) -> Tensor:
    """Attention [T, E] as FlashAttention computes it: causal, aligned at the end of each path."""
    tree = tree_paths(ends, length)
    segments, total = tree.counts.tolist()
    keys, values = (it[tree.tokens[:total].long()] for it in (keys, values))
    found = []
    for number in range(segments):
        start, stop = tree.segments[number : number + 2].tolist()
        first, last = tree.paths[number : number + 2].tolist()
        own, path = torch.arange(stop - start), torch.arange(last - first)
        visible = path <= own[:, None] + len(path) - len(own)
        parts = queries[start:stop], keys[first:last], values[first:last]
        found.append(attend(*(it[None, None] for it in parts), visible[None])[0, 0])
    return torch.cat(found)


@pytest.mark.parametrize("seed", range(12))
def test_attention_over_paths_equals_masked_attention(seed: int) -> None:
    row = random_row(seed)
    tokens, length = len(row.tokens), 384
    generator = torch.Generator().manual_seed(seed)
    given = [
        torch.randn(length, SIZE, dtype=torch.float64, generator=generator, requires_grad=True)
        for _ in range(3)
    ]
    slope = torch.randn(tokens, SIZE, dtype=torch.float64, generator=generator)
    assert tree_paths(row.ends, length).counts[0]
    found = by_paths(*given, row.ends.tolist(), length)[:tokens]
    exact = attend(*(it[None, None, :tokens] for it in given), row.mask()[None])[0, 0]
    torch.testing.assert_close(found, exact)
    mine = torch.autograd.grad(found, given, slope)
    theirs = torch.autograd.grad(exact, given, slope)
    torch.testing.assert_close(mine, theirs)
    assert not any(it[tokens:].any() for it in mine)


def test_copies_are_those_of_each_token() -> None:
    row = random_row(1)
    tree = tree_paths(row.ends, 384)
    total = int(tree.counts[1])
    assert total > 384
    for token in range(384):
        start, stop = tree.offsets[token : token + 2].tolist()
        expected = (tree.tokens[:total] == token).nonzero()[:, 0]
        assert tree.copies[start:stop].tolist() == expected.tolist()


def test_a_chain_is_one_segment_and_padding_another() -> None:
    row = row_of([[1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4, 5]])
    assert len(row.ancestors) == 3
    tree = tree_paths(row.ends, 8)
    assert tree.counts.tolist() == [2, 8]
    assert tree.segments[:3].tolist() == tree.paths[:3].tolist() == [0, 5, 8]
    assert tree_paths(row.ends, 5).counts.tolist() == [1, 5]


def test_sequences_that_share_nothing_are_the_row_itself() -> None:
    row = row_of([[1, 2, 3]], [[1, 2]], [[1, 2, 3, 4]])
    tree = tree_paths(row.ends, 12)
    assert tree.counts.tolist() == [4, 12]
    assert tree.segments[:5].tolist() == tree.paths[:5].tolist() == [0, 4, 7, 9, 12]
    assert tree.tokens[:12].tolist() == list(range(12))


def test_sizes_depend_on_the_length_only_and_long_lists_of_keys_keep_the_mask() -> None:
    prompt = list(range(1, 100))
    members = [[*prompt, first] for first in range(100, 140)]
    shapes = set()
    for count in (1, 2, 40):
        row = row_of(members[:count])
        tree = tree_mask(row.ends, 256).paths
        shapes.add(tuple(part.shape for part in tree))
        keys = 256 + (count > 1) * count * len(prompt)
        fits = keys <= KEYS_PER_TOKEN * 256
        assert tree.counts.tolist() == ([count + (count > 1) + 1, keys] if fits else [0, 0])
    assert not fits and len(shapes) == 1
