"""Gathering of preference pairs over dp ranks, for losses that are not means over samples."""

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ...core.communication.collectives import gather_from_ranks
from ...errors import UnsupportedError


class ReplicaBatches:
    """Gathers the samples of all dp ranks, chosen before rejected, and slices this rank's samples from the result.

    Args:
        group (`ProcessGroup`): dp ranks, with equal numbers of pairs.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.ranks, self.rank = group, dist.get_world_size(group), dist.get_rank(group)

    def joined(self, tensor: Tensor) -> Tensor:
        """Gathers `[2 x pairs, ...]` of all ranks to `[2 x ranks x pairs, ...]`; the backward sums gradients."""
        # `[ranks x 2 x pairs]` to `[2, ranks, pairs]`: the chosen samples of all ranks come first, as in TRL's batches.
        rows = gather_from_ranks(tensor, 0, self.ranks * len(tensor), self.group, sum_gradient=True)
        return rows.unflatten(0, (self.ranks, 2, -1)).transpose(0, 1).flatten(0, 2)

    def local_rows(self, rows: Tensor) -> Tensor:
        """Returns this rank's `[2 x pairs, ...]` slice of a gathered tensor."""
        return rows.unflatten(0, (2, self.ranks, -1))[:, self.rank].flatten(0, 1)

    def of(self, model: Any) -> Callable[..., Any]:
        """Returns a function that calls a replicated model on this rank's slice of inputs and gathers `log_probs`."""

        def call(**kwargs: Any) -> Any:
            local_kwargs = {
                name: self.local_rows(value) if isinstance(value, Tensor) else value for name, value in kwargs.items()
            }
            return SimpleNamespace(log_probs=self.joined(model(**local_kwargs).log_probs))

        return call

    def joined_batch(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Gathers a batch of pairs over all ranks, right-padded with zeros to the longest sequence.

        Raises:
            UnsupportedError: on all ranks, for an input that is neither per token nor per pair, or unequal numbers of
                pairs.
        """
        rows, length = inputs["input_ids"].shape
        pairs = rows // 2
        shapes = {name: tuple(value.shape) if isinstance(value, Tensor) else () for name, value in inputs.items()}
        others = {name: list(shape) for name, shape in shapes.items() if shape not in ((2 * pairs, length), (pairs,))}
        # One MAX all-reduce gives the longest sequence, the largest and (negated) smallest pair count, and any odd
        # inputs.
        maxima = torch.tensor([length, pairs, -pairs, len(others)], device=inputs["input_ids"].device)
        dist.all_reduce(maxima, dist.ReduceOp.MAX, group=self.group)
        longest, most, fewest, odd = maxima.tolist()
        if odd or most != -fewest:
            what = f"{most} and {-fewest} pairs" if most != -fewest else f"{others or 'inputs of another rank'}"
            raise UnsupportedError(
                f"{what} in a batch of {self.ranks} data-parallel ranks: a loss over all of them only supports inputs "
                "per token or per pair, with the same number of pairs on each rank, and no images. Use dp_size=1, or "
                "another loss."
            )
        joined = {}
        for name, value in inputs.items():
            if shapes[name] == (pairs,):
                joined[name] = gather_from_ranks(value, 0, self.ranks * pairs, self.group)
            else:
                joined[name] = self.joined(F.pad(value, (0, longest - length)))
        return joined


# Set while a forward is given the samples of all replicas.
ROWS_OF_REPLICAS: ContextVar[ReplicaBatches | None] = ContextVar("rows of all replicas", default=None)
