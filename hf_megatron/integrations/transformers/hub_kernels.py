"""`use_kernels=True`: layers of the `kernels` library in a parallelized model, by an explicit mapping."""

from collections.abc import Callable
from typing import Any

from ...compat.fused_kernels import kernel_layer_name
from ...compat.shard_safe import shard_safe
from ...errors import UnsupportedError
from ...models.fused_kernels import SHARD_SAFE_LAYERS, has_parallel_forward
from ...parallel_state import parallel_state

_USE, _CONFIG = "use_kernels", "kernel_config"


def take_kernel_config(kwargs: dict[str, Any]) -> Any:
    """Removes `use_kernels` and `kernel_config` from the loader's arguments, and returns the mapping to apply later.

    The loader would set the kernels on modules that are not parallelized yet.

    Raises:
        UnsupportedError: if the mapping has layers that are not right on shards.
    """
    use, config = kwargs.pop(_USE, False), kwargs.pop(_CONFIG, None)
    if use or config is not None:
        require_supported_layers(config)
    return config


def require_supported_layers(config: Any) -> None:
    """Raises `UnsupportedError` unless a `KernelConfig` maps supported layers only."""
    supported = ", ".join(sorted(SHARD_SAFE_LAYERS))
    if config is None or (config.inherit_mapping and not config.use_local_kernel):
        raise UnsupportedError(
            "use_kernels=True with megatron_config also selects kernels that replace sharded linears and losses. Pass "
            f"kernel_config=KernelConfig(mapping, inherit_mapping=False) with a mapping of {supported}."
        )
    for layer in config.kernel_mapping:
        if layer not in SHARD_SAFE_LAYERS:
            raise UnsupportedError(
                f"kernel_config maps {layer!r}, which is not supported with megatron_config: it was not compared on "
                f"shards. Remove it; {supported} are supported."
            )


def set_use_kernels(
    original: Callable, self: Any, use_kernels: bool, kernel_config: Any = None, mode: Any = None
) -> None:
    """Sets the kernels of a parallelized model, for training and inference; it keeps forwards that use other ranks."""
    if parallel_state(self) is None or not use_kernels:
        return original(self, use_kernels, kernel_config, mode)
    require_supported_layers(getattr(self, _CONFIG, None) if kernel_config is None else kernel_config)
    training, self.training = self.training, True if kernel_config is not None else self.training
    try:
        # transformers derives the mode of the mapping from it, and finds no kernel for training in one for inference.
        original(self, use_kernels, kernel_config, mode)
    finally:
        self.training = training
    for module in self.modules():
        forward = getattr(vars(module).get("forward"), "__func__", None)
        if forward is None or kernel_layer_name(module) is None:
            continue
        if forward is type(module).forward or has_parallel_forward(module):
            del module.forward
        elif kernel_layer_name(module) in SHARD_SAFE_LAYERS:
            shard_safe(forward)
