"""LongCat-Flash: identity experts, which return tokens unchanged, follow the routed experts."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import corrected_spec


@register_model("longcat_flash")
def longcat_flash(model: Any) -> ModelSpec:
    return corrected_spec(
        model,
        experts={"layers.*.mlp.experts": "num_routed_experts"},
        identity_experts={"layers.*.mlp.experts": "zero_expert_num"},
    )
