"""Tensor parallel styles of modules and parameters, selected by name in a model type's plan.

| style | weight | communication |
|---|---|---|
| `colwise` | output features split | input copied (gradient summed), output stays split |
| `colwise_gather_output` | output features split | output gathered on every rank |
| `packed_colwise` / `fused_qkv` | 2 / 3 equal blocks of output features, each split | as `colwise` |
| `vocab_parallel_head` | vocabulary split | logits stay split until the loss, or are gathered |
| `rowwise` | input features split | input arrives split, output summed |
| `rowwise_split_input` | input features split | replicated input is split, output summed |
| `embedding_rowwise` | vocabulary split | lookups summed |
| `embedding_colwise` | hidden dim split | lookups gathered |
| `replicated` | replicated | none |
| `replicated_with_grad_allreduce` | replicated | sees only this rank's heads: gradient summed |
| `mla_kv_a_proj` | replicated | gradient of the rotary part of the output summed |
| `partial_sum` | by its parameters' own rules | inputs copied, output summed (experts) |
| `moe_inner_sum` | by its parameters' own rules | first input copied (experts with a `norm_after_all_reduce`) |
| `norm_after_all_reduce` | replicated | input summed |
| `expert_parallel` | unsharded experts, split over ep | none over tp: tokens are dispatched over ep |
| `router_logits` | none | gradient of a router's logits divided by tp inside a partial sum |
| `shared_bias` | one replicated parameter | added by every rank of a partial sum: each reads its share |
| `sharded_rms_norm` | features split | squares of all ranks summed |
| `per_head_norm` | replicated | this rank's heads use their norms |
| `all_reduce` | by its children's own rules | output summed |
| `identity_expert` | none | input divided by tp inside a partial sum |
| `synced_dropout` | none | draws the same random numbers on all ranks |
| `head_sharded` | by its parameters' own rules | inputs copied, output summed (state space mixers) |
| `shard_dim_0`, `shard_dim_1`, `shard_dim_2` | one parameter: dim 0, 1 or 2 | none |
| `packed_dim_0` | one parameter: dim 0 as 2 blocks | none |
| `gathered_dim_0`, `gathered_dim_1` | one parameter: dim 0 or 1, of several blocks | gathered before heads are read |
| `shard_dim_-2`, `packed_dim_-2` | one parameter: dim -2, plain or as 2 blocks | none |
| `shard_dim_-1`, `packed_dim_-1` | one parameter: dim -1, plain or as 2 blocks | none |
"""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from ..core.communication.rng import TensorParallelRng
from ..core.forward_hooks import ForwardHooks
from ..core.mesh import ParallelMesh
from ..core.placement import GradientRule, Placement
from ..errors import PlanError
from ..models.spec import HeadBlock
from .attention_heads import NormOfRanks, NormPerHead, check_norm_per_head, require_rms_norm
from .embedding import HiddenParallelEmbedding, VocabParallelEmbedding
from .experts import LatentWithRotary, NormOfSum, PartialSum, SharedIdentity, SharedLogits, SummedInside
from .head_sharded_blocks import PartialHeads
from .linear import ColumnParallelLinear, ParallelLinear, RowParallelLinear
from .local_parameters import ActiveForwards, swap_class
from .region import UniformRegion
from .vocab_parallel_head import VocabParallelHead

AXIS = "tp"


@dataclass
class ModuleContext:
    """Everything a style may read when it is installed on one module."""

    name: str
    mesh: ParallelMesh
    gradient: Mapping[str, GradientRule]
    rng: TensorParallelRng
    forwards: ActiveForwards
    hooks: ForwardHooks
    region: UniformRegion | None = None
    copies: int = 1
    rotary_dim: int | None = None
    heads: HeadBlock | None = None
    loss_chunk_size: int | None = None


def _is_transposed(module: nn.Module) -> bool:
    # transformers.pytorch_utils.Conv1D keeps its weight as [in, out] and names its output width `nf`.
    return type(module).__name__ == "Conv1D"


