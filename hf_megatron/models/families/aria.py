"""Aria: a projector with a fixed number of patches."""

from ..type_facts import UNREAD_LAST_NORM, TypeFacts, register_facts

register_facts(
    "aria",
    facts=TypeFacts(
        # The default has no entry for the number of patches of a tiny image.
        defaults={"projector_patch_to_query_dict": {16: 5}},
        no_gradient=UNREAD_LAST_NORM,
    ),
)
