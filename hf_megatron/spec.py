"""Plain frozen data: what a family's file states, and what is claimed of every parameter."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field


class GradientRule(enum.Enum):
    """What has to happen to a parameter's local gradient before it is the whole model's gradient."""

    COMPLETE = "complete"
    SUM_TP = "sum over tp"
    SUM_COPIES = "sum over copies"


@dataclass(frozen=True)
class Placement:
    """How one parameter lies over the tp axis.

    Args:
        dim (`int`, *optional*): the tensor dim that is split, counted from 0; `None` keeps the parameter whole.
        groups (`int`, defaults to 1): the dim consists of this many equal blocks and each of them is split, as in
            packed gate/up (2) and fused query/key/value (3).
        copies (`int`, defaults to 1): this many neighbouring ranks hold the same shard, as with fewer KV heads than
            ranks.
    """

    dim: int | None = None
    groups: int = 1
    copies: int = 1

    def intervals(self, size: int, parts: int, rank: int) -> list[tuple[int, int]]:
        """The `[start, stop)` ranges of the split dim that `rank` of `parts` holds, for a dim of `size` entries.

        Uneven sizes follow `torch.chunk`: the first ranks take `ceil(size / parts)`, the last may be empty.
        """
        if self.dim is None:
            return [(0, size)]
        shards, shard = parts // self.copies, rank // self.copies
        block = size // self.groups
        width = -(-block // shards)
        ranges = []
        for group in range(self.groups):
            start = min(shard * width, block)
            stop = min(start + width, block)
            ranges.append((group * block + start, group * block + stop))
        return ranges

    def __str__(self) -> str:
        if self.dim is None:
            return "replicated"
        text = f"split dim {self.dim}"
        if self.groups > 1:
            text += f" in {self.groups} blocks"
        if self.copies > 1:
            text += f", {self.copies} copies"
        return text


@dataclass(frozen=True)
class Claim:
    """One row of the plan: a parameter, who claimed it, where it lies and what its gradient needs."""

    name: str
    shape: tuple[int, ...]
    style: str
    placement: Placement
    gradient: GradientRule


@dataclass(frozen=True)
class ModelSpec:
    """What one model type needs to know to run in parallel; every entry is stated once and the mesh decides.

    Patterns are dotted module or parameter names in which `*` stands for one number, as in transformers' plans.

    Args:
        model_type (`str`): `config.model_type`.
        plan (`Mapping[str, str]`): module or parameter pattern -> name of a style.
        local_attributes (`Mapping[str, tuple[str, ...]]`): module pattern -> attributes that count heads or widths and
            are divided by tp_size.
        local_arguments (`Mapping[str, tuple[str, ...]]`): attention block pattern -> keyword arguments that hold one
            entry per head and are cut to this rank's heads, such as alibi.
        regions (`Mapping[str, str]`): block pattern -> row linear pattern, for uniform blocks whose row linear is not
            their child (see `tensor_parallel/region.py`).
        several_inputs (`tuple[str, ...]`): blocks whose linears read more than one tensor, as in cross attention.
        transparent (`tuple[str, ...]`): wrappers inside a layer that only chain norms, dropout and blocks.
        sequence_arguments (`tuple[str, ...]`): arguments of a layer that hold one entry per token, `[batch, sequence,
            ...]`, and are split along the sequence like its hidden states.
        stacks (`tuple[str, ...]`): the layer stacks whose residual stream sequence parallelism splits; empty means
            that they are found by structure.
        plain_linear_classes (`tuple[str, ...]`): subclasses of nn.Linear whose forward is the plain product.
        no_sequence_parallel (`str`, *optional*): why the type has no sequence parallelism.
        layers (`str`, *optional*): the module list that a pipeline cuts; by default the one of the class's
            `_no_split_modules`.
        after_layers (`tuple[str, ...]`): modules that run after the layers although they are defined before them.
        no_pipeline (`str`, *optional*): why the type's layers cannot lie on different ranks.
    """

    model_type: str
    plan: Mapping[str, str] = field(default_factory=dict)
    local_attributes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    local_arguments: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    regions: Mapping[str, str] = field(default_factory=dict)
    several_inputs: tuple[str, ...] = ()
    transparent: tuple[str, ...] = ()
    sequence_arguments: tuple[str, ...] = ()
    stacks: tuple[str, ...] = ()
    plain_linear_classes: tuple[str, ...] = ()
    no_sequence_parallel: str | None = None
    layers: str | None = None
    after_layers: tuple[str, ...] = ()
    no_pipeline: str | None = None
