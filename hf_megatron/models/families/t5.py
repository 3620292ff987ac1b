"""T5: relative positions are an embedding with one column per head; cross-attention reads two inputs."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import base_prefix, family_spec
from ..type_facts import TypeFacts, register_facts


@register_model("t5")
def t5(model: Any) -> ModelSpec:
    base = model.base_model
    plan, local_attributes, regions, containers = {"shared": "embedding_rowwise"}, {}, {}, []
    for stack in ("encoder", "decoder"):
        if stack not in base._modules:
            continue
        plan[f"{stack}.embed_tokens"] = "embedding_rowwise"
        layer = f"{stack}.block.*.layer.*"
        containers.append(layer)
        attentions = ["SelfAttention", "EncDecAttention"] if stack == "decoder" else ["SelfAttention"]
        for attention in attentions:
            plan |= {f"{layer}.{attention}.{name}": "colwise" for name in "qkv"} | {f"{layer}.{attention}.o": "rowwise"}
            local_attributes[f"{layer}.{attention}"] = ("n_heads", "inner_dim")
        plan[f"{layer}.SelfAttention.relative_attention_bias.weight"] = "shard_dim_-1"
        regions[f"{layer}.SelfAttention"] = f"{layer}.SelfAttention.o"
        wide = ("wi_0", "wi_1") if model.config.is_gated_act else ("wi",)
        plan |= {f"{layer}.DenseReluDense.{name}": "colwise" for name in wide}
        plan[f"{layer}.DenseReluDense.wo"] = "rowwise"
    return family_spec(
        model,
        plan,
        local_attributes=local_attributes,
        regions=regions,
        multi_input_blocks=tuple(name for name in local_attributes if name.endswith("EncDecAttention")),
        pointwise_containers=tuple(containers),
        # Listed explicitly, because image encoders around a T5 have layer stacks too.
        layer_stacks=tuple(f"{base_prefix(model)}{pattern.partition('.*')[0]}" for pattern in containers),
    )


register_facts(
    "t5",
    facts=TypeFacts(
        # Every checkpoint sets it; the label shift needs it.
        defaults={"decoder_start_token_id": 0},
        # T5 v1.1 and similar checkpoints.
        variants=[
            {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
            {"feed_forward_proj": "gated-gelu"},
        ],
    ),
)
register_facts(
    "longt5",
    "switch_transformers",
    facts=TypeFacts(
        # Every checkpoint sets it; the label shift needs it.
        defaults={"decoder_start_token_id": 0},
    ),
)
register_facts(
    "pop2piano",
    facts=TypeFacts(
        # Every checkpoint sets it; the label shift needs it.
        defaults={"decoder_start_token_id": 0},
        no_gradient={r"^mel_conditioner\.": "read by generate() alone"},
    ),
)
