"""PaddleOCR-VL: language model layers with M-RoPE."""

from ..type_facts import TypeFacts, register_facts

register_facts(
    "paddleocr_vl_text",
    facts=TypeFacts(
        # The default has no M-RoPE sections; the model then assumes the sections of a wide head.
        defaults={"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0, "mrope_section": [16, 24, 24]}},
    ),
)
