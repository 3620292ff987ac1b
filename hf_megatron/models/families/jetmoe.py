"""JetMoE: attention experts with their own query and output projections and shared keys and values; MLP experts."""

from typing import Any

from ..registry import register_model
from ..spec import HeadBlock, ModelSpec
from ..spec_helpers import base_prefix, family_spec

ATTENTION = HeadBlock(
    ("num_heads", "num_key_value_heads", "kv_projection_size", "experts.hidden_size"),
    {
        "kv_proj.weight": (0, (("kv_projection_size",),) * 2),
        "experts.input_linear.weight": (1, ()),
        "experts.output_linear.weight": (2, ()),
    },
    summed=("experts.bias",),
    routers=("experts.router",),
)


@register_model("jetmoe")
def jetmoe(model: Any) -> ModelSpec:
    return family_spec(
        model,
        {
            "embed_tokens": "embedding_rowwise",
            "layers.*.mlp": "partial_sum",
            "layers.*.mlp.bias": "shared_bias",
            "layers.*.mlp.router": "router_logits",
            "layers.*.mlp.router.layer": "replicated_with_grad_allreduce",
            "layers.*.mlp.input_linear.weight": "packed_dim_-2",
            "layers.*.mlp.output_linear.weight": "shard_dim_-1",
        },
        head_sharded_blocks={f"{base_prefix(model)}layers.*.self_attention": ATTENTION},
    )
