"""Activation recomputation (Korthikanti et al., 2022).

`"full"` is transformers' own gradient checkpointing: every layer is recomputed, including its collectives.
`"selective"` recomputes only the attention core: scores, softmax, dropout and weighted sum, which save large tensors
that are cheap to compute.

All upstream models fetch their core, including the eager one of their own file, from
`AttentionInterface.get_interface`. The wrapped function checks the attention module passed to it: if its model uses
selective recomputation, the core runs inside torch's checkpoint, otherwise it is called directly. Projections, and
thus their collectives, stay outside.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ...compat.patch_registry import PATCH_REGISTRY
from ...compat.shard_safe import shard_safe
from ...compat.torch_autograd import recompute_layers
from ...compat.transformers_models import computes_own_attention, fetches_attention_core
from ...config import CHOICES
from ...errors import ConfigError, UnsupportedError


def apply_recompute(model: Any, mode: str | None) -> None:
    """Enables activation recomputation in a model's training; evaluation and generation are unchanged.

    Args:
        model (`PreTrainedModel`): stock or parallelized; `UnsupportedError` if the mode does not support it.
        mode (`str`, *optional*): `"full"`, `"selective"` or `None` (no change); `ConfigError` for other values.
    """
    if mode not in CHOICES["recompute"]:
        raise ConfigError(f"recompute = {mode!r}: expected None, 'full' or 'selective'.")
    # The lookup of transformers' attention functions is one of the patches.
    PATCH_REGISTRY.activate()
    if mode == "full":
        try:
            recompute_layers(model)
        except ValueError as error:
            name = type(model).__name__
            raise UnsupportedError(f"recompute='full': {name} does not support gradient checkpointing.") from error
    elif mode == "selective":
        _recompute_cores(model)


def _recompute_cores(model: nn.Module) -> None:
    cores = []
    for name, module in model.named_modules():
        if fetches_attention_core(type(module)):
            cores.append((name, module))
        elif computes_own_attention(type(module)):
            raise UnsupportedError(
                f"recompute='selective': {name} of {type(model).__name__} ({type(module).__name__}) computes attention "
                "in its own forward. Use recompute='full'."
            )
    if not cores:
        raise UnsupportedError(
            f"recompute='selective': {type(model).__name__} has no attention core to recompute. Use recompute='full'."
        )
    for name, module in cores:
        if _get_core(module) is None:
            RecomputedCore(name).install(module)


class RecomputedCore:
    """Recomputed core of one attention module; stored on it as `_hf_megatron_core`."""

    def __init__(self, name: str):
        self.name = name
        self.ran = False

    def install(self, module: nn.Module) -> None:
        # Stored as an attribute rather than in a table of modules, so that copies of the model recompute too.
        module._hf_megatron_core = self  # type: ignore[assignment]
        module.register_forward_hook(self._leave)

    def run(self, core: Callable[..., Any], module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Returns the core's result; in training, its activations are recomputed in backward instead of saved."""
        if not _is_training(module):
            return core(module, *args, **kwargs)
        self.ran = True

        # Pass all arguments by position: checkpoint only looks there for tensors to save and for their devices.
        def recomputed(*values: Any) -> Any:
            return core(module, *values[: len(args)], **dict(zip(kwargs, values[len(args) :], strict=True)))

        # The RNG state is saved because dropout inside the core must draw the same mask again.
        return checkpoint(recomputed, *args, *kwargs.values(), use_reentrant=False, preserve_rng_state=True)

    @shard_safe
    def _leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        # Some forwards call the interface only in some configurations (GPT-2's `reorder_and_upcast_attn`).
        if _is_training(module) and not self.ran:
            raise UnsupportedError(
                f"recompute='selective': {self.name} ({type(module).__name__}) did not call transformers' attention "
                "interface, so nothing would be recomputed. Use recompute='full'."
            )
        self.ran = False


def _is_training(module: nn.Module) -> bool:
    return module.training and torch.is_grad_enabled()


def _get_core(module: nn.Module) -> RecomputedCore | None:
    return vars(module).get("_hf_megatron_core")


def _dispatch(core: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    recomputed = _get_core(module)
    if recomputed is None:
        return core(module, *args, **kwargs)
    return recomputed.run(core, module, args, kwargs)


def recomputing(core: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps an attention function so that it recomputes the core if the calling module is configured for it."""
    return partial(_dispatch, core)


__all__ = ["RecomputedCore", "apply_recompute", "recomputing"]
