"""Embeddings split over the vocabulary or the hidden dim; for any size, as the last rank may hold less or nothing."""

import torch.nn.functional as F
from torch import Tensor, nn

from ..core.communication.collectives import bounds, gather_from_ranks, reduce_from_ranks
from ..core.mesh import ParallelMesh
from ..errors import UnsupportedError
from .local_parameters import local_view
from .vocab_range import require_tokens


def _reject_options(embedding: nn.Embedding) -> None:
    if embedding.max_norm is not None or embedding.scale_grad_by_freq:
        raise UnsupportedError(
            "Sharded embeddings do not support max_norm or scale_grad_by_freq. Set max_norm=None and "
            "scale_grad_by_freq=False."
        )


class VocabParallelEmbedding(nn.Embedding):
    """Vocabulary-parallel embedding: ids `[batch, sequence]` -> `[batch, sequence, hidden]`, all-reduced lookups.

    Each rank looks up the ids it owns and contributes zeros for the others (Megatron's `VocabParallelEmbedding`).
    """

    mesh: ParallelMesh

    def forward(self, input: Tensor) -> Tensor:
        _reject_options(self)
        require_tokens(input, self.weight.shape[0], "token id")
        # Ids in [start, stop) are owned by this rank; `weight` is [stop - start, hidden].
        start, stop = bounds(self.weight.shape[0], self.mesh.tp_size, self.mesh.tp_rank)
        # [batch, sequence]: ids that other ranks own.
        off_shard = (input < start) | (input >= stop)
        weight = local_view(self.weight)
        assert weight is not None
        if stop == start:
            # A rank without entries still joins the all-reduce and keeps its weight in the graph.
            rows = weight.new_zeros(*input.shape, weight.shape[1]) + weight.sum()
        else:
            # Local lookup [batch, sequence, hidden], zeroed for the ids of other ranks.
            local_ids = (input - start).masked_fill(off_shard, 0)
            rows = F.embedding(local_ids, weight).masked_fill(off_shard.unsqueeze(-1), 0)
            if self.padding_idx is not None:
                # The padding entry is looked up but gets no gradient, as in nn.Embedding.
                padding = (input == self.padding_idx).unsqueeze(-1)
                rows = rows.detach().where(padding, rows)
        # Exactly one rank owns each id: the sum selects its lookup.
        return reduce_from_ranks(rows, self.mesh.tp_group)


class HiddenParallelEmbedding(nn.Embedding):
    """Hidden-parallel embedding: `[batch, sequence]` -> local columns, gathered to `[batch, sequence, hidden]`."""

    mesh: ParallelMesh

    def forward(self, input: Tensor) -> Tensor:
        _reject_options(self)
        weight = local_view(self.weight)
        assert weight is not None
        # [batch, sequence, hidden / tp] on each rank.
        rows = F.embedding(input, weight, self.padding_idx)
        return gather_from_ranks(rows, -1, self.weight.shape[1], self.mesh.tp_group)
