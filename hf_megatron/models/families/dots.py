"""dots: experts, sparse attention and audio inputs."""

from ..type_facts import SPARSE_INDEXER, UNHEARD_AUDIO, TypeFacts, register_facts

register_facts(
    "dots1",
    facts=TypeFacts(
        # The default has MoE layers but no experts.
        defaults={"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    ),
)
register_facts(
    "dots3_note_text",
    facts=TypeFacts(
        no_gradient=SPARSE_INDEXER,
    ),
)
register_facts(
    "dots3_note",
    facts=TypeFacts(
        no_gradient_without=UNHEARD_AUDIO,
    ),
)
