"""What stands before the layers of a model that is cut, and behind them."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..errors import PlanError, UnsupportedError
from ..models.layers import LayerSequence
from ..models.modalities.sample_index import reads_modalities
from ..models.spec import ModelSpec

# Which BART and its kin define behind their layers.
_NORMS_OF_EMBEDDINGS = ("layernorm_embedding", "embeddings_layer_norm", "embedding_layernorm")


def has_parameters(module: nn.Module) -> bool:
    """Tells whether a module, or a part of it, has parameters."""
    return next(module.parameters(), None) is not None


@dataclass(frozen=True)
class AroundLayers:
    """Names of the modules with parameters around the layers, in the order of their definition.

    Attributes:
        before: run before all layers.
        between: behind those of an encoder, before those of its decoder read what they made.
        after: run behind all layers.
    """

    before: list[str] = field(default_factory=list)
    between: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)


def _ancestors(layers: str) -> Iterator[tuple[str, str]]:
    """Lists the modules around a list of layers, outermost first, and their child on the way to it."""
    path = layers.split(".")
    for depth, on_path in enumerate(path):
        yield ".".join(path[:depth]), on_path


def find_siblings(model: Any, row: LayerSequence, spec: ModelSpec) -> list[str]:
    """Lists the parameters of modules around the layers themselves, which are read before these.

    Features of images are joined with them.

    Raises:
        UnsupportedError: there are others.
    """
    found = []
    for prefix in dict.fromkeys(prefix for layers in row.lists for prefix, _ in _ancestors(layers)):
        ancestor = model.get_submodule(prefix)
        own = [name for name, parameter in ancestor._parameters.items() if parameter is not None]
        if not find_modality_encoders(model) and not {f"{prefix}.{name}" for name in own} <= {*spec.pp.before_layers}:
            raise UnsupportedError(
                f"{prefix or type(model).__name__} has parameters of its own beside its layers ({', '.join(own)}): no "
                "stage can be told to own them. Load the model with pp_size=1, or name them in its family's "
                "`before_layers`."
            )
        found += [f"{prefix}.{name}" if prefix else name for name in own]
    return found


def find_around(model: Any, row: LayerSequence, spec: ModelSpec) -> AroundLayers:
    """Lists the modules with parameters around the layers, in the order of their definition."""
    around = AroundLayers()
    head = model.get_output_embeddings()
    modality_encoders = find_modality_encoders(model)
    first_on_path = row.lists[0].partition(".")[0]
    with_base = first_on_path == model.base_model_prefix and not modality_encoders
    # Of an encoder's ancestors those that are its decoder's too are looked at once, with the decoder behind it.
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
                # Some classes define their head first, which is not always one of tokens.
                is_head = any(module is head for module in child.modules()) or (with_base and not prefix)
                is_stated_after = full_name in spec.pp.after_layers
                runs_before = full_name in (*modality_encoders, *spec.pp.before_layers, *spec.pp.prefix_modules)
                # Some name their table of tokens as their head, which is tied to it.
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
                # Lists are not called themselves.
                side.extend(
                    [f"{full_name}.{item}" for item in child._modules] if type(child) is nn.ModuleList else [full_name]
                )
    return around


def find_modality_encoders(model: Any) -> frozenset[str]:
    """Names what stands beside the text model: towers of images. Heads do, around a base model or the text model."""
    if not reads_modalities(model):
        return frozenset()
    decoder, head, found = model.get_decoder(), model.get_output_embeddings(), set()
    text = next((name for name, module in model.named_modules() if module is decoder), "")
    path = text.split(".") if text else []
    # The class itself, where it has no base model.
    outermost = int(model.base_model is not model)
    for depth, on_path in enumerate(path[outermost:], outermost):
        prefix = "".join(f"{name}." for name in path[:depth])
        for name, child in model.get_submodule(prefix.removesuffix(".")).named_children():
            if name != on_path and child is not head and has_parameters(child):
                found.add(f"{prefix}{name}")
    return frozenset(found)


def find_tied(model: Any, before: list[str], after: list[str]) -> dict[str, str]:
    """Maps parameters behind the layers to the ones before them that they are tied to."""
    tied = {}
    for target, source in model.all_tied_weights_keys.items():
        ends = [get_side(name, before, after) for name in (target, source)]
        if ends == ["after", "before"]:
            tied[target] = source
        elif ends[0] != ends[1]:
            raise PlanError(f"{target} is tied to {source}: a pipeline can tie the head to the embedding only.")
    return tied


def find_tied_before(model: Any, before: list[str]) -> dict[str, str]:
    """Maps parameters before the layers to others there that they are tied to, as an encoder's and a decoder's are."""
    ties = model.all_tied_weights_keys.items()
    return {
        target: source
        for target, source in ties
        if {get_side(name, before, []) for name in (target, source)} == {"before"}
    }


def drop_ties(model: Any, off_stage: Collection[str], around: AroundLayers, layers: Collection[str]) -> None:
    """Keeps the loader from tying weights that are not here, or others to one that such a weight is tied to.

    Args:
        absent (`Collection[str]`): which sides of the layers this rank lacks, `"before"` and `"after"`.
        layers (`Collection[str]`): names of layers of other ranks.
    """
    ties, inside = model.all_tied_weights_keys, tuple(f"{name}." for name in layers)
    here = [name for name in ties if get_side(name, around.before, around.after) not in off_stage]
    kept = {name: ties[name] for name in here if not name.startswith(inside)}
    model.all_tied_weights_keys = model._tied_weights_keys = kept


def put_head_last(model: nn.Module, layers: str) -> None:
    """Has a head that a class defines first follow the layers: a weight tied to it has one name on all stages then."""
    on_path = layers.partition(".")[0]
    names = list(model._modules)
    head = model.get_output_embeddings()  # type: ignore[operator]
    first = names[: names.index(on_path)]
    for name in first:
        child = model._modules[name]
        if child is not None and any(module is head for module in child.modules()):
            model._modules[name] = model._modules.pop(name)


def get_side(name: str, before: list[str], after: list[str]) -> str:
    """Tells where a parameter stands: before or after the layers, or in them."""
    for side, modules in (("before", before), ("after", after)):
        if any(name.startswith(f"{module}.") for module in modules):
            return side
    return "layers"
