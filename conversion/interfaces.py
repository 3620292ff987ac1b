"""Common interface of all checkpoint formats: named global tensors, read and written one at a time.

Two naming schemes exist. `transformers`: the names in a model's `state_dict()`, a tied weight under its first name;
experts are packed as in the model. `megatron`: Megatron-Core's names with the global layer index in them
(`decoder.layers.3.mlp.linear_fc1.weight`) and global shapes, however a format stacks or splits tensors on disk.
`families/` maps one to the other.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.io.buffer_pool import FRESH, Memory
from ..core.io.safetensors import TensorMeta
from ..errors import CheckpointError, ConfigError

WEIGHT = "weight"
# fp32 copies of weights, and Adam's moments. They have the shape of the weight and are converted the same way.
MAIN_WEIGHT, EXP_AVG, EXP_AVG_SQ = "main_weight", "exp_avg", "exp_avg_sq"
MOMENTS = (EXP_AVG, EXP_AVG_SQ)
# Settings of a parameter group of torch.optim.AdamW; torch loads a group only if all of them are present.
ADAMW: Mapping[str, Any] = MappingProxyType(
    {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.01,
        "amsgrad": False,
        "maximize": False,
        "foreach": None,
        "capturable": False,
        "differentiable": False,
        "fused": None,
        "decoupled_weight_decay": True,
    }
)


# Megatron-LM's arguments that identify the tokenizer: its file or model, or just its kind.
_TOKENIZER_ARGUMENTS = ("tokenizer_model", "vocab_file", "tokenizer_type")


class Key(NamedTuple):
    """A tensor of a checkpoint: a weight, or the optimizer state of a weight."""

    kind: str
    name: str

    def __str__(self) -> str:
        return self.name if self.kind == WEIGHT else f"{self.kind} of {self.name}"


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """Checks whether two tensors, of any shape and of one dtype, hold the same bytes; NaN equals itself."""
    return torch.equal(*(tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other)))


def largest(entries: Mapping[Key, TensorMeta]) -> int:
    """Returns the size in bytes of the largest tensor."""
    return max((entry.nbytes for entry in entries.values()), default=0)


@dataclass(frozen=True)
class OptimizerState:
    """Non-tensor state of an Adam optimizer.

    Attributes:
        step: optimizer steps taken.
        hyperparameters: settings of each parameter group, for the reader's information.
    """

    step: int
    hyperparameters: tuple[Mapping[str, Any], ...] = ()


class Reader(ABC):
    """A checkpoint opened for reading.

    Attributes:
        entries: every tensor, in an order that needs little memory to read.
        optimizer: state of the optimizer whose moments are among the entries, `None` if there are none.
        optimizer_unsupported_reason: if the checkpoint has optimizer state that is not among the entries, the reason
            and a remedy.
        memory: allocator for the tensors that are read.
        iteration: optimizer steps of the run that wrote the checkpoint, `None` if unknown.
        architecture: the `Architecture` that the entries belong to.
        left_out: weights in the files that are not among the entries because the model has no place for them.
        tokenizer: the tokenizer recorded by the training run, `None` if there is no record.
        notes: notes for users of the weights.
    """

    entries: Mapping[Key, TensorMeta]
    architecture: Any
    optimizer: OptimizerState | None = None
    optimizer_unsupported_reason: str | None = None
    iteration: int | None = None
    memory: Memory = FRESH
    left_out: tuple[str, ...] = ()
    tokenizer: str | None = None
    notes: tuple[str, ...] = ()

    @abstractmethod
    def read(self, key: Key) -> Tensor:
        """Reads a full tensor of any shape into CPU memory; the result belongs to the caller or is a view of a file.

        Raises:
            CheckpointError: naming the file and the tensor, if data is damaged or missing.
        """

    def close(self) -> None:  # noqa: B027 - most readers hold no resources
        """Closes the files; nothing can be read afterwards."""

    def __enter__(self) -> "Reader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class MegatronReader(Reader):
    """A checkpoint under Megatron's names.

    Attributes:
        arguments: Megatron-LM's arguments, as far as the checkpoint has them.
    """

    arguments: Mapping[str, Any]

    @property
    def tokenizer(self) -> str | None:  # type: ignore[override]
        """File or model of the tokenizer, or its kind."""
        values = (self.arguments.get(name) for name in _TOKENIZER_ARGUMENTS)
        return next((name for name in values if isinstance(name, str) and name != "NullTokenizer"), None)


class Writer(ABC):
    """A checkpoint that is being written into a directory not yet visible to readers.

    Args:
        plan: every tensor that will be written, in that order.
    """

    def __init__(self, plan: Mapping[Key, TensorMeta]):
        self.plan = plan
        self._missing = dict.fromkeys(plan)

    def check(self, key: Key, tensor: Tensor) -> None:
        """Checks that an incoming tensor of any shape has the planned shape and dtype."""
        if self.plan.get(key) != TensorMeta.of(tensor):
            raise CheckpointError(f"{key}: planned {self.plan.get(key)}, got {tuple(tensor.shape)} {tensor.dtype}.")

    def check_once(self, key: Key, tensor: Tensor) -> None:
        """Checks the same, and that the tensor has not been written before."""
        self.check(key, tensor)
        if key not in self._missing:
            raise CheckpointError(f"{key} was written twice.")
        del self._missing[key]

    def check_complete(self) -> None:
        """Checks that every planned tensor has been written."""
        if self._missing:
            raise CheckpointError(f"{[str(key) for key in self._missing][:5]} were planned but not written.")

    def arrange(self, key: Key, tensor: Tensor) -> Iterable[tuple[Key, Tensor]]:
        """Returns the tensors to pass to `write` after a planned tensor of any shape has arrived.

        Separate from `write` so that one thread can compute while another writes.
        """
        return [(key, tensor)]

    @abstractmethod
    def write(self, key: Key, tensor: Tensor) -> None:
        """Writes one tensor of any shape; may keep it until its group is complete, so it must not be modified.

        Raises:
            CheckpointError: the tensor was not planned.
        """

    @abstractmethod
    def finish(self) -> None:
        """Writes what remains; called once, after the last tensor.

        Raises:
            CheckpointError: naming planned tensors that were not written.
        """


# Sizes as huggingface_hub parses them; digits alone become an `int`.
_SIZE = re.compile(r"[1-9]\d*|\d*\.?\d+ ?[KMGT]B", re.IGNORECASE)
# Megatron-LM pads the vocabulary to a multiple of this setting, which defaults to 128.
_LARGEST_MULTIPLE = 65_536


@dataclass(frozen=True)
class TargetOptions:
    """Sizes by which a written checkpoint is split, for formats that support them.

    Args:
        tp_size, pp_size, ep_size: ranks of Megatron's legacy format; Megatron-Core's pads its vocabulary for `tp_size`,
            and stores moments for expert parallelism with `ep_size` above 1.
        make_vocab_size_divisible_by: the vocabulary of Megatron's formats is padded to a multiple of this times
            `tp_size` (`--make-vocab-size-divisible-by`).
        local_names: name norms in the legacy format as Megatron-Core's own layers do (`--transformer-impl local`), not
            as TransformerEngine's.
        max_shard_size: largest weight file of a Hugging Face folder, such as `"5GB"`.
    """

    tp_size: int = 1
    pp_size: int = 1
    ep_size: int = 1
    make_vocab_size_divisible_by: int = 128
    max_shard_size: int | str = "5GB"
    local_names: bool = False

    def __post_init__(self) -> None:
        for name in ("tp_size", "pp_size", "ep_size", "make_vocab_size_divisible_by"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: expected 1 or more.")
        if self.make_vocab_size_divisible_by > _LARGEST_MULTIPLE:
            multiple = self.make_vocab_size_divisible_by
            raise ConfigError(f"make_vocab_size_divisible_by={multiple}: expected {_LARGEST_MULTIPLE} or less.")
        if not _SIZE.fullmatch(str(self.max_shard_size)):
            raise ConfigError(f"max_shard_size={self.max_shard_size!r}: expected bytes or a size such as 500MB or 5GB.")
        if str(self.max_shard_size).isdecimal():
            object.__setattr__(self, "max_shard_size", int(self.max_shard_size))


@dataclass(frozen=True)
class MegatronModel:
    """Properties of an architecture that Megatron's formats need in addition to its tensors.

    Args:
        arguments: Megatron-LM's own arguments (`num_layers`, `hidden_size`, `num_query_groups`, ...).
        gated: whether `linear_fc1` holds gate and up, which tensor parallelism splits separately.
        block: name of the module that holds the layers.
        prefix: prefix of the language model's tensor names if it is part of a composite model.
        sizes: dimensions split over tensor-parallel ranks besides heads and MLP widths, by name.
        blocks: by suffix of a tensor's name, the names and lengths of the row blocks that are split separately, in
            order.
        stacked: whether `torch_dist` stores one tensor for all layers if they are identical.
        extra_blocks: additional modules with layers besides `block`, and their numbers of layers.
    """

    arguments: Mapping[str, Any]
    gated: bool
    block: str = "decoder"
    prefix: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)
    blocks: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    stacked: bool = True
    extra_blocks: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_layers_per_block(self) -> Mapping[str, int]:
        """Number of layers of each module that holds layers."""
        return {self.block: self.num_layers, **self.extra_blocks}

    @property
    def num_layers(self) -> int:
        return int(self.arguments["num_layers"])

    def blocks_of(self, name: str) -> Mapping[str, int]:
        """Returns the names and lengths of the row blocks of a tensor; empty if it is a single block."""
        return next((blocks for end, blocks in self.blocks.items() if name.endswith(f".{end}")), {})
