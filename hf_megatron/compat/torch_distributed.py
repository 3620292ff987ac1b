"""Private and version-dependent symbols of torch.distributed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    ReduceScatterOptions,
    Work,
)
from torch.utils._pytree import tree_leaves


def get_group_description(args: tuple) -> str:
    """Returns the description of the process group passed to a `c10d` operator (private)."""
    for value in args:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in value._type().qualified_name():
            return dist.ProcessGroup.unbox(value).group_desc
    return ""


def get_rank_and_size(group: Any) -> tuple[int, int]:
    """Returns this process's rank in a process group that it belongs to, and the number of ranks."""
    # The group's own methods: torch's functions compare the group with the default one in several Python calls.
    if torch.compiler.is_dynamo_compiling():
        return dist.get_rank(group), dist.get_world_size(group)
    return group.rank(), group.size()


def uses_gloo(group: Any) -> bool:
    """Returns whether a process group communicates over gloo."""
    return (dist.get_backend(group) if torch.compiler.is_dynamo_compiling() else group.name()) == "gloo"


def gathers_into_parts(group: Any) -> bool:
    """Returns whether an all-gather may write into strided parts of its result: over gloo, outside of the compiler."""
    return not torch.compiler.is_dynamo_compiling() and group.name() == "gloo"


# The collectives below call the methods of the process group. torch's functions for them cost up to 15 Python calls for
# lookups of the group and for logging. Their options are not exported by `torch.distributed`.


def _waiting(options: Any) -> Any:
    """Returns options of collectives that the caller waits for."""
    options.asyncOp = False
    return options


# Created once; groups only read them.
_ALL_REDUCE, _ALL_GATHER = _waiting(AllreduceOptions()), _waiting(AllgatherOptions())
_REDUCE_SCATTER, _ALL_TO_ALL = _waiting(ReduceScatterOptions()), _waiting(AllToAllOptions())


