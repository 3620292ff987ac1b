"""`TrainingArguments(use_liger_kernel=True)`: Liger's kernels that are right on shards, and the model's own head."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from ...compat.fused_kernels import liger_defaults, liger_kernel_name
from ...core.off_stage import computes_here
from ...errors import UnsupportedError
from ...losses.liger_head import LIGER_HEAD
from ...models.fused_kernels import LigerChoice, choose_liger_kernels, has_parallel_forward, is_shard_safe
from ...parallel_state import parallel_state, unwrap_parallel_model


def apply_liger_kernel(original: Callable, model: Any, kernel_config: Mapping[str, bool] | None) -> None:
    """Applies the kernels that a parallelized model supports; raises `UnsupportedError` for others."""
    state = parallel_state(model)
    if state is None:
        return original(model, kernel_config)
    choice = choose_kernels(model, kernel_config)
    original(model, choice.settings)
    reject_bypassed_forwards(model)
    if choice.skipped:
        warnings.warn(
            f"Liger's {' and '.join(choice.skipped)} is left out: it was not compared on shards. The stock modules "
            "compute the same.",
            stacklevel=2,
        )
    if choice.losses:
        state.placed[LIGER_HEAD].announce(choice.losses)


def choose_kernels(model: Any, kernel_config: Mapping[str, bool] | None) -> LigerChoice:
    """Returns Liger's settings for a parallelized model.

    Raises:
        UnsupportedError: if the user asked for a kernel that is not supported.
    """
    model_type = unwrap_parallel_model(model).config.model_type
    choice = choose_liger_kernels(liger_defaults(model_type), kernel_config or {})
    if choice.rejected:
        name = choice.rejected[0]
        raise UnsupportedError(
            f"liger_kernel_config = {{{name!r}: True}} is not supported with megatron_config: this kernel was not "
            f"compared on shards. Pass {{{name!r}: False}}; rms_norm, swiglu, geglu and rope are supported."
        )
    return choice


def reject_bypassed_forwards(model: Any) -> None:
    """Raises `UnsupportedError` if a kernel was set on a module whose class computes over ranks or in chunks."""
    for name, module in model.named_modules():
        forward = vars(module).get("forward")
        if (kernel := liger_kernel_name(forward)) is None or not is_shard_safe(forward):
            continue
        if has_parallel_forward(module) and computes_here(module):
            raise UnsupportedError(
                f"{name} ({type(module).__name__}) cannot take Liger's {kernel}: its own forward computes over ranks, "
                "or in chunks (MegatronConfig.mlp_chunk_size). Leave out that field, or the kernel in "
                "liger_kernel_config."
            )
