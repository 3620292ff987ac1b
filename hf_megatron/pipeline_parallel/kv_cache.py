"""Key-value cache of a generation over pipeline stages.

Every rank has its own cache and fills the entries of its layers. A model's forward reads the past length from any entry
(the first, the first of each kind, the last state space layer's), so entries of off-stage layers are kept at the right
length with one head and one value: `[batch, 1, tokens, 1]`. They are reordered, repeated and cropped with the others.

A rank with several stages runs the forward once per stage. Each forward must see the past as it was before the first of
them, so it sees the entries of its stage's layers and, for all other layers, snapshots from before the call.
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

from ..compat.transformers_models import CACHE_ARGUMENTS
from ..errors import UnsupportedError
from .partition import Stages

# Caches of a decoder's tokens and of the encoder's tokens in an `EncoderDecoderCache`.
_PARTS = ("self_attention_cache", "cross_attention_cache")
_CLASSES = (Cache, DynamicCache, StaticCache, QuantizedCache)


def cache_name(arguments: Mapping[str, Any]) -> str | None:
    """Returns the name of the argument that holds a cache, or `None`."""
    return next((name for name in CACHE_ARGUMENTS if arguments.get(name) is not None), None)


class StagedCache:
    """A rank's cache during one call of a pipelined model.

    The cache of an encoder-decoder has two parts: for the decoder's tokens, and for the encoder's, which grows once.

    Args:
        name (`str`): name of the argument that holds it.
        cache (`Cache`): this rank's cache, the same object in every step of a generation.
        stages (`Stages`): layers of each stage.
        rank (`int`): this rank's index in the pipeline.
        decoder (`int`): index of the decoder's first layer in an encoder-decoder; encoder layers have no entries.

    Raises:
        UnsupportedError: if entries of the cache cannot be kept at the right length, or have a graph.
    """

    def __init__(self, name: str, cache: Any, stages: Stages, rank: int, decoder: int = 0):
        self.name, self.cache = name, cache
        local_stages = stages.of_rank(rank)
        ranges = [(max(start - decoder, 0), max(stop - decoder, 0)) for start, stop in stages.ranges]
        parts = (getattr(cache, part) for part in _PARTS) if isinstance(cache, EncoderDecoderCache) else (cache,)
        self._parts = [_Entries(name, part, ranges, local_stages, may_be_longer=decoder > 0) for part in parts]

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
        """Returns the cache passed to a call, or a new one with `use_cache=True`; `None` if neither.

        Args:
            parameters (`Mapping`): parameters of the model's own forward, by name.
            stages, rank, decoder: as for the class.
        """
        name = cache_name(arguments)
        if name is not None:
            return cls(name, arguments[name], stages, rank, decoder)
        name = next((name for name in CACHE_ARGUMENTS if name in parameters), None)
        if name is None or not arguments.get("use_cache"):
            return None
        cache: Any = DynamicCache(config=model.config)
        if decoder:
            # A decoder may have a sliding window for its own tokens; cross-attention reads all encoder tokens.
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
        """Grows the entries of off-stage layers by the tokens of this call, after all stages have run.

        Args:
            inputs (`Tensor`): `[batch, tokens, ...]`, the token ids or embeddings of the call.
        """
        self._parts[0].advance(inputs)


class _Entries:
    """Entries of all layers in one cache; `ranges` is the `[start, stop)` of each stage."""

    def __init__(
        self,
        name: str,
        cache: Any,
        ranges: list[tuple[int, int]],
        local_stages: tuple[int, ...],
        *,
        may_be_longer: bool,
    ):
        self.name, self.cache, self.ranges = name, cache, ranges
        self._check(may_be_longer=may_be_longer)
        held = {index for stage in local_stages for index in range(*ranges[stage])}
        self._untracked = [index for index in range(ranges[-1][1]) if index not in held]
        if isinstance(cache, QuantizedCache):
            for index in self._untracked:
                if type(cache.layers[index]) is not DynamicLayer:
                    # An entry with one value per token cannot be quantized in groups.
                    cache.layers[index] = DynamicLayer()
        # Snapshots from before any stage runs; not needed with one stage per rank, which changes no other entries.
        self._before = [_at_rest(layer) for layer in cache.layers] if len(local_stages) > 1 else []

    def _check(self, *, may_be_longer: bool) -> None:
        cache, layers = self.cache, self.ranges[-1][1]
        if type(cache) not in _CLASSES:
            raise UnsupportedError(
                f"{type(cache).__name__}: a pipeline supports {', '.join(known.__name__ for known in _CLASSES[1:])} "
                "only. Generate with use_cache=False, or load the model with pp_size=1."
            )
        if cache.offloading:
            raise UnsupportedError(
                f"{type(cache).__name__}(offloading=True): the layer to prefetch next may be on another pipeline rank. "
                "Use offloading=False: each rank holds the cache of its own layers only."
            )
        if cache.layer_class_to_replicate is not None:
            cache.layers += [cache.layer_class_to_replicate() for _ in range(len(cache.layers), layers)]
        # transformers allocates one decoder cache entry per encoder layer, so there may be more than layers.
        if len(cache.layers) < layers or (len(cache.layers) > layers and not may_be_longer):
            raise UnsupportedError(
                f"{type(cache).__name__} has {len(cache.layers)} entries, but the pipeline has {layers} layers. "
                "Generate with use_cache=False, or load the model with pp_size=1."
            )
        if torch.is_grad_enabled() and any(_has_graph(layer) for layer in cache.layers):
            raise UnsupportedError(
                f"{self.name}: its entries require gradients, but a pipeline's backward cannot continue into an "
                "earlier call. Fill caches under torch.no_grad()."
            )

    def seen_by(self, stage: int) -> Any:
        if not self._before:
            return self.cache
        start, stop = self.ranges[stage]
        view = copy.copy(self.cache)
        view.layers = [*self._before[:start], *self.cache.layers[start:stop], *self._before[stop:]]
        return view

    def advance(self, inputs: Tensor) -> None:
        for index in self._untracked:
            _grow(self.cache.layers[index], inputs)


def new_inputs(arguments: Mapping[str, Any]) -> Tensor:
    """Returns the new tokens of a call, `[batch, tokens, ...]`: its embeddings, or else its token ids."""
    names = ("decoder_inputs_embeds", "decoder_input_ids", "inputs_embeds", "input_ids")
    return next(arguments[name] for name in names if arguments.get(name) is not None)


def _grow(layer: Any, inputs: Tensor) -> None:
    rows, tokens = inputs.shape[:2]
    zeros = torch.zeros((rows, 1, tokens, 1), device=inputs.device)
    # Key and value states [batch, 1, tokens, 1]; only the shape is ever read.
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        for state in range(layer.number_of_states):
            layer.update_conv_state(zeros[..., :1, 0], state_idx=state)
    if isinstance(layer, CacheLayerMixin):
        layer.update(*(_like(held, zeros) for held in (layer.keys, layer.values)))


def _like(held: Tensor | None, zeros: Tensor) -> Tensor:
    """Expands zeros `[batch, 1, tokens, 1]` to the heads and width of an existing entry.

    A static cache may have been allocated for all layers in advance.
    """
    if held is None or held.dim() != zeros.dim():
        return zeros
    return zeros.to(held.dtype).expand(-1, held.shape[1], -1, held.shape[-1])


def _at_rest(layer: Any) -> Any:
    """Returns a snapshot of a cache layer that keeps its present length; larger tensors are shared, not copied."""
    snapshot = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            setattr(snapshot, name, dict(value))
        elif isinstance(value, Tensor) and value.numel() == 1:
            setattr(snapshot, name, value.clone())
    return snapshot


def _has_graph(layer: Any) -> bool:
    return any(isinstance(value, Tensor) and value.requires_grad for value in vars(layer).values())
