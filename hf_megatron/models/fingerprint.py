"""Fingerprint of a model: the modules, settings and parameter shardings that select a path through the code.

A fingerprint has *parts*: the modules around the layers, each kind of layer, and the linears whose shards are
replicated on several ranks. Parts exchange nothing but hidden states, so each is verified independently, but only as a
unit: every combination of what is inside a part is a part of its own.
A part is a set of text lines, one per module. They omit sizes, so that a model and its tiny model have equal parts.
"""

import functools
import hashlib
import math
import re
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from ..core.placement import ParameterSharding
from .fused_kernels import is_fused_class
from .spec import generic as generic_name

# Index of an expert that is named `expert_3` in a module dict.
_EXPERT = re.compile(r"(?<=\.expert_)\d+(?=\.|$)")
# Names of the rates at which random numbers are drawn.
_RATE = re.compile(r"drop(?!less)|jitter|noise")
# Attributes whose zero does not switch a feature off: token ids, indices, seeds.
_POSITION = re.compile(r"(_id|_ids|_dim|_idx|_index|_indices|_layer|_layers|_length|_seed|_eps|_epsilon|_range|_std)$")
# Config defaults that each call can override.
_PER_CALL = re.compile(r"^(use_cache|return_dict|output_.*|gradient_checkpointing)$")
# String values that contain a layer index.
_OF_ONE_LAYER = re.compile(r"_layer_\d+$")
# Packages whose classes are identified by their names; a class of another package may have the name of one of these.
_STOCK_PACKAGES = ("torch", "transformers", "hf_megatron", "bitsandbytes", "torchao")
ENDS = "around the layers"
COPIES = "linears in copies"


@dataclass(frozen=True)
class Part:
    """One kind of layer, the modules around the layers, or the linears whose shards are replicated.

    Attributes:
        name: the pattern of the layer's name, `ENDS` or `COPIES`.
        lines: its contents, one line for each kind of module and for each tied parameter.
    """

    name: str
    lines: frozenset[str]

    @functools.cached_property
    def digest(self) -> str:
        """Id of the part in a record."""
        text = "\n".join((self.name, *sorted(self.lines)))
        return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


@dataclass(frozen=True)
class Features:
    """Features of a model on a layout, which are compared with recorded parity results.

    Attributes:
        parts: kinds of layers, the modules around them, and replicated linears.
        draws: patterns of the sites that draw random numbers in training.
        split: fraction of the layers' parameter entries that tensor parallelism shards.
    """

    parts: frozenset[Part]
    draws: frozenset[str]
    split: float


@dataclass(frozen=True)
class _Module:
    """Contents of one line: a module's name inside its part, its class, parameters and settings from the config."""

    part: str
    layer: str
    path: str
    kind: str
    parameters: Mapping[str, str]
    settings: tuple[str, ...]


@dataclass(frozen=True)
class Description:
    """Structure of a model, independent of a layout; returned by `describe_model`.

    Attributes:
        modules: modules in their order of definition.
        draws: patterns of the sites that draw random numbers in training.
        tied: parameter -> the parameter it is tied to.
    """

    modules: tuple[_Module, ...]
    draws: frozenset[str]
    tied: Mapping[str, str]

    def features(self, shardings: Mapping[str, ParameterSharding]) -> Features:
        """Returns the features with the given parameter shardings; pass `{}` for an unsharded model."""
        ends = {line for module in self.modules if not module.layer and (line := _line(module, shardings)) is not None}
        ends |= {f"{_generic(name)} is tied to {_generic(other)}" for name, other in self.tied.items()}
        parts = {Part(ENDS, frozenset(ends)), *self.layers(shardings).values()}
        copied = {_line(module, shardings) or "" for module in self.modules if _in_copies(module, shardings)}
        parts |= {Part(COPIES, frozenset(copied))} if copied else set()
        return Features(frozenset(parts), self.draws, _split_share(self.modules, shardings))

    def layers(self, shardings: Mapping[str, ParameterSharding]) -> dict[str, Part]:
        """Maps the names of the outermost layers, in order, to their parts."""
        lines_by_layer: dict[tuple[str, str], set[str]] = {}
        for module in self.modules:
            if module.layer:
                line = _line(module, shardings)
                lines_by_layer.setdefault((module.layer, module.part), set()).update([] if line is None else [line])
        return {layer: Part(name, frozenset(lines)) for (layer, name), lines in lines_by_layer.items()}


