"""Per-parameter settings of bitsandbytes' optimizers, such as 32-bit states of embeddings (bitsandbytes 0.50)."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor


def has_positional_overrides(optimizer: Any) -> bool:
    """Returns whether `GlobalOptimManager.register_parameters` recorded settings by position in the groups."""
    manager = getattr(optimizer, "mng", None)
    return bool(manager is not None and manager.index2config)


def copy_overrides(optimizer: Any, tensors: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Applies the settings of parameters to the tensors that the optimizer steps on instead; until its first step.

    Args:
        tensors: pairs of a parameter and the tensor that replaces it, each of any shape.
    """
    manager = getattr(optimizer, "mng", None)
    if manager is None or optimizer.initialized:
        return
    # The manager identifies parameters by `id`, and modules' parameters only once the optimizer steps.
    overrides = dict(manager.pid2config)
    overrides |= {id(getattr(module, name)): config for module, name, config in manager.module_weight_config_triple}
    for parameter, tensor in tensors:
        if id(parameter) in overrides:
            manager.pid2config[id(tensor)] = overrides[id(parameter)]
