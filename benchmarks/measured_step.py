"""Memory and collectives of a training step on real ranks, to compare with what `dry_run` predicts."""

from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from hf_megatron import MegatronConfig
from hf_megatron.compat.torch_dtensor import local_tensor
from hf_megatron.compat.torch_memory import allocated_bytes, storage_key
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.diagnostics.allocation_tracker import AllocationTracker
from hf_megatron.diagnostics.step_memory import kept_tensors
from hf_megatron.diagnostics.step_stats import StepFigures
from hf_megatron.planner.predicted_step import (
    build_model_and_optimizer,
    count_local_parameters,
    run_training_step,
)
from hf_megatron.planner.uniform_routing import balanced_experts

# The freeing of tensors in gloo's threads is delayed, differently in every step: the smallest of many peaks is taken.
PEAK_STEPS = 16


def measure_step(
    config: PreTrainedConfig,
    layout: MegatronConfig,
    world_size: int,
    *,
    batch_size: int,
    sequence_length: int,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    timeout: float = 600.0,
) -> list[StepFigures]:
    """Measures a training step with AdamW on every rank of a new job.

    Peaks come from torch's allocator, on CPUs through the profiler, and include memory that kernels allocate
    internally.

    Returns:
        `list`: the second step's figures (memory kept between steps, peak, collectives) of each rank.
    """

    @balanced_experts()
    def on_rank() -> StepFigures:
        model, optimizer = build_model_and_optimizer(config, layout, dtype)
        ids = torch.zeros(batch_size, sequence_length, dtype=torch.int64, device=device)

        def run_step() -> None:
            run_training_step(model, optimizer, ids, ids)

        # The first step creates the optimizer states, which the measured ones find.
        run_step()
        kept = sum_storages(kept_tensors(model, optimizer))
        measure_peak = measure_cpu_peak if device == "cpu" else measure_gpu_peak
        peak = min(measure_peak(run_step) for _ in range(PEAK_STEPS))
        with AllocationTracker(model) as tracker:
            tracker.begin_step({})
            run_step()
        return StepFigures(
            kept=kept,
            peak=sum(kept.values()) + peak,
            collectives=tracker.figures.collectives,
            parameters=count_local_parameters(model),
        )

    return run_ranks(on_rank, world_size, timeout=timeout, device=device)


def measure_gpu_peak(step: Callable[[], None]) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def measure_cpu_peak(step: Callable[[], None]) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    return max(accumulate(allocated_bytes(profiler), initial=0))


def sum_storages(kept: dict[str, list[Tensor]]) -> dict[str, int]:
    """Sums the storages of each category; a shared one counts for its last category, as in `AllocationTracker`."""
    owners: dict[int, tuple[str, int]] = {}
    for category, tensors in kept.items():
        for tensor in map(local_tensor, tensors):
            owners[storage_key(tensor)] = category, tensor.untyped_storage().nbytes()
    return {
        category: size
        for category in kept
        if (size := sum(storage_size for name, storage_size in owners.values() if name == category))
    }
