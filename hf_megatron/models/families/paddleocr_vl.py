"""PaddleOCR-VL: text layers with positions in sections."""

from ..type_facts import TypeFacts, register_facts

register_facts(
    "paddleocr_vl_text",
    facts=TypeFacts(
        # No sections by default, where the model takes those of a wide head.
        defaults={"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0, "mrope_section": [16, 24, 24]}},
    ),
)
