"""What stands before the layers of a model that is cut, and behind them."""

from typing import Any

from torch import nn

from ..errors import PlanError, UnsupportedError
from ..rows_of_media import reads_media
from ..spec import ModelSpec

# Which BART and its kin define behind their layers.
_NORM_OF_EMBEDDINGS = "layernorm_embedding"


def has_parameters(module: nn.Module) -> bool:
    """Tells whether a module, or a part of it, has parameters."""
    return next(module.parameters(), None) is not None


def find_beside(model: Any, layers: str) -> list[str]:
    """Lists the parameters of modules around the layers themselves, which features of images are joined with.

    Raises:
        UnsupportedError: those of models without images.
    """
    path, found = layers.split("."), []
    for depth in range(len(path)):
        prefix = ".".join(path[:depth])
        ancestor = model.get_submodule(prefix)
        own = [name for name, parameter in ancestor._parameters.items() if parameter is not None]
        if own and not find_towers(model):
            raise UnsupportedError(
                f"{prefix or type(model).__name__} has parameters of its own beside its layers ({', '.join(own)}): no "
                "stage can be told to own them. Load the model with pp_size=1."
            )
        found += [f"{prefix}.{name}" if prefix else name for name in own]
    return found


def find_around(model: Any, layers: str, spec: ModelSpec) -> tuple[list[str], list[str]]:
    """Lists the modules with parameters before and behind the layers, in the order of their definition."""
    before: list[str] = []
    after: list[str] = []
    path = layers.split(".")
    head = model.get_output_embeddings()
    towers = find_towers(model)
    beside_base = path[0] == model.base_model_prefix and not towers
    for depth, on_path in enumerate(path):
        prefix = ".".join(path[:depth])
        ancestor = model.get_submodule(prefix)
        place = before
        for name, child in ancestor.named_children():
            full_name = f"{prefix}.{name}" if prefix else name
            if name == on_path:
                place = after
            elif has_parameters(child):
                # Some classes define their head first, which is not always one of tokens.
                is_head = any(module is head for module in child.modules()) or (beside_base and depth == 0)
                is_behind = full_name in spec.after_layers or is_head
                runs_before = full_name in towers or name == _NORM_OF_EMBEDDINGS
                side = before if runs_before or full_name in (*spec.before_layers, *spec.prefixes) else place
                # Lists are not called themselves.
                names = (
                    [f"{full_name}.{item}" for item in child._modules] if type(child) is nn.ModuleList else [full_name]
                )
                (after if is_behind else side).extend(names)
    return before, after


def find_towers(model: Any) -> frozenset[str]:
    """Names what stands beside the text model: towers of images. Heads do, around a base model or the text model."""
    if not reads_media(model):
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
        ends = [side_of(name, before, after) for name in (target, source)]
        if ends == ["after", "before"]:
            tied[target] = source
        elif ends[0] != ends[1]:
            raise PlanError(f"{target} is tied to {source}: a pipeline can tie the head to the embedding only.")
    return tied


def side_of(name: str, before: list[str], after: list[str]) -> str:
    """Tells where a parameter stands: before or after the layers, or in them."""
    for side, modules in (("before", before), ("after", after)):
        if any(name.startswith(f"{module}.") for module in modules):
            return side
    return "layers"
