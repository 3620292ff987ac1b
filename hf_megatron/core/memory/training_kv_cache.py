"""Training forwards return a KV cache only if the call requests one.

Model configs enable the cache by default, but training never reads it. With a cache, transformers also treats packed
documents, which are marked by their positions, as one: the loss of a plain loop would depend on a generation flag.
"""

import dataclasses
import inspect
import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from ...compat.shared import Shared
from ...compat.transformers_models import CACHE_ARGUMENTS, checkpoints_activations
from ...errors import UnsupportedError
from ..forward_hooks import ForwardHooks
from ..unavailable_output import UnavailableOutput


class UnavailableCache(UnavailableOutput):
    """Placeholder for the KV cache that the single-process model returns."""

    message = (
        "No KV cache is available. Training forwards, and all forwards with pp_size > 1 or cp_size > 1, return one "
        "only if called with use_cache=True; a training forward with labels under pipeline parallelism never does. "
        "Otherwise the model's cache type is not supported: call generate() with use_cache=False."
    )


def leave_out_in_training(model: Any, hooks: ForwardHooks, *, pipelined: bool, always: bool = False) -> None:
    """Disables the KV cache in a model's training forwards, as `use_cache=False`, unless the call requests it.

    Forwards raise `UnsupportedError` if that would separate packed documents that a single process treats as one.
    Outputs contain an `UnavailableCache` if a single process would have returned a cache.

    Args:
        hooks (`ForwardHooks`): the model's hooks.
        pipelined (`bool`): whether the model runs in a pipeline, which may return no cache.
        always (`bool`): whether to disable it in evaluation too.
    """
    names = list(inspect.signature(type(model).forward).parameters)[1:]
    if "use_cache" in names:
        hook = _Hook(names, pipelined, always, RepeatedLayers(model))
        hooks.add("kv cache", hook.before, hook.after)


