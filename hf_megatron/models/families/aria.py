"""Aria: a projector that reads a known number of patches."""

from ..type_facts import UNREAD_LAST_NORM, TypeFacts, register_facts

register_facts(
    "aria",
    facts=TypeFacts(
        # The number of patches of a tiny image, of which the default names none.
        defaults={"projector_patch_to_query_dict": {16: 5}},
        no_gradient=UNREAD_LAST_NORM,
    ),
)