class Style:
    """Base style: replicated parameters, complete gradients, unchanged forward."""

    works_on_heads = False
    shares_sum = False
    is_column = False
    is_row = False
    splits = False

    def reads(self, parameter_name: str) -> bool:
        """Returns whether the style itself converts a parameter to its local tensor where the forward reads it."""
        return False

    def placement(self, parameter_name: str, parameter: Tensor, module: nn.Module) -> Placement:
        """Returns the placement of a parameter, of any shape."""
        return Placement()

    def gradient(self, placement: Placement) -> GradientRule:
        # Ranks with copies of the same shard each use it for other query heads: sum the gradient over them.
        shared = [split.copies for split in placement.splits if split.copies > 1]
        return GradientRule(sum=AXIS, copies=shared[0]) if shared else GradientRule()

    def check(self, module: nn.Module, name: str, plain_linear_classes: tuple[str, ...] = ()) -> None:
        """Raises `PlanError` when the style cannot be applied to this module."""

    def install(self, module: nn.Module, context: ModuleContext) -> None:
        """Installs the parallel forward on the module."""


class _Linear(Style):
    splits = True
    parallel_class: type[ParallelLinear]

    def __init__(self, name: str, **switches: bool):
        self.name, self.switches = name, switches

    def reads(self, parameter_name: str) -> bool:
        return True

    def check(self, module: nn.Module, name: str, plain_linear_classes: tuple[str, ...] = ()) -> None:
        plain = type(module).__name__ in plain_linear_classes or type(module).forward is nn.Linear.forward
        if not _is_transposed(module) and not (plain and isinstance(module, nn.Linear)):
            raise PlanError(
                f"{name} is a {type(module).__name__} with its own forward; style {self.name!r} supports only the "
                "forward of nn.Linear and Conv1D. Add the class to the family's `plain_linear_classes` if it computes "
                "the same."
            )

    def install(self, module: nn.Module, context: ModuleContext) -> None:
        transposed = _is_transposed(module)
        swap_class(module, self.parallel_class)
        assert isinstance(module, ParallelLinear)
        module.mesh = context.mesh
        module.region, module.rng, module.forwards = context.region, context.rng, context.forwards
        if transposed:
            module.weight_dim_out = 1
            # Conv1D keeps [in, out] and does not define these attributes.
            module.in_features, module.out_features = module.weight.shape
        module.copies = context.copies
        bias = context.gradient.get("bias")
        # A replicated bias that sees local tokens only: its gradient is summed over tp.
        module.sum_bias_gradient = bias is not None and bias.sum == AXIS and bias.copies is None
        for switch, value in self.switches.items():
            setattr(module, switch, value)


class _Column(_Linear):
    parallel_class = ColumnParallelLinear

    def __init__(self, name: str, *, groups: int = 1, gather_output: bool = False):
        super().__init__(name, gather_output=gather_output)
        self.groups, self.is_column = groups, not gather_output

    def placement(self, parameter_name: str, parameter: Tensor, module: nn.Module) -> Placement:
        transposed = _is_transposed(module) and parameter_name == "weight"
        return Placement.split(AXIS, 1 if transposed else 0, groups=self.groups)


class _Row(_Linear):
    parallel_class = RowParallelLinear

    def __init__(self, name: str, *, split_input: bool = False):
        super().__init__(name, split_input=split_input)
        self.is_row = not split_input

    def placement(self, parameter_name: str, parameter: Tensor, module: nn.Module) -> Placement:
        if parameter_name == "bias":
            # Replicated: it is added once, after the partial sums are reduced.
            return Placement()
        return Placement.split(AXIS, 0 if _is_transposed(module) else 1)


class _Head(_Column):
    parallel_class = VocabParallelHead

    def __init__(self) -> None:
        super().__init__("vocab_parallel_head")
        self.is_column = False

    def install(self, module: nn.Module, context: ModuleContext) -> None:
        super().install(module, context)
        assert isinstance(module, VocabParallelHead)
        module.loss_chunk_size = context.loss_chunk_size


