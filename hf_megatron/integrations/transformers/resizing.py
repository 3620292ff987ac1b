"""`resize_token_embeddings` of a parallelized model.

transformers' own method runs on full copies of the embedding and the head in CPU memory, on every rank, from the random
state of rank 0: it draws and averages as in a single process. Each rank then shards the results again, by the
placements that the model was loaded with.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...checkpoint.base_model_hash import forget_identity
from ...checkpoint.initialize import local_part, share_generator
from ...checkpoint.stage_consistency import resharded
from ...compat.torch_dtensor import resized_dtensor
from ...compat.torch_fsdp import replace_sharded
from ...core.communication.full_tensor import gather_full_tensor
from ...core.communication.rank_errors import gather
from ...core.off_stage import is_off_stage
from ...core.placement import count_shared_copies
from ...core.quantized_weight import QuantizedWeight
from ...data_parallel.engine import get_engine
from ...errors import ConfigError, RankError, UnsupportedError
from ...models.spec import module_name
from ...parallel_state import ParallelState, parallel_state

_DOING = "Resizing embeddings"


def resize_token_embeddings(
    original: Callable,
    self: Any,
    new_num_tokens: int | None = None,
    pad_to_multiple_of: int | None = None,
    mean_resizing: bool = True,
) -> nn.Module:
    """Resizes the embedding and the head of a parallelized model, as a single process would; collective.

    Returns:
        the embedding, a placeholder on pipeline stages without it.

    Raises:
        ConfigError: the ranks pass different arguments, or the tables have gradients.
        UnsupportedError: a table is quantized or wrapped, or the new size cannot be sharded.
    """
    state = parallel_state(self)
    if state is None:
        _reject_inner(self)
        return original(self, new_num_tokens, pad_to_multiple_of, mean_resizing)
    embedding, head = self.get_input_embeddings(), self.get_output_embeddings()
    if new_num_tokens is None and pad_to_multiple_of is None:
        return embedding
    tables = [table for table in (embedding, head) if table is not None]
    size = _new_size(embedding, new_num_tokens, pad_to_multiple_of)
    if all(len(table.weight) == size for table in tables):
        self.config.get_text_config().vocab_size = self.vocab_size = size
        return embedding
    _require_agreement(_find_obstacle(self, tables), (new_num_tokens, pad_to_multiple_of, mean_resizing))
    weights = _Weights.find(self, state)
    _require_no_gradients(weights)
    _require_mesh(state, weights, size)
    copies = FullTables(embedding, head, {place: weights.gather_full(place) for place in weights.places})
    with _draw_as_first_rank(), copies.installed_in(self):
        original(self, new_num_tokens, pad_to_multiple_of, mean_resizing)
    replaced = weights.take(copies.weights())
    forget_identity(state)
    for table in tables:
        _update_sizes(table, size)
    assert state.data_parallel is not None
    state.data_parallel.replaced(replaced)
    return embedding


@contextmanager
def _draw_as_first_rank() -> Iterator[None]:
    """Draws from rank 0's random state inside; ranks whose own state differs, as replicas' may, keep theirs."""
    local_state = torch.get_rng_state()
    share_generator(0)
    differs = not torch.equal(local_state, torch.get_rng_state())
    try:
        yield
    finally:
        if differs:
            torch.set_rng_state(local_state)


def _new_size(embedding: Any, new_num_tokens: int | None, pad_to_multiple_of: Any) -> int:
    size = len(embedding.weight) if new_num_tokens is None else new_num_tokens
    # transformers raises for other types.
    return -(-size // pad_to_multiple_of) * pad_to_multiple_of if isinstance(pad_to_multiple_of, int) else size


def _update_sizes(table: Any, size: int) -> None:
    if isinstance(table, nn.Embedding):
        table.num_embeddings = size
        if table.padding_idx is not None and table.padding_idx >= size:
            table.padding_idx = None
    else:
        table.out_features = size


def _reject_inner(model: Any) -> None:
    """Raises `UnsupportedError` for a submodule of a parallelized model, whose head would keep its size."""
    parameter = next(model.parameters(), None)
    engine = None if parameter is None else get_engine(parameter)
    if engine is not None and engine.model is not model:
        raise UnsupportedError(
            f"{type(model).__name__}.resize_token_embeddings of a part of a parallelized "
            f"{type(engine.model).__name__}. Call it on the full model."
        )


def _find_obstacle(model: Any, tables: list[Any]) -> str | None:
    """Returns an error text for tables that are not plain ones, and for classes that have further ones."""
    from transformers import PreTrainedModel

    cls, reason = type(model), None
    overrides = inspect.unwrap(cls.resize_token_embeddings) is not inspect.unwrap(
        PreTrainedModel.resize_token_embeddings
    ) and not hasattr(model, "_resize_final_logits_bias")
    if overrides or cls._resize_token_embeddings is not PreTrainedModel._resize_token_embeddings:
        reason = "the class resizes tables of its own"
    elif any(isinstance(table.weight, QuantizedWeight) for table in tables):
        reason = "the embedding or the head is quantized"
    if reason is not None:
        return (
            f"{cls.__name__}.resize_token_embeddings of a parallelized model: {reason}. Load it in a single process, "
            "resize and save it, and load the result with megatron_config."
        )
    wrapped = next((table for table in tables if not isinstance(table, nn.Embedding | nn.Linear)), None)
    if wrapped is None:
        return None
    return (
        f"resize_token_embeddings: the embedding or head is a {type(wrapped).__name__}. Resize the model before an "
        "adapter wraps these modules."
    )


def _require_agreement(obstacle: str | None, arguments: tuple) -> None:
    """Raises an error on all ranks if one of them finds an obstacle, or if their arguments differ; collective."""
    sent = gather((obstacle, arguments), None, _DOING, error_type=RankError)
    if (first := next((other for other, _ in sent if other is not None), None)) is not None:
        raise UnsupportedError(first)
    if any(other != arguments for _, other in sent):
        raise ConfigError(
            "resize_token_embeddings: the ranks pass different arguments (new_num_tokens, pad_to_multiple_of, "
            f"mean_resizing): {sorted({str(other) for _, other in sent})}. Pass the same on every rank."
        )


def _require_no_gradients(weights: "_Weights") -> None:
    """Raises `ConfigError` on all ranks if a table has a gradient; collective."""
    local = [name for name, value in weights.named.items() if name in weights.names and value.grad is not None]
    names = {name for names in gather(local, None, _DOING, error_type=RankError) for name in names}
    if names:
        raise ConfigError(
            f"resize_token_embeddings: {min(names)} has a gradient of its present size. Call zero_grad() on the model "
            "or the optimizer first."
        )


def _require_mesh(state: ParallelState, weights: "_Weights", size: int) -> None:
    """Raises `UnsupportedError` for a size that cannot be sharded over the model's mesh."""
    before = count_shared_copies(state.shardings.values(), state.axes)
    after = count_shared_copies(weights.shardings(size).values(), state.axes)
    if before != after:
        raise UnsupportedError(
            f"resize_token_embeddings to {size} tokens: tp ranks that share key/value heads cannot shard this size. "
            f"Pass pad_to_multiple_of={state.axes.size('tp')}."
        )


