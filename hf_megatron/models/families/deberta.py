"""DeBERTa: all layers read relative position embeddings, computed once from a table and a norm outside the layers."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import base_prefix, corrected_spec
from ..type_facts import TypeFacts, register_facts


@register_model("deberta")
@register_model("deberta-v2")
def deberta(model: Any) -> ModelSpec:
    names = {name.removeprefix(base_prefix(model)) for name, _ in model.named_modules()}
    around = tuple(name for name in ("encoder.rel_embeddings", "encoder.LayerNorm") if name in names)
    return corrected_spec(model, before_layers=around, pre_layer_arguments=("rel_embeddings",) if around else ())


register_facts(
    "deberta-v2",
    facts=TypeFacts(
        # DeBERTa v3, as in all of its checkpoints.
        variants=[
            {
                **{"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 256},
                **{"share_att_key": True, "norm_rel_ebd": "layer_norm", "position_biased_input": False},
            }
        ],
    ),
)
