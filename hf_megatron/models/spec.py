"""`ModelSpec`: frozen parallelization spec of a model type, with one sub-record per parallel axis."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from ..errors import PlanError

# Attributes of a block whose product is the width of one segment (such as the queries) of a fused weight.
Width = tuple[str, ...]


@dataclass(frozen=True)
class HeadBlock:
    """Block whose heads are independent of each other between its input and output projections.

    Args:
        counts (`tuple[str, ...]`): Attributes that hold the number of heads or groups, or a width over all of them;
            attributes of the block's config are changed in a copy of the config.
        weights (`Mapping[str, tuple[int, tuple[Width, ...]]]`): Parameter or buffer of the block -> index of the dim
            along which its heads lie, and the widths of the segments along that dim, each with entries for every head,
            or `()` for a single segment. In Mamba, `in_proj.weight` holds states and gates in dim 0:
            `(0, (("intermediate_size",), ("intermediate_size",)))`.
        summed (`tuple[str, ...]`): Biases that are added once to the sum over all heads, such as `out_proj.bias`.
        norms (`tuple[str, ...]`): RMS norms over all heads, whose weights are listed in `weights`.
        all_head_linears (`tuple[str, ...]`): Linears without bias inside the block that read all heads and whose output
            every head reads, such as Mamba's `x_proj`, which computes time steps, B and C from all channels.
        groups (`str`, *optional*): Entry of `counts` that holds the number of groups, as in grouped-query attention; a
            single group is replicated on all tensor parallel ranks.
        norms_of_groups (`tuple[str, ...]`): Norms over the heads of one group, whose weights are listed in `weights`.
        lengths (`Mapping[str, str]`): Attribute -> the weight whose local size along the dim of its heads it holds.
        routers (`tuple[str, ...]`): Routers whose choices every head uses. Every rank also reads their logits, which
            are the last value that they return.
        interleave_rounds (`int`, defaults to 1): Number of times that the segments repeat along a weight, each time
            with an equal share of the heads, for a forward that splits its projections by a fixed number. CodeGen has
            4: its fused weight holds the segments of the first quarter of the heads, then of the second, and so on.
    """

    counts: tuple[str, ...]
    weights: Mapping[str, tuple[int, tuple[Width, ...]]]
    summed: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()
    all_head_linears: tuple[str, ...] = ()
    groups: str | None = None
    norms_of_groups: tuple[str, ...] = ()
    lengths: Mapping[str, str] = field(default_factory=dict)
    routers: tuple[str, ...] = ()
    interleave_rounds: int = 1


@dataclass(frozen=True)
class TensorParallelSpec:
    """Fields of a `ModelSpec` for tensor parallelism.

    Args:
        plan (`Mapping[str, str]`): Module or parameter pattern -> the name of its style, as listed in
            `tensor_parallel/styles.py`.
        local_attributes (`Mapping[str, tuple[str, ...]]`): Module pattern -> attributes that hold a number of heads or
            a width and are divided by tp_size, with the prefix `config.` where the module reads them from its config.
        local_arguments (`Mapping[str, tuple[str, ...]]`): Attention block pattern -> keyword arguments with one entry
            per head, such as ALiBi, which are sliced to the local heads.
        regions (`Mapping[str, str]`): Block pattern -> the pattern of its row-parallel linear, for uniform blocks whose
            row-parallel linear is not their child (see `tensor_parallel/region.py`).
        multi_input_blocks (`tuple[str, ...]`): Blocks whose linears read more than one tensor, as in cross-attention.
        plain_linear_classes (`tuple[str, ...]`): Subclasses of `nn.Linear` whose forward is a plain matrix product.
        no_cache (`str`, *optional*): Reason why tensor parallel ranks cannot keep the state that one call passes to
            the next.
    """

    plan: Mapping[str, str] = field(default_factory=dict)
    local_attributes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    local_arguments: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    regions: Mapping[str, str] = field(default_factory=dict)
    multi_input_blocks: tuple[str, ...] = ()
    plain_linear_classes: tuple[str, ...] = ()
    no_cache: str | None = None


@dataclass(frozen=True)
class SequenceParallelSpec:
    """Fields of a `ModelSpec` for sequence parallelism.

    Args:
        per_token_inputs (`Mapping[str, tuple[str, ...]]`): Pattern of a block that runs on the full sequence -> the
            arguments with one entry per token that it reads in addition to its first input.
        pointwise_containers (`tuple[str, ...]`): Modules inside a layer that only chain norms, dropout and blocks.
        per_token_arguments (`tuple[str, ...]`): Layer arguments with one entry per token, `[batch, sequence, ...]`,
            which are split along the sequence like the hidden states.
        sequence_dim (`int`, defaults to 1): Sequence dim of the hidden states, which is 1 for `[batch, sequence,
            hidden]` and 0 for `[sequence, batch, hidden]`.
        residual_streams_first (`bool`, defaults to `False`): Whether layers with several residual streams return them
            as `[streams, batch, sequence, hidden]` instead of `[batch, sequence, streams, hidden]`.
        unshardable_arguments (`Mapping[str, str]`): Layer argument -> the reason why a layer that gets it cannot run on
            a shard of the sequence.
        hidden_state_recorder (`str`, *optional*): Method of the module that contains the layers, which records the
            hidden states between layers passed as its first argument.
        layer_stacks (`tuple[str, ...]`): Module lists of layers whose residual stream is split along the sequence, or
            `()` to find them from the structure of the model.
        no_sequence_parallel (`str`, *optional*): Reason why the model type does not support sequence parallelism.
    """

    per_token_inputs: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    pointwise_containers: tuple[str, ...] = ()
    per_token_arguments: tuple[str, ...] = ()
    sequence_dim: int = 1
    residual_streams_first: bool = False
    unshardable_arguments: Mapping[str, str] = field(default_factory=dict)
    hidden_state_recorder: str | None = None
    layer_stacks: tuple[str, ...] = ()
    no_sequence_parallel: str | None = None


@dataclass(frozen=True)
class PipelineParallelSpec:
    """Fields of a `ModelSpec` for pipeline parallelism.

    Args:
        layers (`str`, *optional*): Module list that is partitioned into stages, by default the one of the classes in
            `_no_split_modules`.
        sublayer_lists (`tuple[str, ...]`): Module lists in addition to `layers`; before each layer, the layer loop
            calls their module with the same index.
        recorded_layers (`tuple[int, ...]`): Indices of the layers whose hidden states the layer loop keeps for all
            later layers.
        before_layers (`tuple[str, ...]`): Modules that run before the layers although they are defined after them, and
            parameters of the model itself that are read before the layers.
        after_layers (`tuple[str, ...]`): Modules that run after the layers although they are defined before them.
        after_encoder (`tuple[str, ...]`): Modules that run after the encoder's layers and before the decoder's layers.
        layer_num_outputs (`int`, defaults to 1): Number of values that a layer returns, including the hidden states,
            which are sent to the next stage.
        pre_layer_arguments (`tuple[str, ...]`): Layer arguments that the model computes before the layer loop, which
            later stages receive and also pass to the model's forward if that has an argument of the same name.
        mutable_layer_arguments (`tuple[str, ...]`): Layer arguments in which layers store tensors for later layers.
        no_zero_bubble (`str`, *optional*): Reason why the backward cannot be split into input gradients and weight
            gradients, as zero-bubble schedules do.
        no_pipeline (`str`, *optional*): Reason why the model type does not support pipeline parallelism.
        image_features_argument (`str`, *optional*): Argument that takes image features instead of images, filled with
            zeros if a stage or microbatch has no images; `a.b` is entry `b` of the mapping `a`.
        prefix_modules (`tuple[str, ...]`): Modules that compute features to prepend to the embedded text, such as image
            features, from arguments of the forward, and whose output length later stages need.
        run_on_all_stages (`tuple[str, ...]`): Modules before the layers that run on every stage because their output
            does not depend on their weights, or because only its shape is needed.
    """

    layers: str | None = None
    sublayer_lists: tuple[str, ...] = ()
    recorded_layers: tuple[int, ...] = ()
    before_layers: tuple[str, ...] = ()
    after_layers: tuple[str, ...] = ()
    after_encoder: tuple[str, ...] = ()
    layer_num_outputs: int = 1
    pre_layer_arguments: tuple[str, ...] = ()
    mutable_layer_arguments: tuple[str, ...] = ()
    no_zero_bubble: str | None = None
    no_pipeline: str | None = None
    image_features_argument: str | None = None
    prefix_modules: tuple[str, ...] = ()
    run_on_all_stages: tuple[str, ...] = ()


@dataclass(frozen=True)
class ContextParallelSpec:
    """Fields of a `ModelSpec` for context parallelism.

    Args:
        full_sequence_blocks (`tuple[str, ...]`): Blocks that mix tokens other than by transformers' attention functions
            and run on the full sequence, in addition to blocks with a cache of their own, which are found by structure.
        head_sharded_blocks (`Mapping[str, HeadBlock]`): Pattern of a block that runs on the full sequence -> how its
            heads are sharded over the ranks. Tensor parallelism reads it too.
        layer_parameters (`tuple[str, ...]`): Parameters of blocks that the enclosing layer itself adds to the hidden
            states.
        sequence_dims (`Mapping[str, int]`): Layer argument with one entry per token -> its sequence dim, which is 1
            for every entry of `per_token_arguments` that is not listed.
        no_context_parallel (`str`, *optional*): Reason why the model type does not support context parallelism.
    """

    full_sequence_blocks: tuple[str, ...] = ()
    head_sharded_blocks: Mapping[str, HeadBlock] = field(default_factory=dict)
    layer_parameters: tuple[str, ...] = ()
    sequence_dims: Mapping[str, int] = field(default_factory=dict)
    no_context_parallel: str | None = None


@dataclass(frozen=True)
class MoESpec:
    """Fields of a `ModelSpec` for mixture-of-experts layers.

    Args:
        experts (`Mapping[str, str]`): Module that holds all experts of a layer along dim 0 of each weight -> its
            attribute with their number. Classes with transformers' experts decorator are found without an entry.
        identity_experts (`Mapping[str, str]`): Module of experts -> its attribute with the number of identity experts,
            whose ids come after all other experts and whose entries along dim 0 of the weights, if any, are not read.
    """

    experts: Mapping[str, str] = field(default_factory=dict)
    identity_experts: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelSpec:
    """Parallelization spec of one model type, independent of the mesh layout.

    Patterns are dotted module or parameter names in which `*` matches one number, as in transformers' plans. Field
    names are unique across the sub-records, so that a field can be set by its name alone (`from_fields`, `updated`).

    Args:
        model_type (`str`): `config.model_type`.
        tp (`TensorParallelSpec`, *optional*): Fields for tensor parallelism.
        sp (`SequenceParallelSpec`, *optional*): Fields for sequence parallelism.
        pp (`PipelineParallelSpec`, *optional*): Fields for pipeline parallelism.
        cp (`ContextParallelSpec`, *optional*): Fields for context parallelism.
        moe (`MoESpec`, *optional*): Fields for mixture-of-experts layers.
    """

    model_type: str
    tp: TensorParallelSpec = field(default_factory=TensorParallelSpec)
    sp: SequenceParallelSpec = field(default_factory=SequenceParallelSpec)
    pp: PipelineParallelSpec = field(default_factory=PipelineParallelSpec)
    cp: ContextParallelSpec = field(default_factory=ContextParallelSpec)
    moe: MoESpec = field(default_factory=MoESpec)

    @classmethod
    def from_fields(cls, model_type: str, **values: Any) -> "ModelSpec":
        """Builds a spec from fields of the sub-records; raises `PlanError` for a name that no sub-record has."""
        return cls(model_type).updated(**values)

    def updated(self, *, model_type: str | None = None, **values: Any) -> "ModelSpec":
        """Returns a copy with some fields replaced; raises `PlanError` for a name that no sub-record has."""
        by_record: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            by_record.setdefault(_get_record_name(name), {})[name] = value
        records = {record: replace(getattr(self, record), **changes) for record, changes in by_record.items()}
        return replace(self, model_type=self.model_type if model_type is None else model_type, **records)

    def get_field(self, name: str) -> Any:
        """Returns the value of a field of a sub-record; raises `PlanError` for a name that no sub-record has."""
        return getattr(getattr(self, _get_record_name(name)), name)


_RECORDS: Mapping[str, Any] = {
    "tp": TensorParallelSpec,
    "sp": SequenceParallelSpec,
    "pp": PipelineParallelSpec,
    "cp": ContextParallelSpec,
    "moe": MoESpec,
}
_RECORD_OF_FIELD = {member.name: record for record, cls in _RECORDS.items() for member in fields(cls)}


def _get_record_name(name: str) -> str:
    """Returns the name of the sub-record that has a field; raises `PlanError` for an unknown field."""
    record = _RECORD_OF_FIELD.get(name)
    if record is None:
        raise PlanError(f"ModelSpec has no field {name!r}; its fields are {', '.join(sorted(_RECORD_OF_FIELD))}.")
    return record


def generic(name: str) -> str:
    """Replaces the numbers in a dotted name: `model.layers.3.mlp` becomes `model.layers.*.mlp`."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def lookup(name: str, table):
    """Returns the entry of `table` for a concrete name or for its pattern, or `None`."""
    return table.get(name) if name in table else table.get(generic(name))


def module_name(model, module) -> str:
    """Returns the dotted name of a module inside a model."""
    return next(name for name, other in model.named_modules() if other is module)
