"""AFMoE: a bias for expert selection that gets no gradient."""

from ..type_facts import TypeFacts, register_facts

register_facts(
    "afmoe",
    facts=TypeFacts(
        no_gradient={r"\.expert_bias$": "chooses experts: no gradient comes through a choice"},
    ),
)
