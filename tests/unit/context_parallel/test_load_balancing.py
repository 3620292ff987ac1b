"""Tests of context-parallel sequence orders and mask blocks: permutations, load balance and dense masks."""

import pytest
import torch

from hf_megatron.context_parallel.load_balancing import SequenceOrder
from hf_megatron.context_parallel.masks import TILE, SequenceMask


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("length", [1, 3, 13, 29, 64])
@pytest.mark.parametrize("documents", [(), (5,), (1, 2, 12, 13, 40)])
def test_every_token_is_on_exactly_one_rank(length, ranks, documents):
    for order in (
        SequenceOrder.contiguous(length, ranks),
        SequenceOrder.zigzag(length, ranks, documents),
        SequenceOrder.zigzag(length, ranks, documents).divided(2),
    ):
        tokens = [order.tokens(rank) for rank in range(order.ranks)]
        assert torch.cat(tokens).sort().values.tolist() == list(range(length))
        assert [len(rank_tokens) for rank_tokens in tokens] == list(order.sizes)
        assert all(rank_tokens.tolist() == sorted(rank_tokens.tolist()) for rank_tokens in tokens)
        width = max(order.sizes)
        padded = torch.cat(
            [torch.nn.functional.pad(rank_tokens, (0, width - len(rank_tokens)), value=-1) for rank_tokens in tokens]
        )
        assert padded[order.natural].tolist() == list(range(length))


def count_pairs(order, mask):
    """Returns the number of query-key pairs on each rank."""
    return [int((mask.high - mask.low)[0, order.tokens(rank)].clamp(min=0).sum()) for rank in range(order.ranks)]


def sample_document_starts(length, seed):
    """Returns start positions of documents with log-normal lengths, median 600, sigma 1.2."""
    generator, borders = torch.Generator().manual_seed(seed), [0]
    while borders[-1] < length:
        size = 600 * float(torch.exp(1.2 * torch.randn((), generator=generator)))
        borders.append(borders[-1] + max(int(size), 1))
    return tuple(borders[1:-1])


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_zigzag_is_balanced(ranks):
    length = 32768
    plain = count_pairs(SequenceOrder.zigzag(length, ranks), SequenceMask.causal(length))
    assert max(plain) / (sum(plain) / ranks) < 1.001
    for seed in range(10):
        borders = sample_document_starts(length, seed)
        begins = torch.zeros(1, length, dtype=torch.bool)
        begins[0, list(borders)] = True
        mask = SequenceMask.causal(length).documents(begins)
        packed = count_pairs(SequenceOrder.zigzag(length, ranks, borders), mask)
        assert max(packed) / (sum(packed) / ranks) < 1.05
        unpacked = count_pairs(SequenceOrder.zigzag(length, ranks), mask)
        assert max(unpacked) / (sum(unpacked) / ranks) > max(packed) / (sum(packed) / ranks)


def test_mask_borders():
    length = 64
    begins = torch.zeros(2, length, dtype=torch.bool)
    begins[0, 20] = begins[1, 45] = True
    causal = SequenceMask.causal(length)
    attention_mask = torch.ones(2, length, dtype=torch.bool)
    attention_mask[0, :9] = False
    assert causal.borders == SequenceMask.full(length).borders == causal.window(7).borders == ()
    assert causal.documents(begins).borders == (20, 45)
    assert causal.documents(begins).window(7).borders == (20, 45)
    assert causal.chunks(16).borders == (16, 32, 48)
    assert set(causal.without(attention_mask).borders) == {*range(1, 10)}


def test_short_documents_are_balanced_over_ranks():
    for ranks in (2, 4, 8):
        order = SequenceOrder.zigzag(1000, ranks, tuple(range(1, 1000, 3)))
        assert max(order.sizes) <= 1.3 * 1000 / ranks and min(order.sizes) >= 0.7 * 1000 / ranks