def _generic(name: str) -> str:
    """Replaces layer and expert indices in a name with `*`, including the `expert_<n>` keys of a module dict."""
    return _EXPERT.sub("*", generic_name(name))


def describe_model(model: Any) -> Description:
    """Describes a model on any device. Call it before a pipeline removes off-stage modules."""
    layers, fused = layer_patterns(model), _fused_classes(model)
    modules = tuple(_describe(name, module, layers, fused) for name, module in model.named_modules())
    return Description(modules, random_sites(model), dict(model.all_tied_weights_keys))


def random_sites(model: nn.Module) -> frozenset[str]:
    """Returns patterns of the sites that draw random numbers in training: dropout modules and nonzero rates."""
    sites = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            sites |= {_generic(name)} if module.p > 0 else set()
            continue
        rates = {**_config_reads(module), **vars(module)}
        active = [attribute for attribute, value in rates.items() if is_rate(attribute, value) and value > 0]
        sites |= {_generic(f"{name}.{attribute}" if name else attribute) for attribute in active}
    return frozenset(sites)


def silence(model: nn.Module) -> None:
    """Sets the rates of all sites that draw random numbers to zero."""
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
        config = vars(module).get("config")
        for owner in (module, config) if isinstance(config, PreTrainedConfig) else (module,):
            for name, value in list(vars(owner).items()):
                if is_rate(name, value):
                    setattr(owner, name, type(value)(0))


def is_rate(name: str, value: Any) -> bool:
    """Returns whether an attribute is a dropout, jitter or noise rate."""
    return bool(_RATE.search(name)) and isinstance(value, (int, float)) and not isinstance(value, bool)


def layer_patterns(model: nn.Module) -> dict[str, str]:
    """Maps the names of the outermost layers to their patterns."""
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    outermost = [name for name in lists if not any(name.startswith(f"{other}.") for other in lists)]
    return {f"{name}.{index}": f"{name}.*" for name in outermost for index in model.get_submodule(name)._modules}


def _fused_classes(model: nn.Module) -> dict[type, str]:
    """Maps module classes that are fused kernels to the names of the classes that they replaced in the model's file."""
    files = {cls.__module__ for cls in map(type, model.modules()) if is_stock_class(cls)}
    return {value: name for file in files for name, value in vars(sys.modules[file]).items() if is_fused_class(value)}


def _describe(name: str, module: nn.Module, layers: Mapping[str, str], fused: Mapping[type, str]) -> _Module:
    path = name.split(".")
    layer = next((start for end in range(len(path), 0, -1) if (start := ".".join(path[:end])) in layers), "")
    inside = name.removeprefix(layer).removeprefix(".") if layer else name
    parameters = {
        leaf: f"{name}.{leaf}" if name else leaf for leaf, value in module._parameters.items() if value is not None
    }
    settings = _settings(module, path) if layer or next(module.parameters(), None) is not None else ()
    kind = _class_name(type(module))
    if type(module) in fused:
        # A kernel computes the same as the stock class; its attributes select how.
        kind, settings = fused[type(module)], ()
    return _Module(layers.get(layer, ENDS), layer, _generic(f".{inside}")[1:], kind, parameters, settings)


def is_stock_class(cls: type) -> bool:
    """Returns whether a class belongs to a package whose classes were compared, such as transformers."""
    return cls.__module__.partition(".")[0] in _STOCK_PACKAGES


def _class_name(cls: type) -> str:
    return cls.__name__ if is_stock_class(cls) else f"{cls.__module__}.{cls.__name__}"


def _settings(module: nn.Module, path: list[str]) -> tuple[str, ...]:
    """Returns the attributes of a module and the config values its methods read, sizes excluded, as `name=value`."""
    common = _common_attributes().union(*(vars(cls).get("__constants__", ()) for cls in type(module).__mro__))
    attributes = {
        name: value for name, value in vars(module).items() if not name.startswith("_") and name not in common
    }
    if type(module).__module__.startswith("torch."):
        attributes = {}
    texts = {
        f"{name}={text}" for name, value in attributes.items() if (text := _setting(name, value, path)) is not None
    }
    read = _config_reads(module)
    texts |= {
        f"config.{name}={text}" for name, value in read.items() if (text := _setting(name, value, path)) is not None
    }
    return tuple(sorted(texts))


