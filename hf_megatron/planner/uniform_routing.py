"""Uniform expert routing: tokens choose experts evenly, so that dispatch sizes are known without router outputs.

Same purpose as Megatron's `--moe-router-force-load-balancing`. The routing weights are still the router's.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..compat.torch_memory import is_fake
from ..expert_parallel.token_dispatcher import AllToAll


@contextmanager
def balanced_experts() -> Iterator[None]:
    """Routes all tokens dispatched inside evenly to experts, with the same choices on every rank."""
    dispatch, exchange_sizes = AllToAll.dispatch, AllToAll.exchange_sizes

    def dispatch_evenly(self: AllToAll, hidden: Tensor, chosen: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not is_fake(chosen):
            even = even_choices(*chosen.shape, self.experts * self.ranks)
            chosen = torch.from_numpy(even).to(chosen.device)
        return dispatch(self, hidden, chosen, *args, **kwargs)

    def answer(self: AllToAll, sizes: Tensor, chosen: Tensor) -> list[list[int]]:
        read = exchange_sizes(self, sizes, chosen)
        return even_sizes(*chosen.shape, self.experts, self.ranks, self.rank) if is_fake(chosen) else read

    AllToAll.dispatch, AllToAll.exchange_sizes = dispatch_evenly, answer  # type: ignore[method-assign]
    try:
        yield
    finally:
        AllToAll.dispatch, AllToAll.exchange_sizes = dispatch, exchange_sizes  # type: ignore[method-assign]


@functools.lru_cache(maxsize=64)
def even_choices(tokens: int, choices: int, experts: int) -> np.ndarray:
    """Returns expert indices `[tokens, choices]`, distinct for each token and evenly distributed.

    Tokens take experts in order from shuffled permutations of all experts. If `choices` divides the number of experts,
    each permutation is new; otherwise one is repeated, so that a token that spans two of them gets no expert twice.
    """
    rounds = -(-tokens * choices // experts)
    decks = np.random.default_rng(0).permuted(np.tile(np.arange(experts), (rounds, 1)), axis=1)
    if experts % choices:
        decks[1:] = decks[0]
    return decks.ravel()[: tokens * choices].reshape(tokens, choices)


@functools.lru_cache(maxsize=64)
def even_sizes(tokens: int, choices: int, experts: int, ranks: int, rank: int) -> list[list[int]]:
    """Returns what `AllToAll.exchange_sizes` returns on a rank if every rank has `tokens` tokens.

    Args:
        experts (`int`): of each rank.
    """
    rank_of = even_choices(tokens, choices, experts * ranks) // experts
    sizes = [(int((rank_of == other).any(1).sum()), int((rank_of == other).sum())) for other in range(ranks)]
    return [[*there, *sizes[rank]] for there in sizes]
