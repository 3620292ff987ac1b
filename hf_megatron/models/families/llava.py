"""LLaVA and its variants: image encoders whose features come from a layer before the last."""

from ..type_facts import UNREAD_LAST_NORM, TypeFacts, register_facts

register_facts(
    "llava",
    "llava_next",
    "llava_next_video",
    "llava_onevision",
    "vipllava",
    facts=TypeFacts(
        no_gradient=UNREAD_LAST_NORM,
    ),
)
register_facts(
    "video_llava",
    facts=TypeFacts(
        no_gradient=UNREAD_LAST_NORM,
        no_gradient_without={"videos": {r"\.video_tower\.": "reads videos: compared on images alone"}},
    ),
)