def _setting(name: str, value: Any, path: list[str]) -> str | None:
    """Returns the size-independent text of a value: a bool, a string, `None` or zero; `None` for anything else."""
    if _PER_CALL.search(name) or _RATE.search(name):
        return None
    position = _POSITION.search(name) or str(value) in path
    if isinstance(value, bool) or (value is None and not position):
        return str(value)
    if isinstance(value, str):
        is_other = value in _activations() or not value.isprintable() or _OF_ONE_LAYER.search(value)
        return None if is_other else value
    if isinstance(value, (int, float)):
        return "0" if value == 0 and not position else None
    return None


def _config_reads(module: nn.Module) -> dict[str, Any]:
    """Returns the config values that methods of a module read at run time."""
    config = vars(module).get("config")
    if not isinstance(config, PreTrainedConfig):
        return {}
    values = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    cls: Any = type(module)
    return {name: values[name] for name in sorted(_names_read(cls) & (values.keys() - _common_fields()))}


@functools.cache
def _common_fields() -> frozenset[str]:
    return frozenset(vars(PreTrainedConfig())) | {"distributed_config", "model_type"}


@functools.cache
def _activations() -> frozenset[str]:
    from transformers.activations import ACT2FN

    return frozenset(ACT2FN)


@functools.cache
def _common_attributes() -> frozenset[str]:
    """Returns the names of attributes that every model or every module has."""
    # Imported here: this module is loaded while transformers' own modeling_utils is being imported.
    from transformers import PreTrainedModel

    # Instantiate a subclass: transformers caches capabilities on the class (`_can_set_experts_implementation`), and
    # subclasses inherit them, so a value set on PreTrainedModel would apply to every model created later.
    class Bare(PreTrainedModel):
        pass

    return frozenset(vars(Bare(PreTrainedConfig()))) | vars(nn.Module()).keys()


@functools.cache
def _names_read(cls: type) -> frozenset[str]:
    """Returns the names that a class's methods read; constructor, weight initialization and generation excluded."""
    from transformers import GenerationMixin, PreTrainedModel

    for_generation = vars(GenerationMixin).keys()
    names: set[str] = set()
    for owner in cls.__mro__:
        if owner.__module__.startswith("torch.") or owner in PreTrainedModel.__mro__:
            continue
        if issubclass(owner, GenerationMixin) and not issubclass(owner, nn.Module):
            # Mixins such as Whisper's contain nothing that training calls.
            continue
        for name, member in vars(owner).items():
            function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            is_excluded = name in ("__init__", "_init_weights") or name in for_generation
            if isinstance(function, types.FunctionType) and not is_excluded:
                for code in _codes(function):
                    names.update(code.co_names)
    return frozenset(names)


def _codes(function: Any) -> Iterator[types.CodeType]:
    while function is not None:
        pending = [function.__code__] if isinstance(function, types.FunctionType) else []
        while pending:
            code = pending.pop()
            yield code
            pending += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        function = vars(function).get("__wrapped__") if isinstance(function, types.FunctionType) else None


def _line(module: _Module, shardings: Mapping[str, ParameterSharding]) -> str | None:
    """Returns the line of a module; `None` for a stock module without parameters and settings."""
    held: dict[str, list[str]] = {}
    for leaf, name in module.parameters.items():
        held.setdefault(_style(shardings.get(name)), []).append(leaf)
    texts = [f"({', '.join(leaves)}){style}" for style, leaves in held.items()]
    # The kind of a class of another package is a dotted path.
    if not texts and not module.settings and "." not in module.kind:
        return None
    name = f"{module.path}: " if module.path else ""
    return " ".join([f"{name}{module.kind}{' '.join(texts)}", *module.settings])


def _style(sharding: ParameterSharding | None) -> str:
    return "" if sharding is None or sharding.style == "replicated" else f" {sharding.style}"


def _in_copies(module: _Module, shardings: Mapping[str, ParameterSharding]) -> bool:
    held = (shardings[name].placement for name in module.parameters.values() if name in shardings)
    return any(split.copies > 1 for placement in held for split in placement.splits)


def _split_share(modules: tuple[_Module, ...], shardings: Mapping[str, ParameterSharding]) -> float:
    of_layers = [name for module in modules if module.layer for name in module.parameters.values() if name in shardings]
    sizes = {name: math.prod(shardings[name].shape) for name in of_layers}
    split = sum(size for name, size in sizes.items() if shardings[name].placement.is_split)
    return split / max(sum(sizes.values()), 1)
