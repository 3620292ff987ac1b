"""Mapping between tensors of a model and of Megatron: reversible operations, and rules that apply them.

An operation changes order, padding and shape but no value, so the same rule applies to a weight and its moments. All
operations also run on meta tensors, from which shapes are derived before anything is read.
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
    """Converts tensors of the model to Megatron's and back; results are views, or are allocated in `memory`."""

    @abstractmethod
    def to_megatron(self, tensors: Sequence[Tensor], memory: Memory = FRESH) -> list[Tensor]:
        """Converts tensors of the model to Megatron's, `[rows, ...]` or as stated by the operation."""

    @abstractmethod
    def to_transformers(self, tensors: Sequence[Tensor], memory: Memory = FRESH) -> list[Tensor]:
        """Converts Megatron's tensors to the model's, `[rows, ...]` or as stated by the operation."""


@dataclass(frozen=True)
class Same(Operation):
    """Identity: the same tensor under another name."""

    def to_megatron(self, tensors: Sequence[Tensor], memory: Memory = FRESH) -> list[Tensor]:
        return list(tensors)

    to_transformers = to_megatron


@dataclass(frozen=True)
class Transposed(Operation):
    """Swaps the last two dims (GPT-2's Conv1D, experts stored as `[in, out]`)."""

    def to_megatron(self, tensors: Sequence[Tensor], memory: Memory = FRESH) -> list[Tensor]:
        return [tensor if tensor.dim() < 2 else memory.contiguous(tensor.transpose(-2, -1)) for tensor in tensors]

    to_transformers = to_megatron


@dataclass(frozen=True)
class Joined(Operation):
    """Concatenates several tensors of these lengths along a dim, as gate and up."""

    sizes: tuple[int, ...]
    dim: int = 0

    def to_megatron(self, tensors: Sequence[Tensor], memory: Memory = FRESH) -> list[Tensor]:
        return [memory.joined(tensors, self.dim)]

    def to_transformers(self, tensors: Sequence[Tensor], memory: Memory = FRESH) -> list[Tensor]:
        (fused,) = tensors
        return [memory.contiguous(part) for part in fused.split(self.sizes, self.dim)]


@dataclass(frozen=True)
class Divided(Joined):
    """Splits one tensor of the model into several: the reverse of `Joined`."""

    to_megatron, to_transformers = Joined.to_transformers, Joined.to_megatron


@dataclass(frozen=True)
class GroupedQKV(Operation):
    """Packs query, key and value rows `[heads * head_dim, ...]` in one tensor, ordered [q ... q, k, v] per KV group.

    `megatron/core/transformer/attention.py`, `SelfAttention.get_query_key_value_tensors`; biases have the same order.
    """

    heads: int
    groups: int
    head_dim: int

    def to_megatron(self, tensors: Sequence[Tensor], memory: Memory = FRESH) -> list[Tensor]:
        rows = tuple(part.shape[0] for part in tensors)
        expected_sizes = tuple(heads * self.head_dim for heads in (self.heads, self.groups, self.groups))
        if rows != expected_sizes:
            raise CheckpointError(f"query, key and value have {rows} rows, expected {expected_sizes}.")
        parts = [part.reshape(self.groups, -1, *part.shape[1:]) for part in tensors]
        return [memory.joined(parts, 1).view(-1, *tensors[0].shape[1:])]

    def to_transformers(self, tensors: Sequence[Tensor], memory: Memory = FRESH) -> list[Tensor]:
        (packed,) = tensors
        expected_size = (self.heads + 2 * self.groups) * self.head_dim
        if packed.shape[0] != expected_size:
            raise CheckpointError(
                f"query, key and value have {packed.shape[0]} rows in total, expected {expected_size}."
            )
        rows = packed.reshape(self.groups, -1, self.head_dim, *packed.shape[1:])
        queries = self.heads // self.groups
        parts = rows[:, :queries], rows[:, queries : queries + 1], rows[:, queries + 1 :]
        return [memory.contiguous(part).view(-1, *packed.shape[1:]) for part in parts]


@dataclass(frozen=True)
class GroupedKV(Operation):
    """Packs key and value rows `[heads * head_dim, ...]` of cross-attention in one tensor, ordered [k, v] per head."""

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
            raise CheckpointError(
                f"key and value have {packed.shape[0]} rows in total, which do not match {self.heads} heads."
            )
        rows = packed.reshape(self.heads, 2, self.head_dim, *packed.shape[1:])
        return [memory.contiguous(part).view(-1, *packed.shape[1:]) for part in rows.unbind(1)]


@dataclass(frozen=True)
class Deinterleave(Operation):
    """De-interleaves a dim: `[a0 b0 a1 b1]` in the model is `[a0 a1 b0 b1]` in Megatron, for two `parts` a and b."""

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
class InterleaveHeadRows(Operation):
    """Interleaves `size` rows of each head: `[a0 a1 b0 b1]` in the model is `[a0 b0 a1 b1]` in Megatron."""

    heads: int
    start: int
    size: int

    def to_megatron(self, tensors: Sequence[Tensor], memory: Memory = FRESH) -> list[Tensor]:
        return self._apply(tensors, Deinterleave(dim=1).to_transformers)

    def to_transformers(self, tensors: Sequence[Tensor], memory: Memory = FRESH) -> list[Tensor]:
        return self._apply(tensors, Deinterleave(dim=1).to_megatron)

    def _apply(self, tensors: Sequence[Tensor], order: Callable[[Sequence[Tensor]], list[Tensor]]) -> list[Tensor]:
        (tensor,) = tensors
        rows = tensor.reshape(self.heads, -1, *tensor.shape[1:])
        first, turned, last = rows.split((self.start, self.size, rows.shape[1] - self.start - self.size), 1)
        return [torch.cat([first, *order([turned]), last], 1).reshape(tensor.shape)]


@dataclass(frozen=True)
class PaddedVocabulary(Operation):
    """Pads the vocabulary with zero rows up to `padded`; they are cut off on the way back."""

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
    """Adds leading dims of length 1: `[width]` in the model, `[1, ..., width]` in Megatron."""

    dims: int

    def to_megatron(self, tensors: Sequence[Tensor], memory: Memory = FRESH) -> list[Tensor]:
        return [tensor.reshape((1,) * (self.dims - 1) + tuple(tensor.shape)) for tensor in tensors]

    def to_transformers(self, tensors: Sequence[Tensor], memory: Memory = FRESH) -> list[Tensor]:
        if any(tensor.shape[:-1].numel() != 1 for tensor in tensors):
            raise CheckpointError(f"expected a single row, got shape {tuple(tensors[0].shape)}.")
        return [tensor.reshape(tensor.shape[-1]) for tensor in tensors]


@dataclass(frozen=True)
class Copied(Operation):
    """Copies one tensor of the model to Megatron's several names; its moments may be stored under a single name."""

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
    """A sequence of operations, applied in order towards Megatron."""

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
    """Tensors of a model that one operation converts to Megatron's; names contain no placeholders.

    Args:
        fill_value: fill value for weights of the model that a checkpoint may lack because no computation reads them and
            Megatron has no module for them. `None`: every checkpoint has them.
    """

    transformers: tuple[str, ...]
    megatron: tuple[str, ...]
    operation: Operation = Same()
    fill_value: float | None = None

    @property
    def copied(self) -> bool:
        """Whether Megatron has the same tensor under all of the names."""
        return isinstance(self.operation, Copied) or (
            isinstance(self.operation, Chain) and isinstance(self.operation.operations[-1], Copied)
        )
