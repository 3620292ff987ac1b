"""Inkling: the experts' fused weight is two blocks, not one as in transformers' plan; shared experts beside them."""

from typing import Any

from ...spec import ModelSpec
from ..family import corrected_spec
from ..lookup import register_model


@register_model("inkling_text")
@register_model("inkling2_text")
def inkling_text(model: Any) -> ModelSpec:
    attends_to_layers = model.config.model_type == "inkling2_text"
    return corrected_spec(
        model,
        no_pipeline="every layer reads the outputs of all layers before it. Load it with pp_size=1."
        if attends_to_layers
        else None,
        no_sequence_parallel="every layer reads the outputs of all layers before it, on whole sequences."
        if attends_to_layers
        else None,
        corrections={
            "layers.*.mlp.experts.gate_up_proj": "packed_rows",
            # Their own parameters read the input, so that its gradient is summed as well.
            "layers.*.mlp.shared_experts": "partial_sum",
        },
    )
