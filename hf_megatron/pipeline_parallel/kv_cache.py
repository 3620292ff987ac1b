"""The key-value cache of a generation over pipeline stages.

Every rank has a cache of its own, of which it fills the entries of its own layers. A model's forward asks whichever
entry it likes (the first, the first of each kind, the last state space layer's) how long the past is, so the entries of
other ranks' layers are kept at the right length, one head and one value wide: they are reordered, repeated and cropped
with the rest.

A rank with several stages runs the forward once for each. All of them have to find the past as it was before the first:
each sees its own layers' entries and, of all others, copies from before.
"""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    EncoderDecoderCache,
    LinearAttentionCacheLayerMixin,
    QuantizedCache,
    StaticCache,
)

from ..errors import UnsupportedError
from .partition import Stages

# Under which name a model takes its cache.
_NAMES = ("past_key_values", "cache_params")
# Of a decoder's own tokens, and of its encoder's.
_PARTS = ("self_attention_cache", "cross_attention_cache")
_CLASSES = (Cache, DynamicCache, StaticCache, QuantizedCache)


def cache_name(arguments: Mapping[str, Any]) -> str | None:
    """Returns the argument that holds a cache, if there is one."""
    return next((name for name in _NAMES if arguments.get(name) is not None), None)


class StagedCache:
    """A rank's cache during one call of a pipelined model.

    That of a decoder behind an encoder has two parts: of its own tokens, and of the encoder's, which grows once.

    Args:
        name (`str`): the argument that it was given as.
        cache (`Cache`): this rank's, the same object in every step of a generation.
        stages (`Stages`): which layers belong to which stage.
        rank (`int`): this rank's place in the pipeline.
        decoder (`int`): the first layer of a decoder behind an encoder, whose layers alone have entries.

    Raises:
        UnsupportedError: a cache whose entries cannot be kept at the right length, or one with a graph.
    """

    def __init__(self, name: str, cache: Any, stages: Stages, rank: int, decoder: int = 0):
        self.name, self.cache = name, cache
        own = stages.of_rank(rank)
        ranges = [(max(start - decoder, 0), max(stop - decoder, 0)) for start, stop in stages.ranges]
        parts = (getattr(cache, part) for part in _PARTS) if isinstance(cache, EncoderDecoderCache) else (cache,)
        self._parts = [_Entries(name, part, ranges, own, may_be_longer=decoder > 0) for part in parts]

    @classmethod
    def of_call(
        cls,
        model: Any,
        arguments: dict[str, Any],
        parameters: Mapping[str, Any],
        stages: Stages,
        rank: int,
        decoder: int = 0,
    ):
        """Returns the cache that a call was given, or asks for with `use_cache=True`; `None` if neither.

        Args:
            parameters (`Mapping`): by name, those of the model's own forward.
            stages, rank, decoder: as for the class.
        """
        name = cache_name(arguments)
        if name is not None:
            return cls(name, arguments[name], stages, rank, decoder)
        name = next((name for name in _NAMES if name in parameters), None)
        if name is None or not arguments.get("use_cache"):
            return None
        cache: Any = DynamicCache(config=model.config)
        if decoder:
            # Whatever window a decoder has for its own tokens, it reads all of the encoder's.
            cache = EncoderDecoderCache(cache, DynamicCache())
        return cls(name, cache, stages, rank, decoder)

    def seen_by(self, stage: int) -> Any:
        """Returns the cache to run a stage's forward with."""
        seen = [part.seen_by(stage) for part in self._parts]
        if len(seen) == 1:
            return seen[0]
        view = copy.copy(self.cache)
        for name, part in zip(_PARTS, seen, strict=True):
            setattr(view, name, part)
        return view

    def advance(self, inputs: Tensor) -> None:
        """Lets the entries of other ranks' layers grow by as many tokens as this rank's did, after all stages.

        Args:
            inputs (`Tensor`): `[batch, tokens, ...]`, the token ids or embeddings of the call.
        """
        self._parts[0].advance(inputs)