def reject_cache(model: Any, hooks: ForwardHooks, why: str) -> None:
    """Disables the cache in all calls of a model; raises `UnsupportedError` if a call requests or passes one.

    Args:
        hooks (`ForwardHooks`): the model's hooks.
        why (`str`): the reason, as a sentence.
    """
    names = list(inspect.signature(type(model).forward).parameters)[1:]

    def before(module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        arguments = dict(zip(names, args, strict=False)) | kwargs
        if arguments.get("use_cache") or arguments.get("state") is not None:
            raise UnsupportedError(
                f"{type(model).__name__} does not support a cache between calls: {why} Call the model and generate() "
                "with use_cache=False."
            )
        return args, kwargs if "use_cache" in arguments else kwargs | {"use_cache": False}

    hooks.add("kv cache", before)


class _Hook(Shared):
    """Forward hooks that omit the cache and put a placeholder into the output; `names` are the forward's arguments."""

    def __init__(self, names: list[str], pipelined: bool, always: bool, repeated_layers: "RepeatedLayers"):
        self.names, self.pipelined, self.always = names, pipelined, always
        self.repeated_layers = repeated_layers
        # Whether the single-process model would return a cache from the current forward.
        self.expected = False

    def before(self, model: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
        arguments = dict(zip(self.names, args, strict=False)) | kwargs
        for cache in _caches(arguments):
            if isinstance(cache, UnavailableCache):
                raise UnsupportedError(cache.message)
        # In a tuple, omitting the cache would shift the values after it, so it is kept.
        by_name = arguments.get("return_dict")
        returns_tuple = not (model.config.return_dict if by_name is None else by_name)
        is_asked = "use_cache" in arguments or returns_tuple or bool(_caches(arguments))
        is_left_out = not is_asked and (self.always or (model.training and torch.is_grad_enabled()))
        has_one = _makes_cache(model, arguments)
        self.expected = has_one and (is_left_out or self.pipelined)
        if not is_left_out:
            return None
        if has_one:
            _reject_documents(model, arguments)
            self.repeated_layers.reject()
        return args, {**kwargs, "use_cache": False}

    def after(self, model: Any, args: tuple, output: Any) -> Any:
        is_read_by_name = isinstance(output, ModelOutput) and dataclasses.is_dataclass(output)
        if not self.expected or not is_read_by_name or torch.compiler.is_compiling():
            return None
        # Rebuild the output, so that the cache has its usual position in the tuple form.
        values = {field.name: getattr(output, field.name) for field in dataclasses.fields(output)}
        unavailable = {name: UnavailableCache() for name in CACHE_ARGUMENTS if name in values and values[name] is None}
        return type(output)(**values | unavailable) if unavailable else None


class RepeatedLayers(Shared):
    """Search for layers that were repeated after loading and share one entry of the cache."""

    def __init__(self, model: nn.Module):
        self._stacks = [
            (module, name)
            for module in model.modules()
            for name, child in module.named_children()
            if isinstance(child, nn.ModuleList) and any(_cache_entry(layer) is not None for layer in child)
        ]
        self._known = self._list_layers()
        # Layers of the model's own class may share entries (Zamba 2).
        self._shared = self._find()

    def _list_layers(self) -> list[nn.Module]:
        return [layer for module, name in self._stacks for layer in getattr(module, name, None) or ()]

    def _find(self) -> set[tuple[str, int]]:
        shared = set()
        for module, name in self._stacks:
            entries = [_cache_entry(layer) for layer in getattr(module, name, None) or ()]
            shared |= {(name, entry) for entry in entries if entry is not None and entries.count(entry) > 1}
        return shared

    def reject(self) -> None:
        """Raises `UnsupportedError` if layers were repeated."""
        layers = self._list_layers()
        if len(layers) == len(self._known) and all(map(operator.is_, layers, self._known)):
            return
        if added := sorted(self._find() - self._shared):
            name, entry = added[0]
            raise UnsupportedError(
                f"Several modules of `{name}` have layer_idx = {entry}: a single process joins their keys in the cache "
                "that use_cache=True creates. Give each layer its own layer_idx, or set model.config.use_cache = False."
            )
        self._known = layers


def _cache_entry(layer: nn.Module) -> int | None:
    """Returns the entry of the cache that a layer writes to."""
    indices = (getattr(module, "layer_idx", None) for module in layer.modules())
    return next((index for index in indices if isinstance(index, int)), None)


def leave_out(model: Any, arguments: dict[str, Any]) -> None:
    """Disables the cache of a call; `UnsupportedError` if a single process would treat its packed documents as one."""
    # Finding out whether there would be a cache reads all modules.
    if _may_hold_documents(arguments) and _makes_cache(model, arguments):
        _reject_documents(model, arguments)
    arguments["use_cache"] = False


def _caches(arguments: Mapping[str, Any]) -> list[Any]:
    return [arguments[name] for name in CACHE_ARGUMENTS if arguments.get(name) is not None]


def _makes_cache(model: Any, arguments: Mapping[str, Any]) -> bool:
    """Returns whether a single process would create a cache in a call and return it."""
    use_cache = arguments.get("use_cache")
    if use_cache is None:
        use_cache = getattr(model.config.get_text_config(), "use_cache", False)
    # With gradient checkpointing, transformers disables the cache.
    return bool(use_cache) and not _caches(arguments) and not (model.training and checkpoints_activations(model))


def _may_hold_documents(arguments: Mapping[str, Any]) -> bool:
    # With a mask, transformers ignores the positions.
    positions: Any = arguments.get("position_ids")
    is_read = arguments.get("attention_mask") is None and isinstance(positions, Tensor) and positions.dim() == 2
    return is_read and positions.shape[1] > 1


def _reject_documents(model: Any, arguments: Mapping[str, Any]) -> None:
    if _may_hold_documents(arguments) and not bool((arguments["position_ids"].diff(dim=1) == 1).all()):
        raise UnsupportedError(
            "position_ids of packed documents with use_cache=True are not supported: with a cache, transformers treats "
            f"the sequence as one document. Call {type(model).__name__} with use_cache=False, or set "
            "model.config.use_cache = False."
        )
