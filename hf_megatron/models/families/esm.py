"""ESM: a vocabulary of amino acid residues."""

from ..type_facts import TypeFacts, register_facts

register_facts(
    "esm",
    facts=TypeFacts(
        # The default has no vocabulary.
        defaults={"vocab_size": 33, "mask_token_id": 32, "pad_token_id": 1},
        no_gradient={r"\.contact_head\.": "predicts contacts of residues: read by no loss"},
    ),
)
