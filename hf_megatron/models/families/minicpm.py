"""MiniCPM vision models: placeholder tokens and patch merging."""

from ..type_facts import TypeFacts, register_facts

register_facts(
    "minicpm_ocr",
    facts=TypeFacts(
        # The default has no placeholder token.
        defaults={"image_token_id": 100, "video_token_id": 101},
        no_gradient={r"\.vit_merger\.": "merges patches in the other one of two modes"},
    ),
)
register_facts(
    "minicpmv4_6",
    "minicpmv4_7",
    facts=TypeFacts(
        # The default has no placeholder token.
        defaults={"image_token_id": 100, "video_token_id": 101},
    ),
)
