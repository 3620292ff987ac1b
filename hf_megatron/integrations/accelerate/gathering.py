"""`Accelerator.gather`, `gather_for_metrics` and `reduce` over the data-parallel ranks; triggers over all ranks."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from .batch_shards import cut_rows, last_batch_size, last_ranks
from .plugin import is_ours


def _data_parallel_size(accelerator: Any) -> int:
    return accelerator.parallelism_config.dp_shard_size


def _data_parallel_group(accelerator: Any) -> Any:
    """Returns the group of data-parallel ranks that hold the same shards of the model, in dp order."""
    return accelerator.torch_device_mesh["dp_shard"].get_group()


def gather(original: Callable, self: Any, tensor: Any) -> Any:
    """Gathers tensors `(batch, ...)` or `()` over the data-parallel ranks, to `(global batch, ...)`."""
    if not is_ours(self):
        return original(self, tensor)
    if _data_parallel_size(self) == 1:
        # All ranks hold the same batch, which is the global batch already.
        return tensor
    return joined_over(_data_parallel_group(self), tensor)


def joined_over(group: Any, tensor: Any) -> Any:
    """Gathers tensors `(batch, ...)` or `()` over the ranks of a group, to `(ranks x batch, ...)`."""
    from accelerate.utils.operations import recursively_apply

    def joined(tensor: torch.Tensor) -> torch.Tensor:
        # all_gather needs equal shapes and contiguous memory; scalars become `[1]` so that they can be concatenated.
        tensor = (tensor[None] if tensor.ndim == 0 else tensor).contiguous()
        parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, tensor, group=group)
        return torch.cat(parts)

    return recursively_apply(joined, tensor, error_on_other_type=True)


def split_between_processes(original: Callable, self: Any, inputs: Any, apply_padding: bool = False) -> Any:
    """Splits inputs over the data-parallel replicas: all ranks of a replica get the same inputs."""
    if not is_ours(self):
        return original(self, inputs, apply_padding)
    from accelerate import PartialState

    size = _data_parallel_size(self)
    index = dist.get_rank(_data_parallel_group(self)) if size > 1 else 0
    replica = SimpleNamespace(num_processes=size, process_index=index, device=self.device)
    return PartialState.split_between_processes(replica, inputs, apply_padding)


class EvaluationLoss(torch.Tensor):
    """A loss `()` over all ranks' samples; gathered as one value per sample, `(batch,)`, as in a single process."""


def gather_for_metrics(original: Callable, self: Any, input_data: Any, use_gather_object: bool = False) -> Any:
    """Gathers tensors `(batch, ...)` or objects over data-parallel ranks, without samples repeated in the last batch.

    For scalars `()` only values of ranks with valid samples are kept.
    """
    if not is_ours(self):
        return original(self, input_data, use_gather_object)
    state = self.gradient_state
    cut = cut_rows(state)
    if use_gather_object or _holds_other_than_tensors(input_data):
        if _data_parallel_size(self) > 1:
            parts: list[Any] = [None] * _data_parallel_size(self)
            dist.all_gather_object(parts, input_data, group=_data_parallel_group(self))
            input_data = [item for part in parts for item in part]
        return input_data[: last_batch_size(state)][:cut]

    def kept(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, EvaluationLoss):
            return self.gather(tensor.as_subclass(torch.Tensor))[:cut]
        if tensor.dim() == 0:
            # A single process drops no scalar of a global batch.
            return tensor if _data_parallel_size(self) == 1 else self.gather(tensor)[: last_ranks(state)]
        return self.gather(tensor)[: last_batch_size(state)][:cut]

    return _map_tensors(kept, input_data)


def gather_evaluated(accelerator: Any, data: Any) -> Any:
    """Gathers tensors `(batch, ...)` without repeated samples, and keeps one evaluation loss per sample."""

    def kept(tensor: torch.Tensor) -> torch.Tensor:
        if isinstance(tensor, EvaluationLoss):
            return accelerator.gather(tensor.as_subclass(torch.Tensor))
        return accelerator.gather(tensor)[: last_batch_size(accelerator.gradient_state)]

    return _map_tensors(kept, data)


def _map_tensors(change: Callable[[torch.Tensor], torch.Tensor], data: Any) -> Any:
    from accelerate.utils.operations import recursively_apply

    return recursively_apply(change, data, error_on_other_type=True)


def _holds_other_than_tensors(data: Any) -> bool:
    from accelerate.utils.operations import recursively_apply

    try:
        recursively_apply(lambda tensor: tensor, data, error_on_other_type=True)
    except TypeError:
        return True
    return False


def check_trigger(original: Callable, self: Any) -> bool:
    """Returns on every rank whether any rank has called `set_trigger()` since the last check."""
    if not is_ours(self):
        return original(self)
    flag = torch.zeros((), dtype=torch.int64, device=self.device) if self.flag_tensor is None else self.flag_tensor
    flag = flag.clone()
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    was_set = bool(flag)
    if was_set:
        self.flag_tensor = torch.zeros_like(flag)
    return was_set


def reduce(original: Callable, self: Any, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
    """Reduces tensors of any shape over the data-parallel ranks."""
    if not is_ours(self):
        return original(self, tensor, reduction, scale)
    from accelerate.utils.operations import recursively_apply

    from ...compat.torch_dtensor import local_tensor
    from ...data_parallel.fsdp_checks import is_sharded
    from ...errors import UnsupportedError

    # A sum over all ranks would count each batch once for every rank of its replica.
    group = _data_parallel_group(self) if _data_parallel_size(self) > 1 else None

    def reduced(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        if group is not None:
            if is_sharded(tensor):
                raise UnsupportedError(
                    f"accelerator.reduce does not support the sharded tensor of shape {tuple(tensor.shape)}: with "
                    "zero_stage=3 each data-parallel rank holds a shard. Use zero_stage=2, where each rank holds the "
                    "full tensor."
                )
            local = local_tensor(tensor)
            # As upstream: "none" sums as well, only "mean" divides.
            dist.all_reduce(local, dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM, group=group)
            if reduction == "mean":
                local /= dist.get_world_size(group)
        return tensor

    return recursively_apply(reduced, tensor, error_on_other_type=True)
