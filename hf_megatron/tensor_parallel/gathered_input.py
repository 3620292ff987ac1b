"""The gathered input of a block, kept for backward as this rank's shard of the sequence.

All column-parallel linears of a block save the tensor that was gathered at its entry. Here they save the shard it was
gathered from, and the first of them in backward gathers it again for all (as Megatron's
`LinearWithGradAccumulationAndAsyncCommunication`). Autograd runs equal graphs in equal order, so every rank gathers at
the same points.
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
from ..compat.torch_memory import storage_key
from ..core.communication.collectives import all_gather
from ..core.memory.saved_tensor_hooks import Kept, Packed, Remade, Version, saved_as


class GatheredInputs(Shared):
    """Gathered inputs of a model's blocks, along one dim; at most one regathered tensor exists at a time.

    It is freed after the last linear that saved it. A backward for some of the weights may never reach that linear, and
    a split backward reaches each in a separate pass: the tensor then stays until another block gathers.
    """

    def __init__(self, dim: int, group: dist.ProcessGroup):
        self.dim, self.group = dim, group
        self._latest: weakref.ref[GatheredInput] | None = None

    def again(self, gathered: "GatheredInput", shard: Tensor) -> Tensor:
        """Regathers `[..., size, ...]` for a backward, after freeing the tensor that was regathered before."""
        # Free the regathered tensor of another block first: at most one full tensor exists.
        latest = None if self._latest is None else self._latest()
        if latest is not None:
            latest.let_go()
        self._latest = weakref.ref(gathered)
        # [..., local, ...] -> [..., size, ...]
        return all_gather(shard, self.dim, gathered.size, self.group)


class GatheredInput:
    """One gathered tensor of one forward.

    Args:
        inputs (`GatheredInputs`): registry of the model.
        shard (`Tensor`): `[..., local, ...]`, this rank's input of the gather.
        unsharded (`Tensor`): `[..., size, ...]`, the gathered result; it is not kept.
    """

    def __init__(self, inputs: GatheredInputs, shard: Tensor, unsharded: Tensor):
        self.size = unsharded.shape[inputs.dim]
        self._inputs, self._shard, self._version = inputs, Kept(shard), Version(unsharded)
        # A live reference keeps the storage's id from being reused.
        self._storage = StorageWeakRef(unsharded.untyped_storage())
        self._saved = self._unpacked = 0
        self._again: Tensor | None = None

    def saved_by(self, x: Tensor) -> tuple[Tensor, AbstractContextManager]:
        """Returns the tensor to read instead of `x`, of any shape, and the context in which the shard is saved.

        If `x` is another tensor, or was modified since it was gathered, `x` itself is saved.
        """
        # `x` is not a view of the gathered tensor.
        if storage_key(x) != self._storage.cdata or not self._version.is_current():
            return x, nullcontext()
        return saved_as(x, partial(_save, weakref.ref(self), x.dtype))

    def keep(self, saved: Tensor, dtype: torch.dtype, is_copy: bool) -> Packed:
        """Returns the packed form of a saved tensor: a view of the gathered one, or of a copy in another dtype."""
        self._saved += 1
        return Remade(saved, None if is_copy else self._version, lambda: self._gather().to(dtype))

    def let_go(self) -> None:
        """Drops the regathered tensor."""
        self._again, self._unpacked = None, 0

    def _gather(self) -> Tensor:
        # The first linear in backward gathers; the last one that saved the tensor frees it.
        shard = self._shard.unpack()
        if self._again is None:
            self._again = self._inputs.again(self, shard)
        unsharded = self._again
        self._unpacked += 1
        if self._unpacked == self._saved or not in_backward():
            self.let_go()
        return unsharded


# Saved-tensor hooks live as long as any packed tensor, including weights of frozen linears: hold the shard weakly.
def _save(reference: weakref.ref[GatheredInput], own_dtype: torch.dtype, saved: Tensor, dtype: torch.dtype) -> Packed:
    gathered = reference()
    assert gathered is not None
    # A copy in another dtype is private to the linear and cannot be edited.
    return gathered.keep(saved, dtype, is_copy=dtype != own_dtype)
