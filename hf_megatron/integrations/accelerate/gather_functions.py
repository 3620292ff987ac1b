"""`accelerate.utils.gather` and `gather_object`, which loops import by name, with `Accelerator.gather`'s semantics.

This module is imported while `accelerate.utils` itself is, so it must not import Accelerate at the top.
"""

from collections.abc import Callable
from typing import Any


def gather_by_name(original: Callable, tensor: Any) -> Any:
    """Gathers tensors `(batch, ...)` or `()` over the data-parallel ranks, to `(global batch, ...)`."""
    from .batch_shards import batches_are_ours, get_batch_group

    if not batches_are_ours():
        return original(tensor)
    from accelerate.utils.operations import recursively_apply

    from .gathering import joined_over

    if (group := get_batch_group()) is not None:
        return joined_over(group, tensor)
    return recursively_apply(lambda own: own[None] if own.ndim == 0 else own, tensor, error_on_other_type=True)


def gather_object_by_name(original: Callable, object: Any) -> list[Any]:
    """Concatenates lists of objects over the data-parallel ranks."""
    import torch.distributed as dist

    from .batch_shards import batches_are_ours, get_batch_group

    if not batches_are_ours():
        objects: list[Any] = original(object)
        return objects
    if (group := get_batch_group()) is None:
        return list(object)
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, object, group=group)
    return [item for part in parts for item in part]
