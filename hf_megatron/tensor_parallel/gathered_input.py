"""The gathered input of a block, kept for backward as this rank's shard of the sequence.

All column linears of a block save the tensor that its entry gathered. Here they save the shard it was gathered from,
and the first of them that backward meets gathers it again for all (as Megatron's
`LinearWithGradAccumulationAndAsyncCommunication`). Autograd runs equal graphs in equal order, so every rank gathers at
the same places.
"""

import weakref
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..communication.collectives import all_gather
from ..memory.saved_tensors import Kept, Packed, Remade, Version, saved_as
from ..upstream import at_end_of_backward, in_backward, storage_id


class GatheredInput:
    """One gathered tensor of one forward.

    Args:
        shard (`Tensor`): `[..., held, ...]`, what this rank gave.
        whole (`Tensor`): `[..., size, ...]`, what all ranks got; it is not kept.
        dim (`int`): the dim that is split.
        group (`ProcessGroup`): the ranks.
    """

    def __init__(self, shard: Tensor, whole: Tensor, dim: int, group: dist.ProcessGroup):
        self._shard, self._version = Kept(shard), Version(whole)
        self._dim, self._size, self._group = dim, whole.shape[dim], group
        # While there is a reference to a storage its number is not used again.
        self._storage = StorageWeakRef(whole.untyped_storage())
        self._saved = self._unpacked = 0
        self._again: Tensor | None = None

    def saved_by(self, x: Tensor) -> tuple[Tensor, AbstractContextManager]:
        """Returns what a linear shall read in place of `x`, of any shape, and the context in which it saves the shard.

        Where `x` is something else than this tensor, or was changed since it was gathered, it is saved as it is.
        """
        if storage_id(x) != self._storage.cdata or not self._version.is_current():
            return x, nullcontext()
        return saved_as(x, partial(_save, weakref.ref(self), x.dtype))

    def _keep(self, saved: Tensor, dtype: torch.dtype, is_copy: bool) -> Packed:
        self._saved += 1
        return Remade(saved, None if is_copy else self._version, lambda: self._gather().to(dtype))

    def _gather(self) -> Tensor:
        shard = self._shard.unpack()
        whole = self._again
        if whole is None:
            whole = all_gather(shard, self._dim, self._size, self._group)
            if not in_backward():
                return whole
            self._again, self._unpacked = whole, 0
            # A backward may leave some of the linears out.
            at_end_of_backward(partial(_drop, weakref.ref(self)))
        self._unpacked += 1
        if self._unpacked == self._saved:
            self._again = None
        return whole


# Hooks live as long as what they pack, weights of frozen linears too: by reference they would keep the shard for these.
def _save(reference: "weakref.ref[GatheredInput]", own_dtype: torch.dtype, saved: Tensor, dtype: torch.dtype) -> Packed:
    gathered = reference()
    assert gathered is not None
    # A copy in another type is nobody else's, and cannot be edited.
    return gathered._keep(saved, dtype, is_copy=dtype != own_dtype)


def _drop(reference: "weakref.ref[GatheredInput]") -> None:
    gathered = reference()
    if gathered is not None:
        gathered._again = None
