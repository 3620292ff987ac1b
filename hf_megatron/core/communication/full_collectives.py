"""Collectives of torch.distributed that a script runs on sharded tensors: they run on full copies of these.

A loop that averages by hand, `dist.all_reduce(p.grad); p.grad /= world`, expects its rank to have the full gradient. As
any `DTensor` operation, such a line must run on all ranks that share the tensor.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ...compat.torch_distributed import collective_outputs, wait_for_collective
from ...errors import UnsupportedError

# Collectives after which the ranks of the group have the same output.
_EQUAL_OUTPUTS = ("all_reduce", "allreduce", "broadcast", "allgather", "_allgather")


@torch.no_grad()
def run_on_full_copies(
    func: Any,
    args: tuple,
    kwargs: dict[str, Any],
    kind: type[Tensor],
    read: Callable[[Any], Tensor],
    write: Callable[[Tensor, Any], None],
) -> Any:
    """Runs a collective on full copies of the tensors of type `kind`, and returns its result after it has finished.

    Args:
        func: an operator of torch.distributed.
        kind (`type`): the type of the sharded tensors among the arguments.
        read (`Callable`): gathers a full copy `[...]`; collective over the ranks that share the tensor.
        write (`Callable`): writes a full tensor back to a sharded one.

    Raises:
        UnsupportedError: the collective would write different values on each rank to a sharded tensor.
    """
    written = [tensor for tensor in collective_outputs(func, args) if isinstance(tensor, kind)]
    name = func._schema.name.removeprefix("c10d::")
    if written and not name.startswith(_EQUAL_OUTPUTS):
        raise UnsupportedError(
            f"The collective {name.rstrip('_')} would write different values on each rank to a sharded tensor of shape "
            f"{tuple(written[0].shape)}. Run it on a copy, `value = tensor.clone()`, and copy a value that is equal on "
            "all ranks back with `tensor.copy_(value)`."
        )
    sharded = {id(leaf): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, kind)}
    full = {key: read(tensor) for key, tensor in sharded.items()}
    args, kwargs = tree_map_only(kind, lambda tensor: full[id(tensor)], (args, kwargs))
    result = func(*args, **kwargs)
    # Also with `async_op=True`: the shards have to be written before anything reads them.
    wait_for_collective(result)
    for tensor in written:
        write(full[id(tensor)], tensor)
    return result
