"""Qwen 4 (experimental): gated residual connections work on each token by itself, so they run on split sequences."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import corrected_spec
from .delta_net import BLOCK, OF_QWEN3_5

CONNECTIONS = ("layers.*.attn_hyper_connection", "layers.*.mlp_hyper_connection")


@register_model("qwen4_exp_text")
def qwen4_exp_text(model: Any) -> ModelSpec:
    # transformers splits the first of two small projections, which would sum over ranks that hold different tokens.
    unsharded = {f"{connection}.input_mix_weight_down": "replicated" for connection in CONNECTIONS}
    return corrected_spec(model, unsharded, pointwise_containers=CONNECTIONS, head_sharded_blocks={BLOCK: OF_QWEN3_5})
