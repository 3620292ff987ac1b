"""How tensors of a model and of Megatron correspond: reversible operations, and rules that say where each applies.

An operation changes order, padding and shapes but no entry, so what holds for a weight holds for its moments. All run
on meta tensors too, which is how shapes are known before anything is read.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.io.buffer_pool import FRESH, Memory
from ...errors import CheckpointError
from ..interfaces import same_bytes


class Operation(ABC):
    """Turns tensors of the model into tensors of Megatron and back; results are views, or lie in `memory`."""

    @abstractmethod
    def to_megatron(self, tensors: Sequence[Tensor], memory: Memory = FRESH) -> list[Tensor]:
        """Makes tensors of Megatron, `[rows, ...]` or as the operation says, of those of the model."""

    @abstractmethod
    def to_transformers(self, tensors: Sequence[Tensor], memory: Memory = FRESH) -> list[Tensor]:
        """Makes tensors of the model, `[rows, ...]` or as the operation says, of those of Megatron."""


@dataclass(frozen=True)
class Same(Operation):
    """Another name for the same tensor."""

    def to_megatron(self, tensors: Sequence[Tensor], memory: Memory = FRESH) -> list[Tensor]:
        return list(tensors)

    to_transformers = to_megatron


@dataclass(frozen=True)
class Transposed(Operation):
    """The last two dims exchanged (GPT-2's Conv1D, experts that are stored `[in, out]`)."""

    def to_megatron(self, tensors: Sequence[Tensor], memory: Memory = FRESH) -> list[Tensor]:
        return [tensor if tensor.dim() < 2 else memory.contiguous(tensor.transpose(-2, -1)) for tensor in tensors]

    to_transformers = to_megatron


@dataclass(frozen=True)
class Joined(Operation):
    """Several tensors one after another along a dim, of these lengths: gate and up."""

    sizes: tuple[int, ...]
    dim: int = 0

    def to_megatron(self, tensors: Sequence[Tensor], memory: Memory = FRESH) -> list[Tensor]:
        return [memory.joined(tensors, self.dim)]

    def to_transformers(self, tensors: Sequence[Tensor], memory: Memory = FRESH) -> list[Tensor]:
        (unsharded,) = tensors
        return [memory.contiguous(part) for part in unsharded.split(self.sizes, self.dim)]


@dataclass(frozen=True)
class Divided(Joined):
    """One tensor of the model that is several: the reverse of `Joined`."""

    to_megatron, to_transformers = Joined.to_transformers, Joined.to_megatron


@dataclass(frozen=True)
class GroupedQKV(Operation):
    """Query, key and value rows `[heads * head_dim, ...]` in one tensor, ordered [q ... q, k, v] per KV group.

    `megatron/core/transformer/attention.py`, `SelfAttention.get_query_key_value_tensors`; biases have the same order.
    """

    heads: int
    groups: int
    head_dim: int

    def to_megatron(self, tensors: Sequence[Tensor], memory: Memory = FRESH) -> list[Tensor]:
        rows = tuple(part.shape[0] for part in tensors)
        wanted = tuple(heads * self.head_dim for heads in (self.heads, self.groups, self.groups))
        if rows != wanted:
            raise CheckpointError(f"query, key and value have {rows} rows, expected {wanted}.")
        parts = [part.reshape(self.groups, -1, *part.shape[1:]) for part in tensors]
        return [memory.joined(parts, 1).view(-1, *tensors[0].shape[1:])]

    def to_transformers(self, tensors: Sequence[Tensor], memory: Memory = FRESH) -> list[Tensor]:
        (packed,) = tensors
        wanted = (self.heads + 2 * self.groups) * self.head_dim
        if packed.shape[0] != wanted:
            raise CheckpointError(f"query, key and value have {packed.shape[0]} rows together, expected {wanted}.")
        rows = packed.reshape(self.groups, -1, self.head_dim, *packed.shape[1:])
        queries = self.heads // self.groups
        parts = rows[:, :queries], rows[:, queries : queries + 1], rows[:, queries + 1 :]
        return [memory.contiguous(part).view(-1, *packed.shape[1:]) for part in parts]


@dataclass(frozen=True)
class GroupedKV(Operation):
    """Key and value rows `[heads * head_dim, ...]` of attention to others in one tensor, [k, v] per head."""

    heads: int
    head_dim: int

    def to_megatron(self, tensors: Sequence[Tensor], memory: Memory = FRESH) -> list[Tensor]:
        rows = [tensor.shape[0] for tensor in tensors]
        if rows != [self.heads * self.head_dim] * 2:
            raise CheckpointError(f"key and value have {rows} rows, expected {self.heads * self.head_dim} each.")
        parts = [part.reshape(self.heads, -1, *part.shape[1:]) for part in tensors]
        return [memory.joined(parts, 1).view(-1, *tensors[0].shape[1:])]

    def to_transformers(self, tensors: Sequence[Tensor], memory: Memory = FRESH) -> list[Tensor]:
        (packed,) = tensors
        if packed.shape[0] != 2 * self.heads * self.head_dim:
            raise CheckpointError(f"key and value have {packed.shape[0]} rows together, expected {self.heads} heads'.")
        rows = packed.reshape(self.heads, 2, self.head_dim, *packed.shape[1:])
        return [memory.contiguous(part).view(-1, *packed.shape[1:]) for part in rows.unbind(1)]


@dataclass(frozen=True)
class Interleaved(Operation):
    """Rows of a dim that alternate between `parts` in the model and stand one part after another in Megatron."""

    parts: int = 2
    dim: int = -2

    def to_megatron(self, tensors: Sequence[Tensor], memory: Memory = FRESH) -> list[Tensor]:
        (tensor,) = tensors
        dim = self.dim % tensor.dim()
        return [torch.cat(tensor.unflatten(dim, (-1, self.parts)).unbind(dim + 1), dim)]

    def to_transformers(self, tensors: Sequence[Tensor], memory: Memory = FRESH) -> list[Tensor]:
        (tensor,) = tensors
        dim = self.dim % tensor.dim()
        return [torch.stack(tensor.chunk(self.parts, dim), dim + 1).flatten(dim, dim + 1)]


@dataclass(frozen=True)
class InterleavedRows(Operation):
    """In each head's rows, `size` of them from `start` on: halves in the model, alternating in Megatron."""

    heads: int
    start: int
    size: int

    def to_megatron(self, tensors: Sequence[Tensor], memory: Memory = FRESH) -> list[Tensor]:
        return self._apply(tensors, Interleaved(dim=1).to_transformers)

    def to_transformers(self, tensors: Sequence[Tensor], memory: Memory = FRESH) -> list[Tensor]:
        return self._apply(tensors, Interleaved(dim=1).to_megatron)

    def _apply(self, tensors: Sequence[Tensor], order: Callable[[Sequence[Tensor]], list[Tensor]]) -> list[Tensor]:
        (tensor,) = tensors
        rows = tensor.reshape(self.heads, -1, *tensor.shape[1:])
        first, turned, last = rows.split((self.start, self.size, rows.shape[1] - self.start - self.size), 1)
        return [torch.cat([first, *order([turned]), last], 1).reshape(tensor.shape)]


@dataclass(frozen=True)
class PaddedVocabulary(Operation):
    """Rows of zeros behind the vocabulary, up to `padded`; they are cut off on the way back."""

    size: int
    padded: int

    def to_megatron(self, tensors: Sequence[Tensor], memory: Memory = FRESH) -> list[Tensor]:
        (tensor,) = tensors
        if self.padded == self.size:
            return [tensor]
        out = memory.like(tensor, (self.padded, *tensor.shape[1:]))
        out[: self.size] = tensor
        out[self.size :] = 0
        return [out]

    def to_transformers(self, tensors: Sequence[Tensor], memory: Memory = FRESH) -> list[Tensor]:
        (tensor,) = tensors
        return [tensor[: self.size]]


@dataclass(frozen=True)
class Reshaped(Operation):
    """The same entries in another shape: `[width]` in the model, `[1, ..., width]` in Megatron."""

    dims: int

    def to_megatron(self, tensors: Sequence[Tensor], memory: Memory = FRESH) -> list[Tensor]:
        return [tensor.reshape((1,) * (self.dims - 1) + tuple(tensor.shape)) for tensor in tensors]

    def to_transformers(self, tensors: Sequence[Tensor], memory: Memory = FRESH) -> list[Tensor]:
        if any(tensor.shape[:-1].numel() != 1 for tensor in tensors):
            raise CheckpointError(f"expected one row, found the shape {tuple(tensors[0].shape)}.")
        return [tensor.reshape(tensor.shape[-1]) for tensor in tensors]


@dataclass(frozen=True)
class Copied(Operation):
    """One tensor of the model that Megatron has under several names; of moments it may have them under one."""

    count: int

    def to_megatron(self, tensors: Sequence[Tensor], memory: Memory = FRESH) -> list[Tensor]:
        (tensor,) = tensors
        return [tensor] * self.count

    def to_transformers(self, tensors: Sequence[Tensor], memory: Memory = FRESH) -> list[Tensor]:
        first, *others = tensors
        if not first.is_meta and not all(same_bytes(first, other) for other in others):
            raise CheckpointError(f"{self.count} copies of a tensor of shape {list(first.shape)} differ.")
        return [first]


@dataclass(frozen=True)
class Chain(Operation):
    """Operations one after another, in the order towards Megatron."""

    operations: tuple[Operation, ...]

    def to_megatron(self, tensors: Sequence[Tensor], memory: Memory = FRESH) -> list[Tensor]:
        result = list(tensors)
        for operation in self.operations:
            result = operation.to_megatron(result, memory)
        return result

    def to_transformers(self, tensors: Sequence[Tensor], memory: Memory = FRESH) -> list[Tensor]:
        result = list(tensors)
        for operation in reversed(self.operations):
            result = operation.to_transformers(result, memory)
        return result


@dataclass(frozen=True)
class Rule:
    """Tensors of a model that one operation turns into tensors of Megatron, names without placeholders.

    Args:
        absent: what the model's weights are filled with where a checkpoint has none: no computation reads them, and
            Megatron has no module for them. `None`: every checkpoint has them.
    """

    transformers: tuple[str, ...]
    megatron: tuple[str, ...]
    operation: Operation = Same()
    off_stage: float | None = None

    @property
    def copied(self) -> bool:
        """Whether Megatron has one tensor under all of the names."""
        return isinstance(self.operation, Copied) or (
            isinstance(self.operation, Chain) and isinstance(self.operation.operations[-1], Copied)
        )