def make_masks(length):
    """Returns name -> (mask, equivalent dense mask `[batch or 1, length, length]`)."""
    q, k = torch.arange(length).view(1, -1, 1), torch.arange(length).view(1, 1, -1)
    causal, full = SequenceMask.causal(length), SequenceMask.full(length)
    begins = torch.zeros(2, length, dtype=torch.bool)
    begins[0, [length // 3, length // 2]] = True
    begins[1, length // 5] = True
    document_ids = begins.int().cumsum(1)
    same_document = document_ids.unsqueeze(2) == document_ids.unsqueeze(1)
    left_padding = torch.ones(2, length, dtype=torch.bool)
    left_padding[1, : length // 4] = False
    holes = left_padding.clone()
    holes[0, 3::4] = False
    begin = torch.tensor([[0], [length // 4]])
    return {
        "causal": (causal, k <= q),
        "full": (full, torch.ones(1, length, length, dtype=torch.bool)),
        "window": (causal.window(7), (k <= q) & (k > q - 7)),
        "chunks": (causal.chunks(9), (k <= q) & (k // 9 == q // 9)),
        "chunks of padded": (
            causal.chunks(9, begin).without(left_padding),
            (k <= q) & ((k - begin.unsqueeze(2)) // 9 == (q - begin.unsqueeze(2)) // 9) & left_padding.unsqueeze(1),
        ),
        "documents": (causal.documents(begins), (k <= q) & same_document),
        "documents, windows, padding": (
            causal.documents(begins).window(5).without(left_padding),
            (k <= q) & (k > q - 5) & same_document & left_padding.unsqueeze(1),
        ),
        "left padding": (causal.without(left_padding), (k <= q) & left_padding.unsqueeze(1)),
        "right padding": (
            full.without(left_padding.flip(1)),
            left_padding.flip(1).unsqueeze(1).expand(2, length, length),
        ),
        "holes": (causal.without(holes), (k <= q) & holes.unsqueeze(1)),
        "function": (causal.where(lambda i, j: (i + j).unsqueeze(0) % 3 > 0), (k <= q) & ((q + k) % 3 > 0)),
        "nothing": (
            causal.without(torch.zeros(1, length, dtype=torch.bool)),
            torch.zeros(1, length, length, dtype=torch.bool),
        ),
    }


def assemble_blocks(mask, queries, keys):
    """Returns how many blocks allow each pair, `[2, queries, keys]`; overlapping blocks give counts above 1."""
    sizes = [stop - start for start, stop in queries], [stop - start for start, stop in keys]
    counts = torch.zeros(2, sum(sizes[0]), sum(sizes[1]), dtype=torch.int64)
    for block in mask.blocks(queries, keys):
        shape = block.queries[1] - block.queries[0], block.keys[1] - block.keys[0]
        block_counts = torch.ones(1, *shape, dtype=torch.int64)
        if block.causal:
            block_counts = block_counts.tril()
        if block.mask is not None:
            block_counts = block.mask[:, 0].long()
        counts[:, slice(*block.queries), slice(*block.keys)] += block_counts
    return counts


@pytest.mark.parametrize("name", make_masks(16))
@pytest.mark.parametrize(("length", "ranks"), [(29, 1), (29, 2), (61, 4), (1300, 2)])
def test_blocks_match_dense_mask(name, length, ranks):
    mask, dense = make_masks(length)[name]
    order = SequenceOrder.zigzag(length, ranks)
    for rank in range(ranks):
        for other in range(ranks):
            query_tokens, key_tokens = order.tokens(rank), order.tokens(other)
            expected = dense.expand(2, -1, -1)[:, query_tokens][:, :, key_tokens].long()
            assert torch.equal(assemble_blocks(mask, order.parts[rank], order.parts[other]), expected)


def test_only_edge_tiles_have_masks():
    length = 8 * TILE
    order = SequenceOrder.zigzag(length, 2)
    causal_blocks = list(SequenceMask.causal(length).blocks(order.parts[0], order.parts[1]))
    assert causal_blocks and all(block.mask is None for block in causal_blocks)
    windowed = SequenceMask.causal(length).window(2 * TILE + 100)
    blocks = [
        b for rank in range(2) for other in range(2) for b in windowed.blocks(order.parts[rank], order.parts[other])
    ]
    tiles = [block.mask.numel() for block in blocks if block.mask is not None]
    assert tiles and max(tiles) <= TILE * TILE
    assert sum(tiles) < 2.1 * length * TILE
