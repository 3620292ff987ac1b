"""Specs of composite models: modality encoders around a language model, or an encoder and a decoder."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from ..errors import PlanError
from .derive import derive_spec, with_head
from .spec import ModelSpec, module_name

# Spec fields that hold patterns of modules or parameters: as keys or values of a mapping, or as a tuple.
_KEYS = (
    "plan",
    "local_attributes",
    "local_arguments",
    "regions",
    "head_sharded_blocks",
    "experts",
    "identity_experts",
    "per_token_inputs",
)
_VALUES = ("regions",)
_EACH = (
    "multi_input_blocks",
    "pointwise_containers",
    "layer_stacks",
    "before_layers",
    "after_layers",
    "prefix_modules",
    "run_on_all_stages",
    "full_sequence_blocks",
    "layer_parameters",
    "sublayer_lists",
    "after_encoder",
)
# Spec fields with names that are not patterns, and fields whose reason in one submodel applies to the full model.
_OF_ALL = ("per_token_arguments", "plain_linear_classes", "pre_layer_arguments", "mutable_layer_arguments")
_REASONS = ("no_sequence_parallel", "no_zero_bubble", "no_pipeline", "no_context_parallel")


def composite_spec(model: Any, builders: Mapping[str, Callable[[Any], ModelSpec]]) -> ModelSpec | None:
    """Returns the spec of a model whose language model has a type with a builder; `None` for all others.

    transformers' plan for modality encoders is kept in addition to the builder's plan for the language model.
    """
    text = model.config.get_text_config()
    builder = None if text is model.config else builders.get(str(text.model_type))
    name = None if builder is None else _text_model(model, text)
    if builder is None or name is None:
        return None
    spec = moved_spec(builder(model.get_submodule(name)), f"{name}.")
    try:
        around = derive_spec(model).tp.plan
    except PlanError:
        around = {}
    return spec.updated(model_type=model.config.model_type, plan=with_head(model, {**around, **spec.tp.plan}))


def merge_specs(model: Any, parts: Mapping[str, ModelSpec]) -> ModelSpec:
    """Returns the spec of a model that runs submodels sequentially, merged from the submodels' specs.

    Args:
        parts (`Mapping[str, ModelSpec]`): name of a submodel -> its spec, with patterns relative to the submodel.
    """
    specs = [moved_spec(spec, f"{name}.") for name, spec in parts.items()]
    changes: dict[str, Any] = {}
    for name in _KEYS:
        changes[name] = {key: value for spec in specs for key, value in spec.get_field(name).items()}
    changes |= {name: tuple(pattern for spec in specs for pattern in spec.get_field(name)) for name in _EACH}
    for name in _OF_ALL:
        changes[name] = tuple(dict.fromkeys(value for spec in specs for value in spec.get_field(name)))
    changes |= {name: next(filter(None, (spec.get_field(name) for spec in specs)), None) for name in _REASONS}
    changes["sequence_dims"] = {key: value for spec in specs for key, value in spec.cp.sequence_dims.items()}
    changes["residual_streams_first"] = any(spec.sp.residual_streams_first for spec in specs)
    return ModelSpec.from_fields(
        model.config.model_type, layer_num_outputs=max(spec.pp.layer_num_outputs for spec in specs), **changes
    )


def _text_model(model: Any, text: Any) -> str | None:
    """Returns the name of the outermost module with the text config: `get_decoder` may return only its layer stack."""
    decoder = model.get_decoder()
    if not isinstance(decoder, nn.Module):
        return None
    path = module_name(model, decoder).split(".")
    names = (".".join(path[: depth + 1]) for depth in range(len(path)))
    return next((name for name in names if getattr(model.get_submodule(name), "config", None) is text), None)


def moved_spec(spec: ModelSpec, prefix: str) -> ModelSpec:
    """Returns a spec with a prefix added to each of its patterns."""
    changes: dict[str, Any] = {}
    for name in _KEYS:
        values = spec.get_field(name)
        is_pattern = name in _VALUES
        changes[name] = {prefix + key: prefix + value if is_pattern else value for key, value in values.items()}
    changes |= {name: tuple(prefix + pattern for pattern in spec.get_field(name)) for name in _EACH}
    if spec.pp.layers is not None:
        changes["layers"] = prefix + spec.pp.layers
    return spec.updated(**changes)
