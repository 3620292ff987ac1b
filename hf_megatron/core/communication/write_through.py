"""Write-through views of sharded tensors: copies of entries that live on several ranks, written back when edited.

`p.grad[:50].zero_()` edits the gradient in a single process. With a sharded gradient, the slice is a copy gathered
from several ranks; to keep the meaning of the line, the copy remembers its source and writes edits back. Like any
`DTensor` operation, it must run on all ranks that share the tensor.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_leaves, tree_map_only

from ...compat.torch_autograd import returns_view, writes_to
from ...compat.torch_distributed import is_collective
from ...compat.torch_dtensor import local_tensor
from ...compat.torch_memory import share_memory
from ...errors import UnsupportedError
from .full_collectives import run_on_full_copies
from .full_tensor import copy_local_shard, gather_full_tensor
from .proxy_tensor import ProxyDTensor, ProxyTensor, reject_shape_edit


class FullCopy:
    """Full copy of a sharded tensor `[...]`, shared by all views of it.

    Args:
        source: the sharded tensor.
        read (`Callable`): gathers the full tensor; collective over the ranks that share the source.
        write (`Callable`): copies an edited full tensor back into the local shards.
    """

    def __init__(
        self,
        source: Tensor,
        read: Callable[[Any], Tensor] = gather_full_tensor,
        write: Callable[[Tensor, Any], None] = copy_local_shard,
    ):
        self.source, self._read, self._write = source, read, write
        local = local_tensor(source) if type(source) is DTensor else source
        self.tensor = torch.empty(source.shape, dtype=source.dtype, device=local.device)

    def refresh(self) -> None:
        """Re-reads the source before each use, as it may have been edited by other means."""
        self.tensor.copy_(self._read(self.source))

    def write(self) -> None:
        """Writes an edited copy back to the source."""
        self._write(self.tensor, self.source)

    def holds(self, values: Any) -> bool:
        """Returns whether all tensors, of any shapes, are views of the copy: `reshape` and `contiguous` may copy."""
        return all(share_memory(value, self.tensor) for value in tree_leaves(values) if isinstance(value, Tensor))

    def views(self, values: Any) -> Any:
        """Wraps views of the copy, of any shapes, in the tensor type of the source."""
        return tree_map_only(Tensor, self._view, values)

    def _view(self, value: Tensor) -> Tensor:
        view: Any
        if isinstance(self.source, DTensor):
            like = _replicated(value, self.source)
            # The full copy is the same on every rank, so its views are replicated.
            view = _WrittenBackDTensor(value, like._spec, requires_grad=False)  # type: ignore[attr-defined]
        else:
            view = Tensor._make_subclass(WrittenBack, value)
        view.full_copy, view.value = self, value
        return view


def _replicated(value: Tensor, like: DTensor) -> DTensor:
    mesh = like.device_mesh
    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)


class WrittenBack(ProxyTensor):
    """Write-through view `[...]` of a tensor that is sharded over several ranks.

    Attributes:
        full_copy (`FullCopy`): the full copy that it is a view of.
        value (`Tensor`): its entries, a view of the copy; only valid after `full_copy.refresh()`.
    """

    full_copy: FullCopy
    value: Tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        reject_shape_edit(func, args[0])
        # A view of a view shares the full copy; no communication.
        if returns_view(func) and isinstance(args[0], WrittenBack):
            values = func(args[0].value, *args[1:], **kwargs)
            if args[0].full_copy.holds(values):
                return args[0].full_copy.views(values)
        if is_collective(func):
            return run_on_full_copies(func, args, kwargs, WrittenBack, _read, _write)
        views = [value for value in tree_leaves((args, kwargs)) if isinstance(value, WrittenBack)]
        # Collective: every rank gathers each source once, whatever the operator does with the views.
        for full in {id(view.full_copy): view.full_copy for view in views}.values():
            full.refresh()
        edited = writes_to(func, args, kwargs)
        if not any(isinstance(tensor, WrittenBack) for tensor in edited):
            args, kwargs = tree_map_only(WrittenBack, WrittenBack.entries, (args, kwargs))
            return func(*args, **kwargs)
        if not all(isinstance(tensor, WrittenBack) for tensor in edited):
            raise UnsupportedError(
                f"{func} writes to a view of a sharded tensor and to other tensors in one call. Edit them in separate "
                "calls."
            )
        # The operator runs on the local copy of each rank; writing back then keeps only the local shard of the edit.
        plain_args, plain_kwargs = tree_map_only(Tensor, _plain, (args, kwargs))
        func(*plain_args, **plain_kwargs)
        WrittenBack.write_all(edited)  # type: ignore[arg-type]
        return edited[0] if func._schema.returns else None

    @staticmethod
    def write_all(views: "list[WrittenBack]") -> None:
        """Writes edited views back one by one: each refreshes its own full copy, which lacks the others' edits."""
        values = [view.value.clone() for view in views] if len(views) > 1 else []
        for view, value in zip(views, values, strict=bool(values)):
            view.full_copy.refresh()
            view.value.copy_(value)
            view.full_copy.write()
        if not values:
            views[0].full_copy.write()

    def entries(self) -> Tensor:
        """Returns the entries `[...]` as an ordinary tensor; edits of it are not written back."""
        return _replicated(self.value, self) if isinstance(self, DTensor) else self.value


class _WrittenBackDTensor(WrittenBack, ProxyDTensor):
    """Write-through view of a `DTensor`."""


def _read(view: WrittenBack) -> Tensor:
    view.full_copy.refresh()
    return view.value.clone()


def _write(value: Tensor, view: WrittenBack) -> None:
    view.copy_(value)


def _plain(tensor: Tensor) -> Tensor:
    if isinstance(tensor, WrittenBack):
        return tensor.value
    return gather_full_tensor(tensor) if isinstance(tensor, DTensor) else tensor
