"""XLM and FlauBERT: sublayers are in parallel module lists, and the layer loop adds their outputs to the residual."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import base_prefix, corrected_spec


@register_model("xlm")
@register_model("flaubert")
def xlm(model: Any) -> ModelSpec:
    prefix = base_prefix(model)
    # With `pre_norm` the loop adds the output of a layer's last sublayer to an intermediate value of that layer.
    adds_last = bool(getattr(model.config, "pre_norm", False))
    return corrected_spec(
        model,
        layers=f"{prefix}layer_norm2",
        sublayer_lists=tuple(f"{prefix}{name}" for name in ("attentions", "layer_norm1", "ffns")),
        no_pipeline=(
            "with pre_norm its layer loop adds the sublayer outputs of a layer after its last sublayer. Load it with "
            "pp_size=1."
        )
        if adds_last
        else None,
        no_context_parallel="its layer loop modifies hidden states between the sublayers of a layer.",
    )
