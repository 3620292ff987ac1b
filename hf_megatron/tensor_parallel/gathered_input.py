"""The gathered input of a block, kept for backward as this rank's shard of the sequence.

All column-parallel linears of a block save the tensor that was gathered at its entry. Here they save the shard it was
gathered from, and the first of them in backward gathers it again for all (as Megatron's
`LinearWithGradAccumulationAndAsyncCommunication`). Autograd runs equal graphs in equal order, so every rank gathers at
the same points.
"""

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..compat.shared import Shared
from ..compat.torch_autograd import in_backward
from ..compat.torch_memory import storage_key
from ..core.communication.collectives import all_gather
from ..core.memory.saved_tensor_hooks import Kept, Packed, Remade, SavedInputs, Version


class GatheredInputs(Shared):
    """Gathered inputs of a model's blocks, along one dim; at most one regathered tensor exists at a time.

    It is freed after the last linear that saved it. A backward for some of the weights may never reach that linear, and
    a split backward reaches each in a separate pass: the tensor then stays until another block gathers.
    """

    def __init__(self, dim: int, group: dist.ProcessGroup):
        self.dim, self.group, self.saved = dim, group, SavedInputs()
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
        unsharded (`Tensor`): `[..., size, ...]`, the gathered result; the caller keeps it until the last `run`.
    """

    def __init__(self, inputs: GatheredInputs, shard: Tensor, unsharded: Tensor):
        self.size = unsharded.shape[inputs.dim]
        self._inputs, self._shard, self._version = inputs, Kept(shard), Version(unsharded)
        self._storage, self._dtype = storage_key(unsharded), unsharded.dtype
        self._saved = self._unpacked = 0
        self._again: Tensor | None = None

    def run(self, matmul: Callable[..., Tensor], x: Tensor, *args: Any) -> Tensor:
        """Returns `matmul(x, *args)`, of any shape, and saves the shard instead of `x`.

        If `x` is another tensor, or was modified since it was gathered, `x` itself is saved.
        """
        # A layer may be compiled by itself. `x` may not be a view of the gathered tensor.
        if (
            torch.compiler.is_dynamo_compiling()
            or storage_key(x) != self._storage
            or not self._version.is_current()
            or not torch.is_grad_enabled()
        ):
            return matmul(x, *args)
        return self._inputs.saved.run(matmul, x, self._storage, args, self._keep)

    def _keep(self, dtype: torch.dtype, saved: Tensor) -> Packed:
        """Returns the packed form of a saved tensor: a view of the gathered one, or of a copy in another dtype."""
        self._saved += 1
        if dtype == self._dtype:
            return Remade(self._version, self._gather, saved)
        # A copy in another dtype is private to the linear and cannot be edited.
        return Remade(None, partial(self._gather, dtype), saved)

    def let_go(self) -> None:
        """Drops the regathered tensor."""
        self._again, self._unpacked = None, 0

    def _gather(self, dtype: torch.dtype | None = None) -> Tensor:
        # The first linear in backward gathers; the last one that saved the tensor frees it.
        unsharded = self._again
        if unsharded is None:
            unsharded = self._again = self._inputs.again(self, self._shard.unpack())
        self._unpacked += 1
        if self._unpacked == self._saved or not in_backward():
            self.let_go()
        return unsharded if dtype is None else unsharded.to(dtype)
