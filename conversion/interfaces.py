"""What every checkpoint format looks like to a conversion: named global tensors, read and written one at a time.

Two namings exist. `transformers`: the names of a model in memory, as `state_dict()` has them, a tied weight under its
first name; experts are packed as the model has them. `megatron`: Megatron-Core's names with the layer's global number
in them (`decoder.layers.3.mlp.linear_fc1.weight`) and global shapes, however a format stacks or splits them on disk.
`families/` leads from one to the other.
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
# fp32 copies of weights, and Adam's moments: they have the shape of the weight and are converted as it is.
MAIN_WEIGHT, EXP_AVG, EXP_AVG_SQ = "main_weight", "exp_avg", "exp_avg_sq"
MOMENTS = (EXP_AVG, EXP_AVG_SQ)
# What torch's AdamW keeps of a group (torch.optim.AdamW); all of them have to be there for it to be loaded.
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


# Of Megatron-LM: the tokenizer's file or model, or its kind alone.
_TOKENIZER_ARGUMENTS = ("tokenizer_model", "vocab_file", "tokenizer_type")


class Key(NamedTuple):
    """A tensor of a checkpoint: a weight, or what an optimizer keeps of that weight."""

    kind: str
    name: str

    def __str__(self) -> str:
        return self.name if self.kind == WEIGHT else f"{self.kind} of {self.name}"


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """Checks whether two tensors, of any shape and of one dtype, hold the same bytes; NaN equals itself."""
    return torch.equal(*(tensor.contiguous().view(-1).view(torch.uint8) for tensor in (one, other)))


def largest(entries: Mapping[Key, TensorMeta]) -> int:
    """Returns the bytes of the largest of some tensors."""
    return max((entry.nbytes for entry in entries.values()), default=0)


@dataclass(frozen=True)
class OptimizerState:
    """What an Adam optimizer keeps beside its tensors.

    Attributes:
        step: optimizer steps taken.
        hyperparameters: of each parameter group, for the reader's information.
    """

    step: int
    hyperparameters: tuple[Mapping[str, Any], ...] = ()


class Reader(ABC):
    """A checkpoint opened for reading.

    Attributes:
        entries: every tensor, in an order in which reading costs little memory.
        optimizer: of the optimizer whose moments are among the entries, `None` without.
        optimizer_unsupported_reason: why the state of an optimizer that is there is not among the entries, and what to
            do.
        memory: where what is read is put.
        iteration: optimizer steps of the run that wrote it, `None` where it is not known.
        architecture: the `Architecture` that the entries belong to.
        left_out: weights of the files that are not among the entries, as the model has no place for them.
        tokenizer: what the checkpoint calls the tokenizer of its run, `None` where it does not say.
        notes: what a user of its weights has to know.
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
        """Reads a whole tensor, of any shape, into CPU memory; it is the caller's own, or a view of a file.

        Raises:
            CheckpointError: naming the file and the tensor, for what is damaged or missing.
        """

    def close(self) -> None:  # noqa: B027 - most have nothing to let go of
        """Lets go of files; afterwards nothing is read."""

    def __enter__(self) -> "Reader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class MegatronReader(Reader):
    """A checkpoint under Megatron's names.

    Attributes:
        arguments: Megatron-LM's own, as far as the checkpoint has them.
    """

    arguments: Mapping[str, Any]

    @property
    def tokenizer(self) -> str | None:  # type: ignore[override]
        """The file or model of its tokenizer, or its kind."""
        found = (self.arguments.get(name) for name in _TOKENIZER_ARGUMENTS)
        return next((name for name in found if isinstance(name, str) and name != "NullTokenizer"), None)


class Writer(ABC):
    """A checkpoint being written into a directory that nobody sees yet.

    Args:
        plan: every tensor that will come, in the order in which it will come.
    """

    def __init__(self, plan: Mapping[Key, TensorMeta]):
        self.plan = plan
        self._missing = dict.fromkeys(plan)

    def check(self, key: Key, tensor: Tensor) -> None:
        """Checks that a tensor that arrives, of any shape, is the one that was planned."""
        if self.plan.get(key) != TensorMeta.of(tensor):
            raise CheckpointError(f"{key}: planned {self.plan.get(key)}, got {tuple(tensor.shape)} {tensor.dtype}.")

    def check_once(self, key: Key, tensor: Tensor) -> None:
        """Checks the same of a tensor of any shape, and that it has not come before."""
        self.check(key, tensor)
        if key not in self._missing:
            raise CheckpointError(f"{key} came twice.")
        del self._missing[key]

    def check_complete(self) -> None:
        """Checks that every planned tensor has come."""
        if self._missing:
            raise CheckpointError(f"{[str(key) for key in self._missing][:5]} were planned and never came.")

    def arrange(self, key: Key, tensor: Tensor) -> Iterable[tuple[Key, Tensor]]:
        """Returns what is to be written once a planned tensor, of any shape, has come, under `write`'s names.

        It is apart from `write` so that one thread may compute while another writes.
        """
        return [(key, tensor)]

    @abstractmethod
    def write(self, key: Key, tensor: Tensor) -> None:
        """Writes one tensor of any shape; it may be kept until others that belong to it have come, unchanged.

        Raises:
            CheckpointError: not what was planned.
        """

    @abstractmethod
    def finish(self) -> None:
        """Writes what remains; called once, after the last tensor.

        Raises:
            CheckpointError: naming planned tensors that never came.
        """


# As huggingface_hub reads them; a number alone is an `int`.
_SIZE = re.compile(r"[1-9]\d*|\d*\.?\d+ ?[KMGT]B", re.IGNORECASE)
# Megatron-LM's own is 128; a vocabulary is padded to a multiple of it.
_LARGEST_MULTIPLE = 65_536


@dataclass(frozen=True)
class TargetOptions:
    """How a written checkpoint is split, where its format knows of that.

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
            given = self.make_vocab_size_divisible_by
            raise ConfigError(f"make_vocab_size_divisible_by={given}: expected {_LARGEST_MULTIPLE} or less.")
        if not _SIZE.fullmatch(str(self.max_shard_size)):
            raise ConfigError(f"max_shard_size={self.max_shard_size!r}: expected bytes or a size such as 500MB or 5GB.")
        if str(self.max_shard_size).isdecimal():
            object.__setattr__(self, "max_shard_size", int(self.max_shard_size))


@dataclass(frozen=True)
class MegatronModel:
    """What Megatron's formats need to know of an architecture beside its tensors.

    Args:
        arguments: Megatron-LM's own arguments (`num_layers`, `hidden_size`, `num_query_groups`, ...).
        gated: whether `linear_fc1` holds gate and up, each split over tp by itself.
        block: what the module of the layers is called.
        prefix: what stands before the names of the language model's tensors, where it is a part of the model.
        sizes: what tensor-parallel ranks share besides heads and widths of an MLP, and how many of it there are.
        blocks: by the end of a tensor's name, names and numbers of the rows that ranks split by themselves, in order.
        stacked: whether `torch_dist` has one tensor for all layers where they are alike.
        extra_blocks: modules of layers besides `block`, and how many layers they have.
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
    def layers_of(self) -> Mapping[str, int]:
        """How many layers each module of layers has."""
        return {self.block: self.num_layers, **self.extra_blocks}

    @property
    def num_layers(self) -> int:
        return int(self.arguments["num_layers"])

    def blocks_of(self, name: str) -> Mapping[str, int]:
        """Returns the names and lengths of the blocks of a tensor's rows, none where it is one."""
        return next((blocks for end, blocks in self.blocks.items() if name.endswith(f".{end}")), {})
