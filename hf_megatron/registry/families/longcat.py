"""LongCat-Flash: behind its experts there are some that hand tokens back as they are."""

from typing import Any

from ...spec import ModelSpec
from ..family import corrected_spec
from ..lookup import register_model


@register_model("longcat_flash")
def longcat_flash(model: Any) -> ModelSpec:
    return corrected_spec(
        model,
        no_expert_parallel=(
            "the gate_up_proj of its experts has rows for experts without weights, which their down_proj has not, so "
            "that equal shares of the two belong to other experts."
        ),
    )
