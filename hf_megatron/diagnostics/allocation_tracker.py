"""Dispatch mode that tracks a step's allocations, collectives, and host reads of device values.

It works on real tensors and in a fake world (`planner/fake_world.py`), where fake tensors represent device memory and
real ones host memory. It counts storages, so views and in-place operations add nothing. Memory that a kernel
allocates internally is not seen.
"""

import functools
import itertools
import sys
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ..compat.shard_safe import shard_safe
from ..compat.torch_autograd import in_backward
from ..compat.torch_distributed import get_group_description
from ..compat.torch_dtensor import local_tensor
from ..compat.torch_memory import fakes_are_on, is_fake, storage_key, without_fakes, wraps_inner_tensors
from .step_stats import HostRead, StepFigures

_aten = torch.ops.aten
_DEVICE = torch.ops.prim.device.default
# Operations that block the host until the device has computed a value.
_READS = {
    _aten._local_scalar_dense.default,
    _aten.equal.default,
    _aten.nonzero.default,
    _aten.masked_select.default,
    _aten._unique2.default,
}
# Default categories of allocations outside a layer, until a tensor is assigned to a longer-lived category.
MOMENTS = FORWARD, BACKWARD, STEP = "forward", "backward", "optimizer step"
ACTIVATIONS = "activations of layers"


@dataclass
class Block:
    """A storage: size in bytes, category, and for activations the layer, its call in this step, and the cause."""

    size: int
    category: str
    place: tuple[str, int] | None = None
    cause: str = ""


