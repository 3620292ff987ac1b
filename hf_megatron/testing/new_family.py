"""Skeleton of a family file, `models/families/TYPE.py`, filled with what the module structure shows."""

from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from ..errors import ConfigError, PlanError
from ..models.block_patterns import HEAD_COUNTS, KEY_VALUE_HEAD_COUNTS, OUTPUT_LINEARS, get_widths
from ..models.infer import stated_or_inferred_spec
from ..models.registry import REGISTRY, registered_spec
from ..models.spec import generic
from ..models.spec_helpers import base_prefix
from .cases import classifier_class
from .resolve_model import build_on_meta

_HEADER = '''"""{model_type}: TODO what transformers' plan or the module names do not say."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import {helper}


@register_model("{model_type}")
def {function}(model: Any) -> ModelSpec:
'''
_CORRECTIONS = """    return corrected_spec(
        model,
        {
            # TODO "pattern inside the base model": "style"
        },
    )
"""


def make_family_skeleton(config: PreTrainedConfig) -> str:
    """Returns the source of a family file for a model type, with a style for each linear and its sizes.

    Args:
        config (`PreTrainedConfig`): config of the model; no weights are created.

    Raises:
        ConfigError: the type has a family file already, or no model can be built from the config.
    """
    if not config.architectures and (classifier := classifier_class(config)):
        config.architectures = [classifier]
    model, model_type = build_on_meta(config.model_type, config), config.model_type
    if registered_spec(model) is not None:
        builder = REGISTRY.get(model_type)
        where = f" in {builder.__module__.replace('.', '/')}.py" if builder is not None else ""
        raise ConfigError(f"Model type {model_type!r} is registered{where}. Edit that file.")
    try:
        spec = stated_or_inferred_spec(model)
    except PlanError:
        return _write_full_plan(model, model_type)
    lines = [
        "# The plan below is known without this file. Check it first, and delete this file if the check passes:",
        f"#     hf-megatron check {model_type} --layout tp2,tp2+sp,pp2",
        *(f"# {pattern}: {style}" for pattern, style in spec.tp.plan.items()),
        _write_header(model_type, "corrected_spec") + _CORRECTIONS,
    ]
    return "\n".join(lines)


def _write_header(model_type: str, helper: str) -> str:
    return _HEADER.format(model_type=model_type, helper=helper, function=model_type.replace("-", "_"))


def _write_full_plan(model: Any, model_type: str) -> str:
    prefix, modules = base_prefix(model), dict(model.named_modules())
    hidden = model.get_input_embeddings().weight.shape[1]
    plan: dict[str, tuple[str, str]] = {}
    regions: dict[str, str] = {}
    heads: dict[str, tuple[str, ...]] = {}
    for name, module in modules.items():
        if not name.startswith(prefix):
            continue
        pattern = generic(name.removeprefix(prefix))
        if module is model.get_input_embeddings():
            plan[pattern] = "embedding_rowwise", f"{module.num_embeddings} x {module.embedding_dim}"
        elif (widths := get_widths(module)) is not None and "*" in pattern:
            plan[pattern] = _guess_style(pattern, *widths, hidden), f"{widths[0]} -> {widths[1]}"
        counts = tuple(
            attr for attr in (*HEAD_COUNTS, *KEY_VALUE_HEAD_COUNTS) if isinstance(vars(module).get(attr), int)
        )
        if counts and any(get_widths(child) for child in module.children()):
            heads[pattern] = counts
    for pattern, (style, _) in plan.items():
        layer, _, child = pattern.rpartition(".")
        # Linears that are children of the layer itself have no block of their own.
        if style == "colwise" and layer.endswith("*"):
            outputs = [other for other, (other_style, _) in plan.items() if other_style == "rowwise"]
            if siblings := [output for output in outputs if output.rpartition(".")[0] == layer]:
                regions[pattern] = siblings[0]
    lines = [_write_header(model_type, "family_spec") + "    return family_spec(", "        model,", "        {"]
    lines += [f'            "{pattern}": "{style}",  # {sizes}' for pattern, (style, sizes) in plan.items()]
    lines += ["        },"]
    if heads:
        lines += [
            "        # Attributes that forward reshapes by; each is divided by tp_size.",
            "        local_attributes={",
        ]
        lines += [f'            "{pattern}": {counts!r},'.replace("'", '"') for pattern, counts in heads.items()]
        lines += ["        },"]
    if regions:
        lines += (
            ["        regions={"]
            + [f'            "{block}": "{row}",' for block, row in regions.items()]
            + ["        },"]
        )
    after = _find_modules_before_layers(model, prefix)
    if after:
        listing = ", ".join(f'"{name}"' for name in after)
        lines += [
            "        # TODO keep what runs after the layers although it is defined before them.",
            f"        after_layers=({listing},),",
        ]
    return "\n".join([*lines, "    )", ""])


def _guess_style(pattern: str, width_in: int, width_out: int, hidden: int) -> str:
    """Returns the style of a linear `[width_in] -> [width_out]` in a layer of hidden size `hidden`."""
    if width_in != hidden or width_out != hidden:
        return "rowwise" if width_out == hidden else "colwise"
    return "rowwise" if pattern.rpartition(".")[2] in OUTPUT_LINEARS else "colwise"


def _find_modules_before_layers(model: Any, prefix: str) -> list[str]:
    """Returns siblings of the layers, embeddings aside, that are defined before them."""
    modules = dict(model.named_modules())
    layers = next((name for name, module in modules.items() if isinstance(module, nn.ModuleList)), None)
    if layers is None:
        return []
    parent = layers.rpartition(".")[0]
    names: list[str] = []
    for child, module in modules[parent].named_children():
        if child == layers.rpartition(".")[2]:
            break
        name = f"{parent}.{child}" if parent else child
        if not isinstance(module, nn.Embedding) and name.startswith(prefix):
            names.append(name.removeprefix(prefix))
    return names
