"""A `ModelSpec` out of the tensor parallel plan that transformers ships with an architecture."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..compat.transformers_models import KNOWN_STYLES, merged_tp_plan
from ..errors import PlanError
from .spec import ModelSpec, generic, module_name

# transformers' styles that mean the same here, for modules.
SHARED_STYLES = frozenset(
    (
        "colwise",
        "colwise_gather_output",
        "rowwise",
        "rowwise_split_input",
        "packed_colwise",
        "embedding_rowwise",
        "embedding_colwise",
        "replicated_with_grad_allreduce",
        "mla_kv_a_proj",
        "all_reduce",
    )
)
# Other names in transformers for a style of this library.
MODULE_ALIASES: Mapping[str, str] = {
    "colwise_rep": "colwise_gather_output",
    "rowwise_rep": "rowwise_split_input",
    "moe_tp_experts": "partial_sum",
    "moe_identity_expert": "identity_expert",
    "local_params": "replicated",
    "replicate": "replicated",
}
# A parameter that is no linear's weight is sharded along a dim: its module has no forward to replace.
PARAMETER_ALIASES: Mapping[str, str] = {
    "colwise": "shard_dim_-2",
    "rowwise": "shard_dim_-1",
    "packed_colwise": "packed_dim_-2",
    "packed_rowwise": "packed_dim_-1",
    "replicate": "replicated",
}
_MODULE_STYLES = {**{style: style for style in SHARED_STYLES}, **MODULE_ALIASES}


def derive_spec(model: Any) -> ModelSpec:
    """Translates the plan of a model (on any device, also meta) into this library's styles.

    The output embedding becomes a vocab-parallel head, so that logits stay split until the loss; a tied head follows
    its embedding. Rules that match nothing in this config are dropped: upstream states one plan for all variants.

    Raises:
        PlanError: the architecture has no plan, or uses a style this version does not know.
    """
    upstream_plan = merged_tp_plan(model)
    model_type = model.config.model_type
    if not upstream_plan:
        raise PlanError(
            f"model type {model_type!r} has neither a spec in hf_megatron nor a tensor parallel plan in transformers, "
            "and its structure is unknown; register one with hf_megatron.register_model (see CONTRIBUTING.md)."
        )
    unknown = sorted({style for style in upstream_plan.values() if style not in KNOWN_STYLES})
    if unknown:
        raise PlanError(f"model type {model_type!r}: transformers' plan uses unknown styles {', '.join(unknown)}.")

    modules = {generic(name) for name, _ in model.named_modules()}
    parameters = {generic(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    plan: dict[str, str] = {}
    for pattern, style in upstream_plan.items():
        table = PARAMETER_ALIASES if pattern in parameters else _MODULE_STYLES if pattern in modules else None
        if table is None:
            continue
        if style not in table:
            raise PlanError(f"model type {model_type!r}: style {style!r} of {pattern} has no counterpart.")
        plan[pattern] = table[style]

    return ModelSpec.from_fields(model_type, plan=with_head(model, plan))


def has_plan_of_layers(model: Any) -> bool:
    """Tells whether transformers' plan of a model says something of its layers, and not of its head alone."""
    return any("*" in pattern for pattern in merged_tp_plan(model))


def with_head(model: Any, plan: Mapping[str, str]) -> dict[str, str]:
    """Returns a plan whose output embedding is split over the vocabulary, where its embedding or upstream's is."""
    head, unsharded = model.get_output_embeddings(), dict(plan)
    if isinstance(head, nn.Linear):
        name, embedding = module_name(model, head), _embedding_of(model, head)
        if plan.get(name) == "colwise_gather_output" or (
            name not in plan and plan.get(embedding) == "embedding_rowwise"
        ):
            unsharded[name] = "vocab_parallel_head"
            if embedding:
                # Upstream's plan is that of the untied head: of one weight both ends have the same rows.
                unsharded.setdefault(embedding, "embedding_rowwise")
    return unsharded


def _embedding_of(model: Any, head: nn.Linear) -> str:
    """Returns the name of the input embedding that a head is tied to; an empty one without."""
    embedding = model.get_input_embeddings()
    if embedding is None:
        return ""
    name = module_name(model, embedding)
    tied = model.all_tied_weights_keys.get(f"{module_name(model, head)}.weight") == f"{name}.weight"
    return name if tied else ""
