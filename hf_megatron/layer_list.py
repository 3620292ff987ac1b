"""Which of a model's module lists holds its layers."""

from typing import Any

from torch import nn

from .errors import UnsupportedError
from .rows_of_media import reads_media
from .spec import ModelSpec


def find_text_model(model: Any) -> nn.Module | None:
    """Returns the text model inside of one of images and text, whose towers have layers of their own."""
    return model.get_decoder() if reads_media(model) and not model.config.is_encoder_decoder else None


def find_layers(model: Any, spec: ModelSpec, field: str) -> str:
    """Returns the name of the spec's layer list, or of the only one made of the class's `_no_split_modules`.

    Where there is none, the only outermost list of modules of one class is meant.

    Raises:
        UnsupportedError: there are none or several; the size of `field` has to be 1 then.
    """
    if spec.layers is not None:
        return spec.layers
    classes = set(model._no_split_modules or ())
    lists = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) and {type(layer).__name__ for layer in module} <= classes
    ]
    if len(lists) > 1 and (text := find_text_model(model)) is not None:
        lists = [name for name in lists if any(model.get_submodule(name) is module for module in text.modules())]
    if not lists:
        lists = _uniform_lists(model)
    if len(lists) != 1:
        found = ", ".join(lists) or "none"
        raise UnsupportedError(
            f"MegatronConfig.{field}: {type(model).__name__} has to have one list of {sorted(classes)} to cut; found: "
            f"{found}. Load it with {field}=1, or register a spec with `layers`."
        )
    return lists[0]


def _uniform_lists(model: nn.Module) -> list[str]:
    """Lists the outermost module lists of modules of one class, with attention or other parts inside of each."""
    found: list[str] = []
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, nn.ModuleList) and not is_inside and len({type(layer) for layer in module}) == 1:
            found += [name] if len([*module[0].modules()]) > 2 else []
    return found
