"""Weights shared by layers of several stages: two ranks of a pipeline hold them and sum their gradients."""

from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from ..config import MegatronConfig
from ..core.axes import Axes
from ..errors import UnsupportedError
from ..models.layers import LayerSequence
from .module_mixins import OffStageLayer
from .partition import Stages


def find_shared(model: Any, row: LayerSequence, stages: Stages, config: MegatronConfig, axes: Axes) -> dict[str, str]:
    """Returns layer parameter -> parameter of another layer that it is tied to, for weights on several ranks.

    It includes all ties to such a weight, also within one rank.

    Raises:
        UnsupportedError: if more than two ranks may share a weight, FSDP2 shards it, or only some weights of its module
            are shared.
    """
    ranks: dict[str, set[int]] = {}
    ties: dict[str, str] = {}
    for target, source in model.all_tied_weights_keys.items():
        layers = [row.find_layer(name) for name in (target, source)]
        if None not in layers:
            ties[target] = source
            ranks.setdefault(source, set()).update(
                stages.rank_of[stages.get_layer_stage(layer)] for layer in layers if layer is not None
            )
    # Ties within one rank need no communication.
    ties = {target: source for target, source in ties.items() if len(ranks[source]) > 1}
    if not ties:
        return {}
    target, source = next(iter(ties.items()))
    if axes.size("pp") > 2:
        raise UnsupportedError(
            f"MegatronConfig.pp_size = {config.pp_size}: {target} of {type(model).__name__} is tied to {source}, a "
            "weight of layers of several stages, which at most two ranks can share. Load it with pp_size=2."
        )
    if config.zero_stage == 3 and axes.size("dp_cp") > 1:
        raise UnsupportedError(
            f"MegatronConfig.pp_size = {config.pp_size} with zero_stage = 3: {target} of {type(model).__name__} is "
            f"tied to {source}, but FSDP2 would shard them as separate weights. Use zero_stage 1 or 2."
        )
    for layer in row.names:
        for part, shared in _list_shared_parts(layer, ties.values()).items():
            module = f"{layer}.{part}"
            weights = {f"{module}.{name}" for name, _ in model.get_submodule(module).named_parameters()}
            if not weights <= shared:
                raise UnsupportedError(
                    f"MegatronConfig.pp_size > 1: {module} of {type(model).__name__} is shared by layers of "
                    f"several stages, but {min(weights - shared)} in it is not. Load it with pp_size=1."
                )
    return ties


def _list_shared_parts(layer: str, sources: Collection[str]) -> dict[str, set[str]]:
    """Returns the shared weights of a layer by the name of its submodule that contains them."""
    parts: dict[str, set[str]] = {}
    for source in sorted(sources):
        if source.startswith(f"{layer}."):
            parts.setdefault(source.removeprefix(f"{layer}.").partition(".")[0], set()).add(source)
    return parts


def hold_shared(model: nn.Module, row: LayerSequence, held: Mapping[str, nn.Module], sources: Collection[str]) -> None:
    """Registers the shared modules of off-stage layers in the placeholders, so that this rank holds them too.

    Args:
        held (`Mapping[str, nn.Module]`): name -> off-stage layer that a placeholder has replaced.
        sources (`Collection[str]`): names of the shared weights.
    """
    for name, layer in held.items():
        for part in _list_shared_parts(name, sources):
            untracked = model.get_submodule(name)
            assert isinstance(untracked, OffStageLayer)
            untracked.hold_real(part, layer.get_submodule(part))
