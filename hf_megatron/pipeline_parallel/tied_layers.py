"""Weights that layers of several stages share: two ranks of a pipeline hold them, and add up their gradients."""

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
    """Maps parameters of layers to those of layers of other stages that they are tied to.

    Every tie to a weight is among them that layers of several ranks have.

    Raises:
        UnsupportedError: more than two ranks share layers, or FSDP2 splits them.
    """
    ranks: dict[str, set[int]] = {}
    found: dict[str, str] = {}
    for target, source in model.all_tied_weights_keys.items():
        layers = [row.find_layer(name) for name in (target, source)]
        if None not in layers:
            found[target] = source
            ranks.setdefault(source, set()).update(
                stages.rank_of[stages.get_layer_stage(layer)] for layer in layers if layer is not None
            )
    found = {target: source for target, source in found.items() if len(ranks[source]) > 1}
    if not found:
        return {}
    target, source = next(iter(found.items()))
    if axes.size("pp") > 2:
        raise UnsupportedError(
            f"MegatronConfig.pp_size = {config.pp_size}: {target} of {type(model).__name__} is {source}, a weight that "
            "layers of several stages share, and two ranks can do so. Load it with pp_size=2."
        )
    if config.zero_stage == 3 and axes.size("dp_cp") > 1:
        raise UnsupportedError(
            f"MegatronConfig.pp_size = {config.pp_size} with zero_stage = 3: {target} of {type(model).__name__} is "
            f"{source}, which FSDP2 would split as weights of their own. Use zero_stage 1 or 2."
        )
    return found


def hold_shared(model: nn.Module, row: LayerSequence, held: Mapping[str, nn.Module], sources: Collection[str]) -> None:
    """Puts what own layers share with others into what stands for these.

    Args:
        held (`Mapping[str, nn.Module]`): name -> layer of another rank, before something stood for it.
        sources (`Collection[str]`): names of the weights that are shared.

    Raises:
        UnsupportedError: a part of a layer is shared and another of the same module is not.
    """
    for name, layer in held.items():
        own = {source.removeprefix(f"{name}.") for source in sources if source.startswith(f"{name}.")}
        for part in dict.fromkeys(weight.partition(".")[0] for weight in sorted(own)):
            weights = {f"{part}.{weight}" for weight, _ in layer.get_submodule(part).named_parameters()}
            if not weights <= own:
                raise UnsupportedError(
                    f"MegatronConfig.pp_size > 1: {name}.{part} of {type(model).__name__} is shared by layers of "
                    f"several stages, and {min(weights - own)} in it is not. Load it with pp_size=1."
                )
            off_stage_layer = model.get_submodule(name)
            assert isinstance(off_stage_layer, OffStageLayer)
            off_stage_layer.hold_real(part, layer.get_submodule(part))
