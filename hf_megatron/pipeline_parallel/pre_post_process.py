"""Modules before and after the layers of a pipelined model."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..errors import PlanError, UnsupportedError
from ..models.layers import LayerSequence
from ..models.modalities.sample_index import reads_modalities
from ..models.spec import ModelSpec

# Norms of embeddings, which BART and similar models define after their layers.
_NORMS_OF_EMBEDDINGS = ("layernorm_embedding", "embeddings_layer_norm", "embedding_layernorm")


def has_parameters(module: nn.Module) -> bool:
    """Returns whether a module has parameters, directly or in its children."""
    return next(module.parameters(), None) is not None


@dataclass(frozen=True)
class AroundLayers:
    """Modules with parameters around the layers, by name, in the order of their definition.

    Attributes:
        before: run before all layers.
        between: run after an encoder's layers, before the decoder's layers read their output.
        after: run after all layers.
    """

    before: list[str] = field(default_factory=list)
    between: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)


def _ancestors(layers: str) -> Iterator[tuple[str, str]]:
    """Yields the ancestors of a list of layers, outermost first, each with its child on the path to the list."""
    path = layers.split(".")
    for depth, on_path in enumerate(path):
        yield ".".join(path[:depth]), on_path


def find_siblings(model: Any, row: LayerSequence, spec: ModelSpec) -> list[str]:
    """Returns the names of direct parameters of the layers' ancestors, which are read before the layers.

    Multimodal models merge such parameters with image features; other models list them in `before_layers`.

    Raises:
        UnsupportedError: if there are others, whose stage is unknown.
    """
    siblings = []
    for prefix in dict.fromkeys(prefix for layers in row.lists for prefix, _ in _ancestors(layers)):
        ancestor = model.get_submodule(prefix)
        direct = [name for name, parameter in ancestor._parameters.items() if parameter is not None]
        names = [f"{prefix}.{name}" if prefix else name for name in direct]
        if not find_modality_encoders(model) and not {*names} <= {*spec.pp.before_layers}:
            raise UnsupportedError(
                f"{prefix or type(model).__name__} has parameters next to its layers ({', '.join(names)}) that "
                "belong to no pipeline stage. Load the model with pp_size=1, or list them in its family's "
                "`before_layers`."
            )
        siblings += names
    return siblings


def find_around(model: Any, row: LayerSequence, spec: ModelSpec) -> AroundLayers:
    """Returns the names of the modules with parameters around the layers, in the order of their definition."""
    around = AroundLayers()
    head = model.get_output_embeddings()
    modality_encoders = find_modality_encoders(model)
    first_on_path = row.lists[0].partition(".")[0]
    with_base = first_on_path == model.base_model_prefix and not modality_encoders
    # An ancestor of both encoder and decoder is visited once, with both children on the path.
    on_paths: dict[str, list[str]] = {}
    for layers in row.lists:
        for prefix, on_path in _ancestors(layers):
            on_paths.setdefault(prefix, []).append(on_path)
    decoder = row.lists[-1]
    for prefix, names_on_path in on_paths.items():
        passed: set[str] = set()
        for name, child in model.get_submodule(prefix).named_children():
            full_name = f"{prefix}.{name}" if prefix else name
            if name in names_on_path:
                passed.add(name)
            elif full_name in row.parts:
                continue
            elif has_parameters(child):
                # Some classes define their head before the layers; it is not always a language modeling head.
                is_head = any(module is head for module in child.modules()) or (with_base and not prefix)
                is_stated_after = full_name in spec.pp.after_layers
                runs_before = full_name in (*modality_encoders, *spec.pp.before_layers, *spec.pp.prefix_modules)
                # Some return their token embedding as the head, because both are tied.
                is_head = is_head and full_name not in spec.pp.before_layers
                runs_before = runs_before or name in _NORMS_OF_EMBEDDINGS
                is_around_decoder = decoder.startswith(f"{prefix}." if prefix else "")
                if is_head:
                    side = around.after
                elif full_name in spec.pp.after_encoder:
                    side = around.between
                elif not is_stated_after and (runs_before or not passed):
                    side = around.before
                elif is_around_decoder and (is_stated_after or passed == set(names_on_path)):
                    side = around.after
                else:
                    side = around.between
                # A `ModuleList` is not called itself: list its items.
                side.extend(
                    [f"{full_name}.{item}" for item in child._modules] if type(child) is nn.ModuleList else [full_name]
                )
    return around


def find_modality_encoders(model: Any) -> frozenset[str]:
    """Returns the names of modules with parameters next to the language model: vision and audio encoders.

    Heads, which may also be next to a base model or the language model, are not included.
    """
    if not reads_modalities(model):
        return frozenset()
    decoder, head, encoders = model.get_decoder(), model.get_output_embeddings(), set()
    text = next((name for name, module in model.named_modules() if module is decoder), "")
    path = text.split(".") if text else []
    # A model with a base model has its head on the outermost level; one without has its encoders there.
    outermost = int(model.base_model is not model)
    for depth, on_path in enumerate(path[outermost:], outermost):
        prefix = "".join(f"{name}." for name in path[:depth])
        for name, child in model.get_submodule(prefix.removesuffix(".")).named_children():
            if name != on_path and child is not head and has_parameters(child):
                encoders.add(f"{prefix}{name}")
    return frozenset(encoders)


def find_tied(model: Any, before: list[str], after: list[str]) -> dict[str, str]:
    """Returns parameter after the layers -> parameter before the layers that it is tied to."""
    tied = {}
    for target, source in model.all_tied_weights_keys.items():
        ends = [get_side(name, before, after) for name in (target, source)]
        if ends == ["after", "before"]:
            tied[target] = source
        elif ends[0] != ends[1]:
            raise PlanError(f"{target} is tied to {source}: a pipeline can tie the head to the embedding only.")
    return tied


def find_tied_before(model: Any, before: list[str]) -> dict[str, str]:
    """Returns the ties between parameters before the layers, such as an encoder's and a decoder's embedding."""
    ties = model.all_tied_weights_keys.items()
    return {
        target: source
        for target, source in ties
        if {get_side(name, before, []) for name in (target, source)} == {"before"}
    }


def drop_ties(model: Any, off_stage: Collection[str], around: AroundLayers, layers: Collection[str]) -> None:
    """Removes the ties of off-stage weights from the model, so that the loader does not apply them.

    Args:
        off_stage (`Collection[str]`): sides of the layers that this rank does not have, `"before"` and `"after"`.
        layers (`Collection[str]`): names of off-stage layers.
    """
    ties, inside = model.all_tied_weights_keys, tuple(f"{name}." for name in layers)
    here = [name for name in ties if get_side(name, around.before, around.after) not in off_stage]
    kept = {name: ties[name] for name in here if not name.startswith(inside)}
    model.all_tied_weights_keys = model._tied_weights_keys = kept


def put_head_last(model: nn.Module, layers: str) -> None:
    """Moves a head that is defined before the layers after them, so that a tied weight has one name on all stages."""
    on_path = layers.partition(".")[0]
    names = list(model._modules)
    head = model.get_output_embeddings()  # type: ignore[operator]
    first = names[: names.index(on_path)]
    for name in first:
        child = model._modules[name]
        if child is not None and any(module is head for module in child.modules()):
            model._modules[name] = model._modules.pop(name)


def get_side(name: str, before: list[str], after: list[str]) -> str:
    """Returns whether a parameter is `"before"` or `"after"` the layers, or in the `"layers"`."""
    for side, modules in (("before", before), ("after", after)):
        if any(name.startswith(f"{module}.") for module in modules):
            return side
    return "layers"
