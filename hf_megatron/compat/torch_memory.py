"""Private symbols of torch's storages, fake tensors, allocators and devices."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist


def storage_key(tensor: torch.Tensor) -> int:
    """Returns an id of a tensor's storage, which views share, unique while it exists.

    `_cdata` is private; fake tensors and storages without memory have no `data_ptr` to compare.
    """
    return tensor.untyped_storage()._cdata


def share_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Returns whether two tensors of any shape, possibly empty, share one storage (`_cdata` is private)."""
    return storage_key(first) == storage_key(second)


def fake_mode() -> Any:
    """Creates a fake tensor mode that also accepts real tensors (private)."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def is_fake(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor of any shape is a fake tensor, without memory (private)."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(tensor, FakeTensor)


def take_fakes_for_real() -> None:
    """Patches torch and transformers so that fake tensors take the code path of a training step instead of a trace.

    transformers would treat them as traced (`is_fake_tensor`). A truncated normal distribution is redrawn until all
    values are within its limits, which fake tensors cannot check. `tolist` reads one element and repeats it, as torch
    would create a symbolic value for each (private).
    """
    from torch._subclasses.fake_tensor import FakeTensor
    from transformers.utils import import_utils

    def listed(tensor: Any) -> Any:
        value: Any = tensor.flatten()[0].item() if tensor.numel() else None
        for size in reversed(tensor.shape):
            value = [value] * size
        return value

    FakeTensor.tolist = listed  # type: ignore[assignment]
    import_utils.is_fake_tensor = lambda x: False
    init: Any = torch.nn.init
    drawn = init._no_grad_trunc_normal_
    init._no_grad_trunc_normal_ = lambda tensor, *args, **kwargs: (
        tensor if is_fake(tensor) else drawn(tensor, *args, **kwargs)
    )


def without_fakes() -> Any:
    """Leaves the active fake tensor mode, if any (private)."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def fakes_are_on() -> bool:
    """Returns whether a fake tensor mode is active (private)."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None  # type: ignore[attr-defined]


def wraps_inner_tensors(kind: type) -> bool:
    """Returns whether operations on a tensor class run on inner tensors; fake tensors do not count."""
    from torch._subclasses.fake_tensor import FakeTensor

    return issubclass(kind, torch.Tensor) and kind not in (torch.Tensor, torch.nn.Parameter, FakeTensor)


def join_fake_job(rank: int, world_size: int) -> None:
    """Initializes a fake process group whose collectives return immediately (a test utility of torch)."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)


def allocated_bytes(profiler: Any) -> list[int]:
    """Returns a profiler's allocations in bytes, frees as negative numbers, in order (private)."""
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def is_async_device(device: torch.device) -> bool:
    """Returns whether reading a value blocks the host on a device; with torch's fake group, the CPU simulates one."""
    return device.type != "cpu" or (dist.is_initialized() and dist.get_backend() == "fake")


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copies a tensor of any shape to pinned host memory, in the order of its device's stream.

    CPU tensors are not copied. A fake tensor simulates device memory; its copy is real but uninitialized.
    """
    if is_fake(tensor):
        from torch.utils._python_dispatch import _disable_current_modes

        with _disable_current_modes():
            return torch.empty(tensor.shape, dtype=tensor.dtype)
    if tensor.device.type == "cpu":
        return tensor.detach()
    copied = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return copied.copy_(tensor.detach(), non_blocking=True)


def from_host(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copies a tensor returned by `to_host` back to its device."""
    if fakes_are_on():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
    return tensor.to(device, non_blocking=True)


class LateCopy:
    """Copy of a scalar to the host; only reading it waits, and only for what the device computed before the copy."""

    def __init__(self, tensor: torch.Tensor):
        # Reading a fake copy would not count as a wait for the device.
        self._copied = tensor if is_fake(tensor) else to_host(tensor)
        self._event = None if tensor.device.type == "cpu" or is_fake(tensor) else torch.Event(tensor.device)
        if self._event is not None:
            self._event.record()

    def read(self) -> float:
        """Returns the value."""
        if self._event is not None:
            self._event.synchronize()
        return float(self._copied)


def check_soon(condition: torch.Tensor, error: Callable[[], Exception]) -> None:
    """Raises an error unless a scalar condition holds; on an accelerator, without synchronizing with it.

    There the device itself fails (`_assert_async`, private).
    """
    if is_async_device(condition.device):
        torch._assert_async(condition)
    elif not condition:
        raise error()


def rebuild_tensor() -> Callable[..., torch.Tensor]:
    """Returns the function that rebuilds tensors from `torch.save` storages (private)."""
    return torch._utils._rebuild_tensor_v2


def storage_info(relative_path: str, offset: int, length: int) -> Any:
    """Returns the location of a blob in a distributed checkpoint (`_StorageInfo`, private)."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(relative_path, offset, length)


@contextmanager
def snapshot_on_oom(path: Path) -> Iterator[None]:
    """Writes a snapshot of torch's CUDA allocator on out-of-memory errors inside (private)."""
    memory: Any = torch.cuda.memory

    def write(*args: Any) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        memory._dump_snapshot(str(path))

    memory._record_memory_history(max_entries=100_000)
    cast(Any, torch._C)._cuda_attach_out_of_memory_observer(write)
    try:
        yield
    finally:
        memory._record_memory_history(enabled=None)
