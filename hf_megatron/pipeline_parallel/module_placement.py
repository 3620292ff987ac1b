"""Registration of off-stage weights, and placement of modules that user code replaces after loading.

After `model.lm_head = nn.Linear(...)` the last stage computes with the new head, and the others know its shape.
"""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..compat.instance_patches import mix_into
from ..core.off_stage import OffStageTensor, Owner, as_parameter, is_off_stage
from ..errors import UnsupportedError
from .module_mixins import StagedInput, StagedLayer, output_width
from .multi_part_layers import StagedPart
from .off_stage_module import Placeholder, names_in

_STANDING = (Placeholder, StagedLayer, StagedPart, StagedInput)


def _take_place(owner: nn.Module, name: str, module: nn.Module | None) -> nn.Module | None:
    """Module registration hook: a module that replaces a pipeline module takes over its stage and its role.

    Returns:
        the placeholder to register instead, if the module is off-stage; `None` to register the module itself.
    """
    before = owner._modules.get(name)
    if module is None or not isinstance(before, _STANDING):
        return None
    parts = list(module.modules())
    # A wrapper calls the previous module, which keeps its role.
    if any(part is before for part in parts):
        return None
    if any(isinstance(part, _STANDING) for part in parts):
        raise UnsupportedError(
            f"{name} of a {type(owner).__name__} cannot be replaced by another module of the pipelined model: each "
            "module is bound to its own place. Load the model with pp_size=1."
        )
    if isinstance(before, Placeholder):
        placeholder = before.make_placeholder(module)
        register_off_stage_weights(placeholder, [weight for weight, _ in module.named_parameters()])
        return placeholder
    kept: dict[str, Any] = {"_stage_boundary": before._stage_boundary}
    if isinstance(before, StagedLayer | StagedPart):
        mixin = StagedLayer if isinstance(before, StagedLayer) else StagedPart
        mix_into(module, mixin, **kept, _layer_index=before._layer_index)
    else:
        mix_into(module, StagedInput, **kept, _name=before._name, _width=output_width(module))
    return None


def register_off_stage_weights(model: nn.Module, names: Collection[str]) -> None:
    """Registers weights of the model by name, without values, as parameters of its placeholders."""
    placeholders = {path: module for path, module in model.named_modules() if isinstance(module, Placeholder)}
    for path, module in placeholders.items():
        # Nested placeholders are handled by the outermost one.
        if path.rpartition(".")[0] not in placeholders:
            module.list_weights(names_in(path, names))
    # `model.apply(model._init_weights)` skips weights that were loaded from a file.
    if any("_is_hf_initialized" in vars(parameter) for parameter in model.parameters()):
        for parameter in filter(is_off_stage, model.parameters()):
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]


def register_side_weights(model: nn.Module, weights: Mapping[str, Tensor], owner: Owner, device: torch.device) -> None:
    """Registers off-stage parameters of the first stage that are direct parameters of modules around the layers.

    Args:
        weights: name -> tensor of its shape and dtype.
    """
    for weight, tensor in weights.items():
        path, _, name = weight.rpartition(".")
        off_stage = OffStageTensor(tensor.to("meta"), device, "lies on stage 0 of the pipeline")
        model.get_submodule(path)._parameters[name] = as_parameter(off_stage, owner, tensor.requires_grad)  # type: ignore[assignment]


def share_tied_weights(model: nn.Module, sources: Mapping[str, str]) -> None:
    """Registers tied parameters in placeholders.

    Args:
        sources: name of a tied weight -> name of the parameter that it is tied to.
    """
    for target, source in sources.items():
        path, _, name = target.rpartition(".")
        module = model.get_submodule(path)
        if isinstance(module, Placeholder):
            module.share_weight(name, model.get_parameter(source))


def follow_exchanged_modules() -> Any:
    """Registers the hook that keeps replaced modules on their stages; returns its handle."""
    # torch registers the module that the hook returns; its type annotation does not mention it.
    register: Any = nn.modules.module.register_module_module_registration_hook
    return register(_take_place)