@dataclass
class _Weights:
    """Weights of the embedding and the head, under all names by which they are tied.

    Attributes:
        places: what transformers resizes (`"embedding"`, `"head"`, `"bias"`) -> names of the weight, the first one the
            one that the others are tied to; a tied head has no place of its own.
        named: the model's parameters by name, of any shape.
    """

    model: Any
    state: ParallelState
    places: dict[str, list[str]]
    named: dict[str, Any]

    @classmethod
    def find(cls, model: Any, state: ParallelState) -> "_Weights":
        named = dict(resharded(model).named_parameters(remove_duplicate=False))
        # A pipeline stage knows the ties of its own modules, and those to other stages.
        known = {**({} if state.cut is None else state.cut.sources), **model.all_tied_weights_keys}
        ties = {
            name: source
            for others in gather(known, None, _DOING, error_type=RankError)
            for name, source in others.items()
        }

        def find_source(name: str) -> str:
            while name in ties:
                name = ties[name]
            return name

        places: dict[str, list[str]] = {}
        head = model.get_output_embeddings()
        modules = (
            ("embedding", model.get_input_embeddings(), "weight"),
            ("head", head, "weight"),
            ("bias", head, "bias"),
        )
        for place, module, leaf in modules:
            name = None if module is None else f"{module_name(model, module)}.{leaf}"
            if name not in state.shardings or any(name in names for names in places.values()):
                continue
            source = find_source(name)
            places[place] = [source, *(other for other in named if other != source and find_source(other) == source)]
        return cls(model, state, places, named)

    @property
    def names(self) -> set[str]:
        """All names of the weights."""
        return {name for names in self.places.values() for name in names}

    def shardings(self, size: int) -> dict[str, Any]:
        """Returns the model's shardings with tables of `size` tokens."""
        return {
            name: replace(sharding, shape=(size, *sharding.shape[1:])) if name in self.names else sharding
            for name, sharding in self.state.shardings.items()
        }

    def gather_full(self, place: str) -> Tensor:
        """Returns a full copy of a weight, of any shape, in CPU memory of every rank; collective."""
        state, source = self.state, self.places[place][0]
        local = [self.named[name] for name in self.places[place] if not is_off_stage(self.named[name])]
        full = gather_full_tensor(local[0]) if local else torch.empty(0)
        if state.cut is not None:
            owner = state.cut.owner(source)
            if not local:
                like = self.named[source]
                full = torch.empty(like.shape, dtype=like.dtype, device=state.mesh.device)
            dist.broadcast(full.contiguous(), group=state.mesh.pp_group, group_src=owner)
        return full.cpu()

    @torch.no_grad()
    def take(self, full: dict[str, Tensor]) -> list[Tensor]:
        """Shards resized full weights, of any shape; returns the parameters that were replaced."""
        olds: dict[int, Tensor] = {}
        for place, names in self.places.items():
            for name in names:
                old = self.named[name]
                if is_off_stage(old):
                    path, _, leaf = name.rpartition(".")
                    self.model.get_submodule(path).resize_weight(leaf, full[place].shape)
                elif id(old) not in olds:
                    self._replace(old, name, full[place])
                olds[id(old)] = old
        self.state.shardings.update(self.shardings(len(full["embedding"])))
        return list(olds.values())

    def _replace(self, old: nn.Parameter, name: str, full: Tensor) -> None:
        """Replaces a parameter, under all its names, by this rank's shard of a full tensor `[...]`."""
        state = self.state
        local = local_part(full, state.placement(name), state.axes).to(state.mesh.device)
        if state.shards(name):
            new = replace_sharded(self.model, old, local, full.shape)
        else:
            value = resized_dtensor(local, old, full.shape) if isinstance(old, DTensor) else local
            new = nn.Parameter(value, requires_grad=old.requires_grad)
        new._is_hf_initialized = True  # type: ignore[attr-defined]
        for module in self.model.modules():
            for leaf, parameter in module._parameters.items():
                if parameter is old:
                    module._parameters[leaf] = new