class _Embedding(Style):
    splits = True

    def __init__(self, dim: int):
        self.dim = dim

    def reads(self, parameter_name: str) -> bool:
        return parameter_name == "weight"

    def placement(self, parameter_name: str, parameter: Tensor, module: nn.Module) -> Placement:
        # Some embeddings have parameters for special tokens in addition to the table.
        return Placement.split(AXIS, self.dim) if self.reads(parameter_name) else Placement()

    def check(self, module: nn.Module, name: str, plain_linear_classes: tuple[str, ...] = ()) -> None:
        if not isinstance(module, nn.Embedding):
            raise PlanError(f"{name} is a {type(module).__name__}; an embedding style needs an nn.Embedding.")

    def install(self, module: nn.Module, context: ModuleContext) -> None:
        # A subclass that scales its embeddings keeps its forward, which calls `super().forward()`.
        own_forward = type(module).forward is not nn.Embedding.forward
        swap_class(
            module, VocabParallelEmbedding if self.dim == 0 else HiddenParallelEmbedding, own_forward=own_forward
        )
        module.mesh = context.mesh  # type: ignore[assignment]


class _Replicated(Style):
    def __init__(self, sum_over: str | None = None):
        self.rule = GradientRule(sum=sum_over)
        self.works_on_heads = sum_over is not None

    def gradient(self, placement: Placement) -> GradientRule:
        return self.rule


class _Latent(Style):
    def install(self, module: nn.Module, context: ModuleContext) -> None:
        if context.rotary_dim is None:
            raise PlanError(f"{context.name}: the config has no qk_rope_head_dim, which style 'mla_kv_a_proj' needs.")
        LatentWithRotary(context.rotary_dim, context.mesh.tp_group).install(module, context.hooks)


class _PartialSum(Style):
    def __init__(self, *, copy_inputs: bool = True):
        self.copy_inputs = copy_inputs

    def gradient(self, placement: Placement) -> GradientRule:
        # A replicated parameter inside a partial sum gets a partial gradient.
        return GradientRule() if placement.is_split else GradientRule(sum=AXIS)

    def install(self, module: nn.Module, context: ModuleContext) -> None:
        PartialSum(context.mesh.tp_group, context.rng, copy_inputs=self.copy_inputs).install(module, context.hooks)


class _HeadsOfRank(Style):
    """Block whose weights are replicated; its spec's `head_sharded_blocks` defines the heads."""

    splits = True

    def gradient(self, placement: Placement) -> GradientRule:
        return GradientRule(sum=AXIS)

    def install(self, module: nn.Module, context: ModuleContext) -> None:
        assert context.heads is not None
        PartialHeads(context.heads, context.mesh.tp_group, context.rng).install(module, context.hooks)


class _SummedInside(Style):
    def install(self, module: nn.Module, context: ModuleContext) -> None:
        SummedInside(context.mesh.tp_group).install(module)


class _NormOfSum(Style):
    def install(self, module: nn.Module, context: ModuleContext) -> None:
        NormOfSum(context.mesh.tp_group).install(module)


class _Dispatched(Style):
    """Experts that expert parallelism places; their widths are not split."""

    splits = True


class _SharedIdentity(Style):
    def install(self, module: nn.Module, context: ModuleContext) -> None:
        SharedIdentity(context.mesh.tp_size).install(module)


class _SharedLogits(Style):
    def install(self, module: nn.Module, context: ModuleContext) -> None:
        SharedLogits(context.mesh.tp_size).install(module)


class _SharedAddend(Style):
    """Bare parameter that is added inside a partial sum."""

    shares_sum = True


class _NormPerHead(Style):
    works_on_heads = True

    def check(self, module: nn.Module, name: str, plain_linear_classes: tuple[str, ...] = ()) -> None:
        check_norm_per_head(module, name)

    def install(self, module: nn.Module, context: ModuleContext) -> None:
        swap_class(module, NormPerHead)
        module.mesh = context.mesh  # type: ignore[assignment]


