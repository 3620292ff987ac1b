"""One rank of a job whose other ranks do not exist, with real tensors: to measure its kernels, host and memory.

    join_as_fake_rank(0, 8, "cuda")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, megatron_config={"tp_size": 8})

The library's own code runs. Collectives of torch's process group `fake` return at once, so losses and gradients are not
a job's. `planner/fake_world.py` predicts such ranks without memory.
"""

import os
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from ..checkpoint import initialize
from ..compat.torch_memory import join_fake_job
from ..core.fork_harness import set_rank_environment
from ..core.runtime import RUNTIME
from ..data_parallel import distributed_optimizer
from ..errors import ConfigError


def join_as_fake_rank(rank: int, world_size: int, device: str = "cpu") -> None:
    """Makes this process a rank of a fake job. Use a process of its own, as nothing is undone.

    Weights of `from_config` are drawn on the device. Optimizer steps are never skipped, as values that other ranks
    would send are missing and may not be finite.

    Args:
        rank (`int`): rank in the job.
        world_size (`int`): ranks of the job.
        device (`str`, defaults to `"cpu"`): `"cpu"` or `"cuda"`, this process's current GPU.

    Raises:
        ConfigError: the device is not available, or not one of these.
    """
    if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
        raise ConfigError(f"join_as_fake_rank: device = {device!r} is not available. Use 'cpu', or 'cuda' with a GPU.")
    set_rank_environment(rank, world_size)
    if device == "cuda":
        os.environ.update(ACCELERATE_USE_CPU="false", LOCAL_RANK=str(torch.cuda.current_device()))
    join_fake_job(rank, world_size)
    RUNTIME.fake_job = dist.group.WORLD, device
    answer_for_other_ranks()
    draw, check, scatter = initialize.initialize, distributed_optimizer.has_finite_gradients, dist.reduce_scatter_tensor

    def draw_on_device(*args: Any, **kwargs: Any) -> None:
        with torch.device(device):
            draw(*args, **kwargs)

    def accept_gradients(parameters: Iterable[torch.Tensor], **options: Any) -> bool:
        # The check costs what it costs in a job.
        check(parameters, **options)
        return True

    def scatter_own(output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # Before torch 2.13, which calls it `reduce_scatter_single`, the fake group leaves the output uninitialized.
        output.copy_(input[: output.shape[0]])
        return scatter(output, input, *args, **kwargs)

    initialize.initialize = draw_on_device
    dist.reduce_scatter_tensor = scatter_own
    distributed_optimizer.has_finite_gradients = accept_gradients


def answer_for_other_ranks() -> None:
    """Patches object collectives to return this rank's value for all ranks; for a process of its own."""
    dist.all_gather_object = _repeat_own  # type: ignore[assignment]
    dist.broadcast_object_list = lambda objects, *args, **kwargs: None  # type: ignore[assignment]


def _repeat_own(gathered: list[Any], value: Any, group: Any = None) -> None:
    gathered[:] = [value] * len(gathered)
