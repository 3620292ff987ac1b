"""LUKE: layers compute and return the states of words and of entities."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import corrected_spec
from ..type_facts import TypeFacts, register_facts


@register_model("luke")
def luke(model: Any) -> ModelSpec:
    return corrected_spec(
        model,
        layer_num_outputs=2,
        no_sequence_parallel=(
            "its layers concatenate words and entities into one sequence, which is not possible with sequence shards."
        ),
    )


register_facts(
    "luke",
    facts=TypeFacts(
        # Size of the entity embedding table.
        tiny={"entity_vocab_size": 37, "entity_emb_size": 40},
        no_gradient={
            r"entity_predictions\.": "predicts entities: compared without labels of them",
            r"\.pooler\.": "read by heads of classes alone",
        },
    ),
)