class _Entries:
    """Those of all layers in one cache; `ranges` are each stage's `[start, stop)` of them."""

    def __init__(
        self, name: str, cache: Any, ranges: list[tuple[int, int]], own: tuple[int, ...], *, may_be_longer: bool
    ):
        self.name, self.cache, self.ranges = name, cache, ranges
        self._check(may_be_longer=may_be_longer)
        held = {index for stage in own for index in range(*ranges[stage])}
        self._of_other_stages = [index for index in range(ranges[-1][1]) if index not in held]
        if isinstance(cache, QuantizedCache):
            for index in self._of_other_stages:
                if type(cache.layers[index]) is not DynamicLayer:
                    # Nothing one value wide can be quantised in groups.
                    cache.layers[index] = DynamicLayer()
        # Taken before any stage runs; a rank's only stage changes no other entry.
        self._before = [_at_rest(layer) for layer in cache.layers] if len(own) > 1 else []

    def _check(self, *, may_be_longer: bool) -> None:
        cache, layers = self.cache, self.ranges[-1][1]
        if type(cache) not in _CLASSES:
            raise UnsupportedError(
                f"{type(cache).__name__}: a pipeline knows {', '.join(known.__name__ for known in _CLASSES[1:])} only. "
                "Generate with use_cache=False, or load the model with pp_size=1."
            )
        if cache.offloading:
            raise UnsupportedError(
                f"{type(cache).__name__}(offloading=True): the layer that would be fetched next is another rank's. "
                "Leave offloading out: each rank of a pipeline holds the cache of its own layers only."
            )
        if cache.layer_class_to_replicate is not None:
            cache.layers += [cache.layer_class_to_replicate() for _ in range(len(cache.layers), layers)]
        # transformers makes as many for a decoder as its encoder has layers.
        if len(cache.layers) < layers or (len(cache.layers) > layers and not may_be_longer):
            raise UnsupportedError(
                f"{type(cache).__name__}: it has {len(cache.layers)} entries for the {layers} layers that the pipeline "
                "cuts. Generate with use_cache=False, or load the model with pp_size=1."
            )
        if torch.is_grad_enabled() and any(_has_graph(layer) for layer in cache.layers):
            raise UnsupportedError(
                f"{self.name}: its entries have a graph, which a pipeline's backward cannot follow into an earlier "
                "call. Fill caches under torch.no_grad()."
            )

    def seen_by(self, stage: int) -> Any:
        if not self._before:
            return self.cache
        start, stop = self.ranges[stage]
        view = copy.copy(self.cache)
        view.layers = [*self._before[:start], *self.cache.layers[start:stop], *self._before[stop:]]
        return view

    def advance(self, inputs: Tensor) -> None:
        for index in self._of_other_stages:
            _grow(self.cache.layers[index], inputs)


def new_inputs(arguments: Mapping[str, Any]) -> Tensor:
    """Returns what a call adds to the past, `[batch, tokens, ...]`: its embeddings, else its token ids."""
    names = ("decoder_inputs_embeds", "decoder_input_ids", "inputs_embeds", "input_ids")
    return next(arguments[name] for name in names if arguments.get(name) is not None)


def _grow(layer: Any, inputs: Tensor) -> None:
    rows, tokens = inputs.shape[:2]
    zeros = torch.zeros((rows, 1, tokens, 1), device=inputs.device)
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        for state in range(layer.number_of_states):
            layer.update_conv_state(zeros[..., :1, 0], state_idx=state)
    if isinstance(layer, CacheLayerMixin):
        layer.update(*(_like(held, zeros) for held in (layer.keys, layer.values)))


def _like(held: Tensor | None, zeros: Tensor) -> Tensor:
    """Widens zeros to what is there already: a static cache may have been allocated for every layer in advance."""
    if held is None or held.dim() != zeros.dim():
        return zeros
    return zeros.to(held.dtype).expand(-1, held.shape[1], -1, held.shape[-1])


def _at_rest(layer: Any) -> Any:
    """Copies a layer so that it keeps telling the present length; shares what is larger than a number."""
    snapshot = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            setattr(snapshot, name, dict(value))
        elif isinstance(value, Tensor) and value.numel() == 1:
            setattr(snapshot, name, value.clone())
    return snapshot


def _has_graph(layer: Any) -> bool:
    return any(isinstance(value, Tensor) and value.requires_grad for value in vars(layer).values())
