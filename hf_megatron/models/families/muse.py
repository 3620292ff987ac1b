"""Muse Spark: attention and experts missing in transformers' plan; a norm needs summed expert outputs."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import corrected_spec
from ..type_facts import UNHEARD_AUDIO, TypeFacts, register_facts

_ATTENTION = {f"layers.*.self_attn.{name}_proj": "colwise" for name in ("q", "k", "v", "gate")}
_EXPERTS = {
    "layers.*.mlp.experts.gate_up_proj": "packed_dim_-2",
    "layers.*.mlp.experts.down_proj": "shard_dim_-1",
    "layers.*.mlp.experts": "moe_inner_sum",
    "layers.*.mlp.experts.post_expert_norm": "norm_after_all_reduce",
}
# Gates that scale a block's output per token before it is added to the residual stream.
_GATES = ("layers.*.post_attention_residual_gate", "layers.*.post_feedforward_residual_gate")


@register_model("muse_spark_text")
def muse_spark_text(model: Any) -> ModelSpec:
    corrections = {
        "embed_tokens": "embedding_rowwise",
        "layers.*.self_attn.o_proj": "rowwise",
        **_ATTENTION,
        **_EXPERTS,
    }
    return corrected_spec(model, corrections, pointwise_containers=_GATES)


register_facts(
    "muse_spark_audio",
    facts=TypeFacts(
        # The default sizes are inconsistent with each other.
        defaults={"hidden_sizes": [8, 12, 16, 20], "depths": [1, 1, 1, 1]},
    ),
)
register_facts(
    "muse_spark",
    facts=TypeFacts(
        no_gradient_without=UNHEARD_AUDIO,
    ),
)