class AllocationTracker(TorchDispatchMode):
    """Counts the allocations, collectives, and host reads inside it; `figures` covers the time since `begin_step()`.

    Args:
        model: activations are counted per layer of this model: per entry of its outermost module lists.
    """

    def __init__(self, model: nn.Module | None = None):
        super().__init__()
        self.figures = StepFigures()
        self._blocks: dict[int, Block] = {}
        self._bytes: Counter[str] = Counter()
        self._total = self._most = 0
        self._names = {} if model is None else {id(module): name for name, module in model.named_modules()}
        self._layers = set() if model is None else set(_outermost_layers(model))
        self._calls: Counter[str] = Counter()
        self._place: tuple[str, int] | None = None
        self._modules: list[str] = []
        self._is_stepping = False
        self._last_read: Any = None
        self._handles: list[Any] = []

    # Accounting

    def begin_step(self, kept: Mapping[str, Sequence[Tensor]]) -> None:
        """Starts new figures; `kept` maps categories to the tensors (any shape) that outlive steps."""
        for category, tensors in kept.items():
            for tensor in tensors:
                self._enter(local_tensor(tensor), category)
        self._calls.clear()
        present = {category: size for category, size in self._bytes.items() if size}
        self.figures = StepFigures(kept=present, peak=self._total, at_peak=present)

    def window(self) -> tuple[int, int]:
        """Returns the bytes in use, and the peak since the last call of this method."""
        most, self._most = self._most, self._total
        return self._total, most

    def _enter(self, tensor: Tensor, category: str) -> None:
        """Counts a tensor's storage, or changes the category of a storage already counted."""
        block = self._blocks.get(storage_key(tensor))
        if block is None:
            self._add(tensor, Block(tensor.untyped_storage().nbytes(), category))
        elif block.category != category:
            self._bytes[block.category] -= block.size
            self._bytes[category] += block.size
            block.category, block.place = category, None

    def _add(self, tensor: Tensor, block: Block) -> None:
        storage, key = tensor.untyped_storage(), storage_key(tensor)
        self._blocks[key] = block
        weakref.finalize(storage, self._drop, key)
        self._grow(block, block.size)

    def _grow(self, block: Block, size: int) -> None:
        self._bytes[block.category] += size
        self._total += size
        self._most = max(self._most, self._total)
        if self._total > self.figures.peak:
            self.figures.peak = self._total
            self.figures.at_peak = {category: size for category, size in self._bytes.items() if size}

    def _drop(self, key: int) -> None:
        block = self._blocks.pop(key)
        self._bytes[block.category] -= block.size
        self._total -= block.size

    def _resized(self, original: Any, storage: Any, size: int) -> Any:
        """Replaces `UntypedStorage.resize_`, through which FSDP2 frees unsharded weights."""
        result = original(storage, size)
        if (block := self._blocks.get(storage._cdata)) is not None:
            before, block.size = block.size, size
            self._grow(block, size - before)
        return result

    # Hooks and dispatch

    def __enter__(self) -> "AllocationTracker":
        original = torch.UntypedStorage.resize_
        resize = functools.partialmethod(lambda storage, size: self._resized(original, storage, size))
        torch.UntypedStorage.resize_ = resize  # type: ignore[assignment]
        self._handles = [
            register_module_forward_pre_hook(self._before),
            register_module_forward_hook(self._after),
            register_optimizer_step_pre_hook(lambda *_: self._step(True)),
            register_optimizer_step_post_hook(lambda *_: self._step(False)),
            _Undo(lambda: setattr(torch.UntypedStorage, "resize_", original)),
        ]
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._last_read = None
        for handle in self._handles:
            handle.remove()

    def _step(self, is_stepping: bool) -> None:
        self._is_stepping = is_stepping

    @property
    def _moment(self) -> str:
        return BACKWARD if in_backward() else STEP if self._is_stepping else FORWARD

    @shard_safe
    def _before(self, module: nn.Module, args: Any) -> None:
        name = self._names.get(id(module))
        if name in self._layers and not in_backward():
            self._place = name, self._calls[name]
            self._calls[name] += 1
            self._modules = []
        elif self._place is not None and name is not None:
            self._modules.append(name.removeprefix(f"{self._place[0]}."))

    @shard_safe
    def _after(self, module: nn.Module, args: Any, output: Any) -> None:
        name = self._names.get(id(module))
        if self._place is not None and name == self._place[0]:
            causes: Counter[str] = Counter()
            for block in self._blocks.values():
                if block.place == self._place:
                    causes[block.cause] += block.size
            # A layer of another stage keeps no activations.
            if causes:
                self.figures.layers[self._place] = dict(causes)
            self._place = None
        elif self._place is not None and self._modules and name is not None:
            self._modules.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is _DEVICE:
            return func(*args, **(kwargs or {}))
        if any(map(wraps_inner_tensors, types)):
            # A wrapper subclass dispatches its inner tensors separately; count those instead.
            return NotImplemented
        kwargs = kwargs or {}
        tensors = [value for value in tree_iter((args, kwargs)) if isinstance(value, Tensor)]
        has_fake = any(map(is_fake, tensors))
        if func.namespace == "c10d":
            self._count_collective(func, args)
        if tensors and not has_fake and fakes_are_on():
            # Real tensors in a fake world are host tensors: run the operation for real.
            with without_fakes():
                return func(*args, **kwargs)
        if func in _READS:
            self._note_read(func, tensors[0])
            if has_fake:
                return _answer(func, tensors[0])
        elif has_fake and func is _aten.copy_.default and not all(map(is_fake, tensors)):
            self._note_read(func, tensors[0])
        else:
            self._last_read = None
        output = func(*args, **kwargs)
        for value in tree_iter(output):
            if isinstance(value, Tensor) and storage_key(value) not in self._blocks and value.device.type != "meta":
                self._count(value, func)
        return output

    def _count(self, tensor: Tensor, func: Any) -> None:
        size = tensor.untyped_storage().nbytes()
        if self._place is None or in_backward():
            self._add(tensor, Block(size, self._moment))
        else:
            module = self._modules[-1] if self._modules else ""
            name = func._schema.name.partition("::")[2]
            self._add(tensor, Block(size, ACTIVATIONS, self._place, f"{module} {name}".strip()))

    def _count_collective(self, func: Any, args: tuple) -> None:
        sizes = (sum(t.nbytes for t in tree_iter(value) if isinstance(t, Tensor)) for value in args)
        key = get_group_description(args), func._schema.name.partition("::")[2].strip("_")
        calls, total = self.figures.collectives.get(key, (0, 0))
        self.figures.collectives[key] = calls + 1, total + max(sizes, default=0)

    def _note_read(self, func: Any, tensor: Tensor) -> None:
        frames = list(itertools.islice(_iter_external_frames(sys._getframe(1)), 6))
        # `tolist()` copies a tensor once and then reads the copy: count one read. Keep the frame itself, since its
        # address may be reused by another frame.
        read = storage_key(tensor), frames[0].f_lasti, frames[0]
        if read == self._last_read and func is _aten._local_scalar_dense.default:
            return
        self._last_read = read
        where = tuple(f"{frame.f_globals['__name__']}:{frame.f_lineno} {frame.f_code.co_name}" for frame in frames)
        self.figures.reads.append(HostRead(func._schema.name.partition("::")[2], self._moment, where))


def _iter_external_frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yields the frames outside torch and this file, innermost first."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if not name.startswith(("torch.", "contextlib")) and name != "torch" and frame.f_globals is not globals():
            yield frame
        frame = frame.f_back


class _Undo:
    """A handle whose removal calls a function."""

    def __init__(self, remove: Any):
        self.remove = remove


def _answer(func: Any, tensor: Tensor) -> Any:
    """Returns a placeholder for a value that a fake tensor lacks: true, one, or all entries."""
    if func is _aten._local_scalar_dense.default:
        return True if tensor.dtype is torch.bool else 1.0 if tensor.is_floating_point() else 1
    if func is _aten.equal.default:
        return True
    if func is _aten.nonzero.default:
        return tensor.new_zeros((tensor.numel(), tensor.dim()), dtype=torch.int64)
    raise NotImplementedError(f"{func}: its output size depends on values, which fake tensors do not have.")


def _outermost_layers(model: nn.Module) -> Iterator[str]:
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    outermost = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    for name in outermost:
        yield from (f"{name}.{child}" for child, _ in model.get_submodule(name).named_children())
