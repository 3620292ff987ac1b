"""A `ModelSpec` out of the tensor parallel plan that transformers ships with an architecture."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..compat.transformers_models import KNOWN_STYLES, merged_tp_plan
from ..errors import PlanError
from .name_patterns import generic, module_name
from .spec import ModelSpec

MODULE_STYLES: Mapping[str, str] = {
    "colwise": "column",
    "colwise_gather_output": "column_gather",
    "colwise_rep": "column_gather",
    "rowwise": "row",
    "rowwise_split_input": "row_split",
    "rowwise_rep": "row_split",
    "packed_colwise": "packed_column",
    "embedding_rowwise": "vocab_embedding",
    "embedding_colwise": "hidden_embedding",
    "replicated_with_grad_allreduce": "replicated_sum",
    "mla_kv_a_proj": "latent_with_rotary",
    "moe_tp_experts": "partial_sum",
    "moe_identity_expert": "shared_identity",
    "all_reduce": "output_sum",
    "local_params": "replicated",
    "replicate": "replicated",
}
PARAMETER_STYLES: Mapping[str, str] = {
    "colwise": "split_rows",
    "rowwise": "split_columns",
    "packed_colwise": "packed_rows",
    "packed_rowwise": "packed_columns",
    "replicate": "replicated",
}


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
        table = PARAMETER_STYLES if pattern in parameters else MODULE_STYLES if pattern in modules else None
        if table is None:
            continue
        if style not in table:
            raise PlanError(f"model type {model_type!r}: style {style!r} of {pattern} has no counterpart.")
        plan[pattern] = table[style]

    return ModelSpec(model_type, with_head(model, plan))


def has_plan_of_layers(model: Any) -> bool:
    """Tells whether transformers' plan of a model says something of its layers, and not of its head alone."""
    return any("*" in pattern for pattern in merged_tp_plan(model))


def with_head(model: Any, plan: Mapping[str, str]) -> dict[str, str]:
    """Returns a plan whose output embedding is split over the vocabulary, where its embedding or upstream's is."""
    head, whole = model.get_output_embeddings(), dict(plan)
    if isinstance(head, nn.Linear):
        name, embedding = module_name(model, head), _embedding_of(model, head)
        if plan.get(name) == "column_gather" or (name not in plan and plan.get(embedding) == "vocab_embedding"):
            whole[name] = "vocab_head"
            if embedding:
                # Upstream's plan is that of the untied head: of one weight both ends have the same rows.
                whole.setdefault(embedding, "vocab_embedding")
    return whole


def _embedding_of(model: Any, head: nn.Linear) -> str:
    """Returns the name of the input embedding that a head is tied to; an empty one without."""
    embedding = model.get_input_embeddings()
    if embedding is None:
        return ""
    name = module_name(model, embedding)
    tied = model.all_tied_weights_keys.get(f"{module_name(model, head)}.weight") == f"{name}.weight"
    return name if tied else ""