def all_reduce_(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    """All-reduces a tensor of any shape in place; functionally under the compiler.

    torch 2.11 removes the in-place call when it compiles the backward of an autograd function.
    """
    if torch.compiler.is_dynamo_compiling():
        return functional.wait_tensor(functional.all_reduce(tensor, "sum", group))
    work = group.allreduce([torch.view_as_real(tensor) if tensor.is_complex() else tensor], _ALL_REDUCE)
    if work is not None:
        work.wait()
    return tensor


def all_gather_flat(shard: torch.Tensor, group: Any, shape: tuple[int, ...] | None = None) -> torch.Tensor:
    """All-gathers `[n, ...]` into `[ranks * n, ...]`, or into a given shape of as many entries.

    The method of a group is `_allgather_base` until torch 2.12 and `all_gather_single` from 2.13.
    """
    if torch.compiler.is_dynamo_compiling():
        parts = functional.wait_tensor(functional.all_gather_tensor(shard, 0, group))
        return parts if shape is None else parts.view(shape)
    first, *others = shard.shape
    stacked = (group.size() * first, *others)
    output = shard.new_empty(shape or stacked)
    # gloo takes the ranks' parts along the first dim.
    parts = output if shape is None else output.view(stacked)
    if shard.is_complex():
        parts, shard = torch.view_as_real(parts), torch.view_as_real(shard)
    work = (getattr(group, "all_gather_single", None) or group._allgather_base)(parts, shard, _ALL_GATHER)
    if work is not None:
        work.wait()
    return output


def all_gather_into_parts(shard: torch.Tensor, dim: int, group: Any) -> torch.Tensor:
    """All-gathers `[..., held, ...]` into `[..., ranks * held, ...]`, where `gathers_into_parts`."""
    ranks, shape = group.size(), list(shard.shape)
    shape[dim] *= ranks
    output = shard.new_empty(shape)
    parts = list(output.chunk(ranks, dim))
    if shard.is_complex():
        parts, shard = [torch.view_as_real(part) for part in parts], torch.view_as_real(shard)
    group.allgather([parts], [shard]).wait()
    return output


def reduce_scatter_flat(parts: torch.Tensor, group: Any) -> torch.Tensor:
    """Reduce-scatters `[ranks * n, ...]` into `[n, ...]`.

    The method of a group is `_reduce_scatter_base` until torch 2.12 and `reduce_scatter_single` from 2.13.
    """
    if torch.compiler.is_dynamo_compiling():
        return functional.wait_tensor(functional.reduce_scatter_tensor(parts, "sum", 0, group))
    first, *others = parts.shape
    result = output = parts.new_empty((first // group.size(), *others))
    if parts.is_complex():
        output, parts = torch.view_as_real(output), torch.view_as_real(parts)
    work = (getattr(group, "reduce_scatter_single", None) or group._reduce_scatter_base)(output, parts, _REDUCE_SCATTER)
    if work is not None:
        work.wait()
    return result


def all_to_all_flat(parts: torch.Tensor, group: Any) -> torch.Tensor:
    """All-to-all of `[ranks * n, ...]`: sends the i-th chunk `[n, ...]` to rank i, and returns the received chunks.

    The method of a group is `alltoall_base` until torch 2.12 and `all_to_all_single` from 2.13.
    """
    if torch.compiler.is_dynamo_compiling():
        return functional.wait_tensor(functional.all_to_all_single(parts, None, None, group))
    result = received = torch.empty_like(parts)
    if parts.is_complex():
        received, parts = torch.view_as_real(received), torch.view_as_real(parts)
    work = (getattr(group, "all_to_all_single", None) or group.alltoall_base)(received, parts, [], [], _ALL_TO_ALL)
    if work is not None:
        work.wait()
    return result


def reduce_scatter_started(output: torch.Tensor, parts: torch.Tensor, group: Any) -> Any:
    """Starts a reduce-scatter of `[ranks * n]` into `output` `[n]`; returns its work."""
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return scatter(output, parts, group=group, async_op=True)


def all_gather_started(output: torch.Tensor, shard: torch.Tensor, group: Any) -> Any:
    """Starts an all-gather of `[n]` into `output` `[ranks * n]`; returns its work."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return gather(output, shard, group=group, async_op=True)


def default_store(prefix: str) -> dist.Store:
    """Returns a separate client of the job's store (`_get_default_store`, private).

    The store's default client is locked while the creation of a process group blocks on it.
    """
    from torch.distributed.distributed_c10d import _get_default_store

    store: Any = _get_default_store()
    return dist.PrefixStore(prefix, store.clone())


def set_group_timeouts(seconds: float) -> None:
    """Sets the timeout of this rank's process groups (`_set_pg_timeout`, private; public from torch 2.15)."""
    from torch.distributed import distributed_c10d
    from torch.distributed.distributed_c10d import _world

    set_timeout = getattr(distributed_c10d, "set_timeout", None) or distributed_c10d._set_pg_timeout
    for group in list(_world.pg_map):
        if dist.get_rank(group) >= 0:
            set_timeout(timedelta(seconds=seconds), group)


def group_description(group: Any) -> str | None:
    """Returns the description of a process group, or its name; `None` for other values."""
    return group.group_desc or group.group_name if isinstance(group, dist.ProcessGroup) else None


def dcp_version() -> str:
    """Returns the version that torch's distributed checkpoints record in their metadata (not exported)."""
    from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION

    return CURRENT_DCP_VERSION


# Process group methods that communicate; the available ones depend on the torch version.
_SENDING = (
    "allreduce",
    "allreduce_coalesced",
    "allgather",
    "allgather_coalesced",
    "allgather_into_tensor_coalesced",
    "_allgather_base",
    "all_gather_single",
    "all_gather_single_coalesced",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor_coalesced",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
    "broadcast",
    "gather",
    "scatter",
    "barrier",
    "send",
    "recv",
)


class _Through:
    """Removable wrapper of a class's method; stacked wrappers may be removed in any order."""

    def __init__(self, owner: Any, name: str, below: Any):
        # `below` comes from `vars`: `getattr` on the class unwraps the descriptor, and setting its result back would
        # not bind to instances.
        self.owner, self.name, self.below = owner, name, below
        self.is_active = True

    def install(self, function: Callable[..., Any]) -> None:
        """Replaces the current method by a call of `function`."""
        original = getattr(self.owner, self.name)

        def wrapper(own: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.is_active:
                return original(own, *args, **kwargs)
            return function(lambda: original(own, *args, **kwargs), own, self.name, args)

        vars(wrapper)[_THROUGH] = self
        setattr(self.owner, self.name, wrapper)

    def remove(self) -> None:
        """Removes the wrapper, and those below it that are inactive."""
        self.is_active = False
        current = vars(self.owner)[self.name]
        while (through := getattr(current, _THROUGH, None)) is not None and not through.is_active:
            current = through.below
        setattr(self.owner, self.name, current)


_THROUGH = "_hf_megatron_through"


@contextmanager
def communication_through(
    call: Callable[[Callable[[], Any], Any, str, tuple], Any], wait: Callable[[Callable[[], Any], Any], Any]
) -> Iterator[None]:
    """Routes process group calls and waits on their works through functions, which run the original themselves.

    Several contexts may be active, and end in any order.

    Args:
        call: takes the original call, the group, the method's name and its arguments.
        wait: takes the original wait and the work.

    torch's own functions call these methods, which are class attributes (private).
    """
    group, work = dist.ProcessGroup, dist.Work
    throughs = [_Through(group, name, vars(group)[name]) for name in _SENDING if name in vars(group)]
    waiting = _Through(work, "wait", vars(work)["wait"])
    for through in throughs:
        through.install(call)
    waiting.install(lambda own_wait, own, name, args: wait(own_wait, own))
    try:
        yield
    finally:
        for through in (*throughs, waiting):
            through.remove()


def flight_record() -> str | None:
    """Returns torch's flight record as JSON; `None` if nothing was recorded (private).

    gloo's collectives are recorded from torch 2.13.
    """
    from torch._C import _distributed_c10d

    dump_name = "_dump_nccl_trace_json" if "nccl" in str(dist.get_backend()) else "_dump_fr_trace_json"
    dump: Any = getattr(_distributed_c10d, dump_name, None)
    if dump is None:
        return None
    text = dump().decode()
    return text if '"entries":[{' in text.replace(" ", "") else None


def group_members() -> dict[str, list[int]]:
    """Returns the ranks of each process group of this rank, by group name (private)."""
    from torch.distributed.distributed_c10d import _world

    members = ((group, ranks) for group, ranks in _world.pg_group_ranks.items() if group in _world.pg_names)
    return {_world.pg_names[group]: sorted(ranks) for group, ranks in members}


def is_collective(func: Any) -> bool:
    """Returns whether an operator is a collective of torch.distributed on tensors."""
    return func.namespace == "c10d"


def list_collectives() -> list[Any]:
    """Returns the operators of torch.distributed on tensors (private)."""
    names = {schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("c10d::")}
    return [getattr(torch.ops.c10d, name.removeprefix("c10d::")).default for name in sorted(names)]


def collective_outputs(func: Any, args: tuple) -> list[torch.Tensor]:
    """Returns the tensors that a collective writes to; its schema does not declare them (private)."""
    # In-place operators have a trailing underscore, and their first argument is the output in every one of them.
    return (
        [leaf for leaf in tree_leaves(args[:1]) if isinstance(leaf, torch.Tensor)]
        if func._schema.name[-1] == "_"
        else []
    )


def wait_for_collective(result: Any) -> None:
    """Waits for the work that a collective's operator returned, alone or after its outputs (private)."""
    work = result[-1] if isinstance(result, (list, tuple)) else result
    if work is not None:
        Work.unbox(work).wait()