class _NormOfRanks(Style):
    """RMS norm over the output features of a block's last linear, which are split over the ranks."""

    works_on_heads = True
    splits = True

    def placement(self, parameter_name: str, parameter: Tensor, module: nn.Module) -> Placement:
        return Placement.split(AXIS, 0)

    def check(self, module: nn.Module, name: str, plain_linear_classes: tuple[str, ...] = ()) -> None:
        require_rms_norm(module, name)

    def install(self, module: nn.Module, context: ModuleContext) -> None:
        swap_class(module, NormOfRanks)
        assert isinstance(module, NormOfRanks)
        # The weight is a DTensor: its shape is the global one.
        module.mesh, module.width = context.mesh, module.weight.shape[0]


class _SplitParameter(Style):
    """Bare parameter; its owner's forward reads it as a local tensor."""

    splits = True

    def __init__(self, dim: int, groups: int = 1):
        self.dim, self.groups = dim, groups

    def placement(self, parameter_name: str, parameter: Tensor, module: nn.Module) -> Placement:
        if parameter.dim() == 1:
            # A vector of output features is split like them; for a split of input features it is a bias, added once.
            return Placement.split(AXIS, 0, groups=self.groups) if self.dim == -2 else Placement()
        return Placement.split(AXIS, parameter.dim() + self.dim, groups=self.groups)


class _DrawsAlike(Style):
    """Dropout of replicated values inside a block where other modules draw for the rank's heads."""

    def install(self, module: nn.Module, context: ModuleContext) -> None:
        rng = context.rng
        module.register_forward_pre_hook(lambda *_: rng.use_shared_rng())
        module.register_forward_hook(lambda dropout, *_: rng.use_local_rng() if dropout.training else None)


class _SplitDim(Style):
    """Parameter of a block that reads it by heads."""

    splits = True

    def __init__(self, dim: int, groups: int = 1):
        self.dim, self.groups = dim, groups

    def placement(self, parameter_name: str, parameter: Tensor, module: nn.Module) -> Placement:
        return Placement.split(AXIS, self.dim, groups=self.groups)


STYLES: Mapping[str, Style] = {
    "colwise": _Column("colwise"),
    "colwise_gather_output": _Column("colwise_gather_output", gather_output=True),
    "packed_colwise": _Column("packed_colwise", groups=2),
    "fused_qkv": _Column("fused_qkv", groups=3),
    "vocab_parallel_head": _Head(),
    "rowwise": _Row("rowwise"),
    "rowwise_split_input": _Row("rowwise_split_input", split_input=True),
    "embedding_rowwise": _Embedding(0),
    "embedding_colwise": _Embedding(1),
    "replicated": _Replicated(),
    "replicated_with_grad_allreduce": _Replicated(sum_over=AXIS),
    "mla_kv_a_proj": _Latent(),
    "partial_sum": _PartialSum(),
    "all_reduce": _PartialSum(copy_inputs=False),
    "head_sharded": _HeadsOfRank(),
    "moe_inner_sum": _SummedInside(),
    "norm_after_all_reduce": _NormOfSum(),
    "expert_parallel": _Dispatched(),
    "identity_expert": _SharedIdentity(),
    "router_logits": _SharedLogits(),
    "shared_bias": _SharedAddend(),
    "sharded_rms_norm": _NormOfRanks(),
    "per_head_norm": _NormPerHead(),
    "synced_dropout": _DrawsAlike(),
    "shard_dim_0": _SplitDim(0),
    "shard_dim_1": _SplitDim(1),
    "shard_dim_2": _SplitDim(2),
    "packed_dim_0": _SplitDim(0, groups=2),
    "gathered_dim_0": _SplitDim(0),
    "gathered_dim_1": _SplitDim(1),
    "shard_dim_-2": _SplitParameter(-2),
    "shard_dim_-1": _SplitParameter(-1),
    "packed_dim_-2": _SplitParameter(-2, groups=2),
    "packed_dim_-1": _SplitParameter(-1, groups=2),
}


def style(name: str) -> Style:
    """Returns a style by name; raises `PlanError` with the known names for an unknown one."""
    if name not in STYLES:
        raise PlanError(f"Unknown style {name!r}; known: {', '.join(STYLES)}.")
    return STYLES[name]
