"""BitNet: norms over all attention features and all MLP features before the output linears."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import family_spec, gated_decoder_plan


@register_model("bitnet")
def bitnet(model: Any) -> ModelSpec:
    norms = dict.fromkeys(("layers.*.self_attn.attn_sub_norm", "layers.*.mlp.ffn_sub_norm"), "sharded_rms_norm")
    return family_spec(model, gated_decoder_plan() | norms)
