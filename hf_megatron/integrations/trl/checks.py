"""Checks of TRL trainer arguments for parallelized models, before anything is built."""

from collections.abc import Mapping, Sequence
from typing import Any

from ...compat.versions import is_for_other_version
from ...errors import UnsupportedError
from ..accelerate.environment import job_world_size

_REFUSED = {
    "activation_offloading": "it only supports a single device. Use MegatronConfig(recompute=...).",
    "cast_lm_head_to_fp32": "it replaces the head, which is sharded over ranks. Set it to False.",
    "use_vllm": (
        "vLLM would need the weights of all ranks after each step, in its own layout. Set it to False; the "
        "parallelized model generates itself."
    ),
    "use_transformers_continuous_batching": "each rank would schedule requests independently. Set it to False.",
}

# DPO losses that are means over tokens or sort samples: each rank would compute them on its local samples.
OVER_THE_BATCH = frozenset({"sft", "aot", "aot_unpaired"})
_DPO_LOSS = "_compute_loss"


def reject_arguments(trainer: Any, args: Any) -> None:
    """Raises `UnsupportedError` for arguments that only work on a single device."""
    for name, reason in _REFUSED.items():
        if value := getattr(args, name, False):
            raise UnsupportedError(
                f"{type(trainer).__name__}, {name}={value} is not supported with megatron_config: {reason}"
            )
    if getattr(args, "use_liger_kernel", False) and is_for_other_version("trl.trainer.sft_trainer:add_fused_lm_head"):
        raise UnsupportedError(
            f"{type(trainer).__name__}, use_liger_kernel=True is not supported with TRL 1.14, whose losses then read "
            "the full weight of the head. Use TRL 1.15 or later, or set it to False."
        )


def reject_batch_wide_losses(trainer: Any, args: Any, dp_size: int) -> None:
    """Raises `UnsupportedError` if each rank would compute a batch-wide loss on its local samples."""
    loss_type = getattr(args, "loss_type", None) or ()
    kinds = OVER_THE_BATCH.intersection((loss_type,) if isinstance(loss_type, str) else loss_type)
    if dp_size == 1 or not kinds:
        return
    owner = next((cls for cls in type(trainer).__mro__ if _DPO_LOSS in vars(cls)), None)
    if is_for_other_version("trl.trainer.dpo_trainer:add_fused_lm_head"):
        reason = "TRL 1.14 computes it over each rank's own samples. Use TRL 1.15 or later"
    elif owner is None or owner.__module__ != "trl.trainer.dpo_trainer" or _DPO_LOSS in vars(trainer):
        reason = f"its {_DPO_LOSS} computes it over each rank's own samples. Use DPOTrainer's {_DPO_LOSS}"
    else:
        return
    raise UnsupportedError(
        f"{type(trainer).__name__}, loss_type = {min(kinds)!r} is not supported on {dp_size} data-parallel ranks: "
        f"{reason}, dp_size=1 (with tp_size or pp_size), or another loss."
    )


def reject_in_memory_datasets(args: Any, arguments: Sequence[Any]) -> None:
    """Rejects in-memory datasets with precomputed reference log-probs.

    The first rank caches the results next to the dataset's file, where the other ranks read them.
    """
    from datasets import Dataset

    if not getattr(args, "precompute_ref_log_probs", False) or job_world_size() == 1:
        return
    for value in arguments:
        for dataset in value.values() if isinstance(value, Mapping) else (value,):
            if isinstance(dataset, Dataset) and not dataset.cache_files:
                raise UnsupportedError(
                    "precompute_ref_log_probs=True is not supported on several ranks for an in-memory dataset: rank 0 "
                    "caches the results next to the dataset's files, where the other ranks read them. Load the "
                    "dataset from files, or with load_from_disk(...) after save_to_disk(...)."
                )
