"""RoFormer: a table outside the layers provides the rotary angles for all layers."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import corrected_spec
from ..type_facts import FIXED_POSITIONS, TypeFacts, register_facts


@register_model("roformer")
def roformer(model: Any) -> ModelSpec:
    return corrected_spec(
        model,
        # From transformers 5.24 the angles have a gradient, to which each rank's heads contribute.
        {"encoder.embed_positions": "replicated_with_grad_allreduce"},
        pre_layer_arguments=("sinusoidal_pos",),
        sequence_dims={"sinusoidal_pos": 2},
    )


register_facts(
    "roformer",
    facts=TypeFacts(
        no_gradient=FIXED_POSITIONS,
    ),
)
