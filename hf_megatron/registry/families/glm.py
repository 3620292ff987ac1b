"""GLM MoE DSA: layers hand the tokens that sparse attention looks at on to the layers behind them."""

from typing import Any

from ...spec import ModelSpec
from ..family import corrected_spec
from ..lookup import register_model


@register_model("glm_moe_dsa")
def glm_moe_dsa(model: Any) -> ModelSpec:
    return corrected_spec(
        model, no_pipeline="layers read the token indices that earlier layers chose. Load it with pp_size=1."
    )
