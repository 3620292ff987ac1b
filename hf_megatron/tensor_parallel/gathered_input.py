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

from ..compat.shared import Shared
from ..compat.torch_autograd import in_backward
from ..compat.torch_memory import storage_id
from ..core.communication.collectives import all_gather
from ..core.memory.saved_tensor_hooks import Kept, Packed, Remade, Version, saved_as


class GatheredInputs(Shared):
    """What the blocks of a model have gathered along one dim; of what is gathered again one tensor exists at a time.

    It is let go after the last linear that saved it. A backward for some of the weights may not come to that one, and a
    backward that is split comes to each in a pass of its own: until then it stays, or until another block gathers.
    """

    def __init__(self, dim: int, group: dist.ProcessGroup):
        self.dim, self.group = dim, group
        self._latest: weakref.ref[GatheredInput] | None = None

    def again(self, gathered: "GatheredInput", shard: Tensor) -> Tensor:
        """Gathers `[..., size, ...]` once more for a backward, in place of what was gathered last."""
        latest = None if self._latest is None else self._latest()
        if latest is not None:
            latest.let_go()
        self._latest = weakref.ref(gathered)
        return all_gather(shard, self.dim, gathered.size, self.group)


class GatheredInput:
    """One gathered tensor of one forward.

    Args:
        inputs (`GatheredInputs`): those of the model.
        shard (`Tensor`): `[..., held, ...]`, what this rank gave.
        whole (`Tensor`): `[..., size, ...]`, what all ranks got; it is not kept.
    """

    def __init__(self, inputs: GatheredInputs, shard: Tensor, unsharded: Tensor):
        self.size = unsharded.shape[inputs.dim]
        self._inputs, self._shard, self._version = inputs, Kept(shard), Version(unsharded)
        # While there is a reference to a storage its number is not used again.
        self._storage = StorageWeakRef(unsharded.untyped_storage())
        self._saved = self._unpacked = 0
        self._again: Tensor | None = None

    def saved_by(self, x: Tensor) -> tuple[Tensor, AbstractContextManager]:
        """Returns what a linear shall read in place of `x`, of any shape, and the context in which it saves the shard.

        Where `x` is something else than this tensor, or was changed since it was gathered, it is saved as it is.
        """
        if storage_id(x) != self._storage.cdata or not self._version.is_current():
            return x, nullcontext()
        return saved_as(x, partial(_save, weakref.ref(self), x.dtype))

    def keep(self, saved: Tensor, dtype: torch.dtype, is_copy: bool) -> Packed:
        """Returns the packed form of what a linear saves: a view of this tensor, or of a copy in another type."""
        self._saved += 1
        return Remade(saved, None if is_copy else self._version, lambda: self._gather().to(dtype))

    def let_go(self) -> None:
        """Forgets what was gathered again."""
        self._again, self._unpacked = None, 0

    def _gather(self) -> Tensor:
        shard = self._shard.unpack()
        if self._again is None:
            self._again = self._inputs.again(self, shard)
        unsharded = self._again
        self._unpacked += 1
        if self._unpacked == self._saved or not in_backward():
            self.let_go()
        return unsharded


# Hooks live as long as what they pack, weights of frozen linears too: by reference they would keep the shard for these.
def _save(reference: weakref.ref[GatheredInput], own_dtype: torch.dtype, saved: Tensor, dtype: torch.dtype) -> Packed:
    gathered = reference()
    assert gathered is not None
    # A copy in another type is nobody else's, and cannot be edited.
    return gathered.keep(saved, dtype, is_copy=dtype != own_dtype)
