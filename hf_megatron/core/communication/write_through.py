"""Views of tensors whose entries lie on several ranks: copies whose edits go back to where they come from.

`p.grad[:50].zero_()` edits the gradient in one process. On ranks those rows are copied from where they lie; a copy that
knows its origin keeps the meaning of the line. All ranks that share the tensor have to run it, as with any `DTensor`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_leaves, tree_map_only

from ...compat.torch_autograd import returns_view, writes_to
from ...compat.torch_dtensor import local_tensor
from ...errors import UnsupportedError
from .full_tensor import copy_local_shard, full_tensor_of
from .proxy_tensor import ProxyDTensor, ProxyTensor


class Whole:
    """A copy of a tensor `[...]` in full, which views share.

    Args:
        source: where the entries lie.
        read (`Callable`): puts them together; every rank that shares the source calls it.
        write (`Callable`): gives the ranks their parts of an edited copy.
    """

    def __init__(
        self,
        source: Tensor,
        read: Callable[[Any], Tensor] = full_tensor_of,
        write: Callable[[Tensor, Any], None] = copy_local_shard,
    ):
        self.source, self._read, self._write = source, read, write
        local = local_tensor(source) if type(source) is DTensor else source
        self.tensor = torch.empty(source.shape, dtype=source.dtype, device=local.device)

    def refresh(self) -> None:
        """Reads the source, which may have been edited by any other way, before each use."""
        self.tensor.copy_(self._read(self.source))

    def write(self) -> None:
        """Hands an edited copy back."""
        self._write(self.tensor, self.source)

    def views(self, values: Any) -> Any:
        """Wraps views of the copy, of any shapes, as what the source is."""
        return tree_map_only(Tensor, self._view, values)

    def _view(self, value: Tensor) -> Tensor:
        view: Any
        if isinstance(self.source, DTensor):
            like = _replicated(value, self.source)
            view = _WrittenBackDTensor(value, like._spec, requires_grad=False)  # type: ignore[attr-defined]
        else:
            view = Tensor._make_subclass(WrittenBack, value)
        view.unsharded, view.value = self, value
        return view


def _replicated(value: Tensor, like: DTensor) -> DTensor:
    mesh = like.device_mesh
    return DTensor.from_local(value, mesh, [Replicate()] * mesh.ndim, run_check=False)


class WrittenBack(ProxyTensor):
    """A view `[...]` of a tensor that lies on several ranks.

    Attributes:
        whole (`Whole`): what it is a view of.
        value (`Tensor`): its entries, a view of the copy; read before each use only.
    """

    unsharded: Whole
    value: Tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if returns_view(func) and isinstance(args[0], WrittenBack):
            return args[0].unsharded.views(func(args[0].value, *args[1:], **kwargs))
        views = [value for value in tree_leaves((args, kwargs)) if isinstance(value, WrittenBack)]
        for unsharded in {id(view.unsharded): view.unsharded for view in views}.values():
            unsharded.refresh()
        edited = writes_to(func, args, kwargs)
        if not any(isinstance(tensor, WrittenBack) for tensor in edited):
            args, kwargs = tree_map_only(WrittenBack, WrittenBack.entries, (args, kwargs))
            return func(*args, **kwargs)
        if not all(isinstance(tensor, WrittenBack) for tensor in edited):
            raise UnsupportedError(
                f"{func} would edit rows of a split tensor and other tensors at once: edit them one by one."
            )
        plain_args, plain_kwargs = tree_map_only(Tensor, _plain, (args, kwargs))
        func(*plain_args, **plain_kwargs)
        WrittenBack.write_all(edited)  # type: ignore[arg-type]
        return edited[0] if func._schema.returns else None

    @staticmethod
    def write_all(views: "list[WrittenBack]") -> None:
        """Hands edited views back, one after another: copies of one source know nothing of each other."""
        values = [view.value.clone() for view in views] if len(views) > 1 else []
        for view, value in zip(views, values, strict=bool(values)):
            view.unsharded.refresh()
            view.value.copy_(value)
            view.unsharded.write()
        if not values:
            views[0].unsharded.write()

    def entries(self) -> Tensor:
        """Returns the entries `[...]` as a tensor of the ordinary kind, which leads nowhere."""
        return _replicated(self.value, self) if isinstance(self, DTensor) else self.value


class _WrittenBackDTensor(WrittenBack, ProxyDTensor):
    """A view of a `DTensor`."""


def _plain(tensor: Tensor) -> Tensor:
    if isinstance(tensor, WrittenBack):
        return tensor.value
    return full_tensor_of(tensor) if isinstance(tensor, DTensor) else tensor
