"""BigBird: its heads draw blocks of tokens one after another, and short texts exchange the attention of a model."""

from dataclasses import replace
from typing import Any

from ...spec import ModelSpec
from ..family import corrected_spec
from ..lookup import register_model


@register_model("big_bird")
def big_bird(model: Any) -> ModelSpec:
    spec = corrected_spec(model)

    def is_of_attention(name: str) -> bool:
        # Some of its heads alone would draw what others do, and a new module has no part of a block.
        return ".attention" in name or ".crossattention" in name

    return replace(
        spec,
        plan={name: style for name, style in spec.plan.items() if not is_of_attention(name)},
        local_attributes={},
        regions={block: row for block, row in spec.regions.items() if not is_of_attention(block)},
        transparent=tuple(name for name in spec.transparent if not is_of_attention(name)),
    )
