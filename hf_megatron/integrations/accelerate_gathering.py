"""`Accelerator.gather`, `gather_for_metrics` and `reduce`: over the ranks that see different batches."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from .accelerate import is_ours

if TYPE_CHECKING:
    import torch


def _data_parallel_size(accelerator: Any) -> int:
    return accelerator.parallelism_config.dp_shard_size


def _data_parallel_group(accelerator: Any) -> Any:
    """The ranks that see different batches and hold the same part of the model as this one, in dp order."""
    return accelerator.torch_device_mesh["dp_shard"].get_group()


def gather(original: Callable, self: Any, tensor: Any) -> Any:
    if not is_ours(self):
        return original(self, tensor)
    if _data_parallel_size(self) == 1:
        # Every rank holds the same batch: what each has is the whole already.
        return tensor
    from accelerate.utils.operations import recursively_apply

    group = _data_parallel_group(self)
    return recursively_apply(functools.partial(_gather_one, group=group), tensor, error_on_other_type=True)


def _gather_one(tensor: "torch.Tensor", group: Any) -> "torch.Tensor":
    import torch
    import torch.distributed as dist

    tensor = (tensor[None] if tensor.ndim == 0 else tensor).contiguous()
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor, group=group)
    return torch.cat(parts)


def gather_for_metrics(original: Callable, self: Any, input_data: Any, use_gather_object: bool = False) -> Any:
    if not is_ours(self) or not (use_gather_object or _holds_other_than_tensors(input_data)):
        # Tensors go through `gather` above; stock then drops what fills up the last batch.
        return original(self, input_data, use_gather_object)
    import torch.distributed as dist

    if _data_parallel_size(self) > 1:
        parts: list[Any] = [None] * _data_parallel_size(self)
        dist.all_gather_object(parts, input_data, group=_data_parallel_group(self))
        input_data = [item for part in parts for item in part]
    state = self.gradient_state
    return input_data[: state.remainder] if state.end_of_dataloader and state.remainder > 0 else input_data


def _holds_other_than_tensors(data: Any) -> bool:
    from accelerate.utils.operations import recursively_apply

    try:
        recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        return True
    return False


def reduce(original: Callable, self: Any, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
    if not is_ours(self):
        return original(self, tensor, reduction, scale)
    from accelerate.utils.operations import recursively_apply

    # Over all ranks a sum would count each batch once for every rank that works on it.
    group = _data_parallel_group(self) if _data_parallel_size(self) > 1 else None
    return recursively_apply(
        functools.partial(_reduce_one, reduction=reduction, group=group), tensor, error_on_other_type=True
    )


def _reduce_one(tensor: "torch.Tensor", reduction: str, group: Any) -> "torch.Tensor":
    import torch.distributed as dist

    tensor = tensor.clone()
    if group is not None:
        # As in stock, "none" adds up too; only "mean" divides.
        dist.all_reduce(tensor, dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM, group=group)
        if reduction == "mean":
            tensor /= dist.get_world_size(group)
    return tensor
