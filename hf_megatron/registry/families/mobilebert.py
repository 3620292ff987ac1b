"""MobileBERT: its head reads the table of tokens and a second one as one matrix; attention reads several tensors."""

from dataclasses import replace
from typing import Any

from ...spec import ModelSpec
from ..family import base_prefix, corrected_spec
from ..lookup import register_model


@register_model("mobilebert")
def mobilebert(model: Any) -> ModelSpec:
    attention = f"{base_prefix(model)}encoder.layer.*.attention.self"
    spec = corrected_spec(
        model,
        several_inputs=(attention,),
        no_sequence_parallel="its attention reads three tensors, each of which would have to be joined along the "
        "sequence.",
    )
    # Neither half of the joined matrix is called, and its rows are the vocabulary's in one half alone.
    ends = ("vocab_head", "vocab_embedding", "split_rows")
    return replace(
        spec,
        plan={name: style for name, style in spec.plan.items() if style not in ends},
        regions={block: row for block, row in spec.regions.items() if block != attention},
    )
