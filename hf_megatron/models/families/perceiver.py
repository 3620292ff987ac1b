"""Perceiver: norms inside the attention modules; the head uses the token embedding."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import base_prefix, family_spec
from ..type_facts import TypeFacts, register_facts


@register_model("perceiver")
def perceiver(model: Any) -> ModelSpec:
    prefix = base_prefix(model)
    names = [name.removeprefix(prefix) for name, _ in model.named_modules()]
    crossing = [name for name in names if name.endswith("cross_attention")]
    layers = [*crossing, "encoder.self_attends.*"]
    columns = {f"{layer}.attention.self.{name}": "colwise" for layer in layers for name in ("query", "key", "value")}
    rows = {f"{layer}.attention.output.dense": "rowwise" for layer in layers}
    mlps = {f"{layer}.mlp.dense{n}": style for layer in layers for n, style in ((1, "colwise"), (2, "rowwise"))}
    attention = "encoder.self_attends.*.attention"
    return family_spec(
        model,
        # The norm feeds the column-parallel projections inside the attention, so its gradient is summed over ranks.
        {**columns, **rows, **mlps, f"{attention}.self.layernorm1": "replicated_with_grad_allreduce"},
        local_attributes={f"{layer}.attention.self": ("num_heads",) for layer in layers},
        regions={f"{attention}.self": f"{attention}.output.dense"},
        multi_input_blocks=tuple(f"{layer}.attention.self" for layer in crossing),
        pointwise_containers=(attention, f"{attention}.output"),
    )


register_facts(
    "perceiver",
    facts=TypeFacts(
        tiny={
            **{
                "d_latents": 64,
                "num_latents": 12,
                "num_self_attends_per_block": 3,
                "qk_channels": 32,
                "v_channels": 64,
            },
            **{"num_self_attention_heads": 4, "num_cross_attention_heads": 4},
        },
        min_row_length=64,
    ),
)
