"""Derivation of a `ModelSpec` from the tensor parallel plan that transformers ships with an architecture."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..compat.transformers_models import KNOWN_STYLES, merged_tp_plan
from ..errors import PlanError
from .spec import ModelSpec, generic, module_name

# Module styles with the same name and meaning in transformers and here.
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
# Module styles that have another name in transformers.
MODULE_ALIASES: Mapping[str, str] = {
    "colwise_rep": "colwise_gather_output",
    "rowwise_rep": "rowwise_split_input",
    "moe_tp_experts": "partial_sum",
    "moe_identity_expert": "identity_expert",
    "local_params": "replicated",
    "replicate": "replicated",
}
# Styles of bare parameters (not a linear's weight). Only the dim to shard remains: there is no linear forward to wrap.
PARAMETER_ALIASES: Mapping[str, str] = {
    "colwise": "shard_dim_-2",
    "rowwise": "shard_dim_-1",
    "packed_colwise": "packed_dim_-2",
    "packed_rowwise": "packed_dim_-1",
    "replicate": "replicated",
}
_MODULE_STYLES = {**{style: style for style in SHARED_STYLES}, **MODULE_ALIASES}


def derive_spec(model: Any) -> ModelSpec:
    """Translates transformers' plan of a model (on any device, including meta) into this library's styles.

    The output embedding becomes a vocab-parallel head, so that logits stay sharded until the loss; a tied head has the
    sharding of its embedding. Rules that match nothing in this config are dropped: transformers has one plan for all
    variants of a type.

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
        raise PlanError(
            f"model type {model_type!r}: transformers' tensor parallel plan uses unknown styles {', '.join(unknown)}."
        )

    modules = {generic(name) for name, _ in model.named_modules()}
    parameters = {generic(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    plan: dict[str, str] = {}
    for pattern, style in upstream_plan.items():
        table = PARAMETER_ALIASES if pattern in parameters else _MODULE_STYLES if pattern in modules else None
        if table is None:
            continue
        if style not in table:
            raise PlanError(f"model type {model_type!r}: style {style!r} of {pattern} is not supported.")
        plan[pattern] = table[style]

    return ModelSpec.from_fields(model_type, plan=with_head(model, plan))


def has_layer_plan(model: Any) -> bool:
    """Returns whether transformers' plan of a model covers its layers, and not just its head."""
    return any("*" in pattern for pattern in merged_tp_plan(model))


def with_head(model: Any, plan: Mapping[str, str]) -> dict[str, str]:
    """Returns the plan with a vocab-parallel head, if it shards the head or the embedding that the head is tied to."""
    head, new_plan = model.get_output_embeddings(), dict(plan)
    if isinstance(head, nn.Linear):
        name, embedding = module_name(model, head), _find_tied_embedding(model, head)
        if plan.get(name) == "colwise_gather_output" or (
            name not in plan and plan.get(embedding) == "embedding_rowwise"
        ):
            new_plan[name] = "vocab_parallel_head"
            if embedding:
                # transformers plans the untied head only; a tied embedding must have the same vocabulary shard.
                new_plan.setdefault(embedding, "embedding_rowwise")
    return new_plan


def _find_tied_embedding(model: Any, head: nn.Linear) -> str:
    """Returns the name of the input embedding that a head is tied to, or an empty string."""
    embedding = model.get_input_embeddings()
    if embedding is None:
        return ""
    name = module_name(model, embedding)
    tied = model.all_tied_weights_keys.get(f"{module_name(model, head)}.weight") == f"{name}.weight"
    return name if tied else ""