class FullTables:
    """Plain modules with full copies of the embedding's and the head's weights.

    Args:
        embedding, head: the model's own modules.
        full: place of a weight -> full tensor; see `_Weights`.
    """

    def __init__(self, embedding: Any, head: Any, full: dict[str, Tensor]):
        size, width = full["embedding"].shape
        self.embedding: Any = nn.Embedding(size, width, padding_idx=embedding.padding_idx, _weight=full["embedding"])
        self.embedding.requires_grad_(embedding.weight.requires_grad)
        self.head: Any = None
        if head is None:
            return
        weight = nn.Parameter(full["head"]) if "head" in full else self.embedding.weight
        if isinstance(head, nn.Embedding):
            self.head = nn.Embedding(weight.shape[0], weight.shape[1], _weight=weight)
        else:
            with torch.device("meta"):
                self.head = nn.Linear(weight.shape[1], weight.shape[0], bias="bias" in full)
        self.head.weight = weight
        if "bias" in full:
            self.head.bias = nn.Parameter(full["bias"])

    @contextmanager
    def installed_in(self, model: Any) -> Iterator[None]:
        """Makes the model's accessors return and replace these modules inside."""
        replaced = {
            "get_input_embeddings": lambda: self.embedding,
            "set_input_embeddings": lambda module: setattr(self, "embedding", module),
            "get_output_embeddings": lambda: self.head,
            "set_output_embeddings": lambda module: setattr(self, "head", module),
            # Parameters stay tied: they are replaced under all their names.
            "tie_weights": lambda: None,
        }
        before = {name: vars(model)[name] for name in replaced if name in vars(model)}
        vars(model).update(replaced)
        try:
            yield
        finally:
            for name in replaced:
                del vars(model)[name]
            vars(model).update(before)

    def weights(self) -> dict[str, Tensor]:
        """Returns the full weights, of any shape, by their places."""
        weights = {"embedding": self.embedding.weight.data}
        if self.head is None:
            return weights
        weights["head"] = self.head.weight.data
        if getattr(self.head, "bias", None) is not None:
            bias = self.head.bias.data
            # `tie_weights` pads the bias of a tied head.
            weights["bias"] = F.pad(bias, (0, len(weights["head"]) - len(bias)))
        return weights
