"""Lookup of the module lists that hold a model's layers."""

import inspect
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..compat.transformers_models import CACHE_ARGUMENTS, fetches_attention_core
from ..errors import UnsupportedError
from .modalities.sample_index import reads_modalities
from .spec import ModelSpec, generic, module_name

_TOKENS = "input_ids"


def find_text_model(model: Any) -> nn.Module | None:
    """Returns the language model inside a multimodal model, whose encoders have layer lists too; else `None`."""
    return model.get_decoder() if reads_modalities(model) and not model.config.is_encoder_decoder else None


def names_in_encoder(model: Any) -> tuple[str, ...]:
    """Returns the names of an encoder's children, which generation calls separately; empty without an encoder."""
    encoder = model.get_encoder() if model.config.is_encoder_decoder else None
    # `get_encoder` of upstream base models returns the model itself if there is no encoder.
    if not isinstance(encoder, nn.Module) or encoder is model:
        return ()
    name = module_name(model, encoder)
    return tuple(f"{name}.{child}" for child, _ in encoder.named_children())


@dataclass(frozen=True)
class LayerSequence:
    """Layers of a model in execution order, from one module list or from an encoder's and a decoder's list.

    Args:
        lists (`tuple[str, ...]`): names of the module lists.
        lengths (`tuple[int, ...]`): number of layers of each list.
        parts (`tuple[str, ...]`): names of `sublayer_lists`, whose modules run before the layer with the same index.
    """

    lists: tuple[str, ...]
    lengths: tuple[int, ...]
    parts: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: Any, spec: ModelSpec, field: str) -> "LayerSequence":
        """Finds the layers of a model; raises `UnsupportedError` as `find_layers` does."""
        is_both = model.config.is_encoder_decoder
        lists = _find_stack_lists(model, spec, field) if is_both else (find_layers(model, spec, field),)
        return cls(lists, tuple(len(model.get_submodule(name)) for name in lists), spec.pp.sublayer_lists)

    @property
    def decoder(self) -> int:
        """Index of the first decoder layer after an encoder, 0 without an encoder."""
        return self.lengths[0] if len(self.lists) > 1 else 0

    @property
    def names(self) -> tuple[str, ...]:
        """Layer names in execution order."""
        pairs = zip(self.lists, self.lengths, strict=True)
        return tuple(f"{name}.{index}" for name, length in pairs for index in range(length))

    def get_layer_modules(self, layer: int) -> tuple[str, ...]:
        """Returns the names of all modules of a layer, in execution order."""
        return (*(f"{name}.{layer}" for name in self.parts), self.names[layer])

    def get_layer_list(self, layer: int) -> str:
        """Returns the name of the module list that contains a layer."""
        return self.lists[int(0 < self.decoder <= layer)]

    def find_layer(self, name: str) -> int | None:
        """Returns the index of the layer that a module or parameter belongs to, or `None`."""
        numbered = [*enumerate(self.lists), *((0, parts) for parts in self.parts)]
        for number, layers in numbered:
            if name.startswith(f"{layers}."):
                return sum(self.lengths[:number]) + int(name.removeprefix(f"{layers}.").partition(".")[0])
        return None


def _find_stack_lists(model: Any, spec: ModelSpec, field: str) -> tuple[str, ...]:
    """Returns the names of the encoder's and the decoder's layer list, without lists that run after the encoder's."""
    lists = []
    names = {module: name for name, module in model.named_modules()}
    for stack in (model.get_encoder(), model.get_decoder()):
        inside = [] if stack is None else _find_text_lists(stack)
        trailing = tuple(f"{part.removeprefix(f'{names.get(stack)}.')}." for part in spec.pp.after_encoder)
        inside = [name for name in inside if not name.startswith(trailing)]
        if len(inside) != 1 or stack not in names:
            raise UnsupportedError(
                f"MegatronConfig.{field}: {type(model).__name__} must have exactly one list of layers in its encoder "
                f"and one in its decoder; found: {', '.join(inside) or 'none'} in one of them. Load it with {field}=1."
            )
        lists.append(f"{names[stack]}.{inside[0]}" if names[stack] else inside[0])
    return tuple(lists)


def _find_text_lists(stack: Any) -> list[str]:
    """Returns the layer lists of one stack; with modality encoders inside, only those next to the token embedding."""
    lists = _uniform_lists(stack)
    if len(lists) > 1 and stack.main_input_name == _TOKENS:
        table = next(name for name, module in stack.named_modules() if module is stack.get_input_embeddings())
        lists = [name for name in lists if name.startswith(table.rpartition(".")[0])]
    return lists


def find_layers(model: Any, spec: ModelSpec, field: str) -> str:
    """Returns the name of the spec's layer list, or of the only one made of the class's `_no_split_modules`.

    Without either, the only outermost module list whose modules have one class is used.

    Raises:
        UnsupportedError: there are none or several, so that the size of `field` has to be 1.
    """
    if spec.pp.layers is not None:
        return spec.pp.layers
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
        listing = ", ".join(lists) or "none"
        raise UnsupportedError(
            f"MegatronConfig.{field}: {type(model).__name__} must have exactly one list of {sorted(classes)}; found: "
            f"{listing}. Load it with {field}=1, or register a spec with `layers`."
        )
    return lists[0]


def _uniform_lists(model: nn.Module) -> list[str]:
    """Returns the names of the outermost module lists whose modules have one class and contain further modules."""
    lists: list[str] = []
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{outer}.") for outer in lists)
        if isinstance(module, nn.ModuleList) and not is_inside and len({type(layer) for layer in module}) == 1:
            lists += [name] if len([*module[0].modules()]) > 2 else []
    return lists


# Forward arguments through which a block keeps state of earlier tokens.
_CACHES = frozenset((*CACHE_ARGUMENTS, "past_key_value", "layer_past", "use_cache"))


def find_full_sequence_blocks(model: nn.Module, spec: ModelSpec, layers: str) -> frozenset[str]:
    """Returns the names of the blocks in layers that keep a cache without transformers' attention, and the spec's."""
    blocks: set[str] = set()
    seen: list[str] = []
    for name, module in model.named_modules():
        is_block = name.startswith(f"{layers}.") and name.count(".") > layers.count(".") + 1
        if not is_block or any(name.startswith(f"{outer}.") for outer in seen):
            continue
        if _keeps_cache(module):
            seen.append(name)
        if generic(name) in spec.cp.full_sequence_blocks or (_keeps_cache(module) and not _is_attention(module)):
            blocks.add(name)
    return frozenset(blocks)


def _keeps_cache(module: nn.Module) -> bool:
    return not _CACHES.isdisjoint(inspect.signature(type(module).forward).parameters)


def _is_attention(block: nn.Module) -> bool:
    """Returns whether the cache of a block only feeds transformers' attention functions."""
    attention = [part for part in block.modules() if fetches_attention_core(type(part))]
    known = {inner for part in attention for inner in block.modules() if part is inner or part in inner.modules()}
    return bool(attention) and all(part in known for part in block.modules() if _keeps_cache(part))
