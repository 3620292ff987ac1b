"""MobileBERT: the head concatenates the token embedding and a second matrix; attention has several inputs."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import base_prefix, corrected_spec
from ..type_facts import TypeFacts, register_facts

_BOTTLENECKS = ("bottleneck", "bottleneck.input", "bottleneck.attention", "output.bottleneck")


@register_model("mobilebert")
def mobilebert(model: Any) -> ModelSpec:
    prefix = base_prefix(model)
    attention = f"{prefix}encoder.layer.*.attention"
    modules = {name for name, _ in model.get_submodule(f"{prefix}encoder.layer.0").named_modules()}
    spec = corrected_spec(
        model,
        multi_input_blocks=(f"{attention}.self",),
        per_token_inputs={attention: ("key_tensor", "value_tensor", "layer_input")},
        pointwise_containers=tuple(f"encoder.layer.*.{name}" for name in _BOTTLENECKS if name in modules),
    )
    # Replicate both matrices: neither module is called, and the vocabulary is dim 0 of only one of them.
    ends = ("vocab_parallel_head", "embedding_rowwise", "shard_dim_-2")
    return spec.updated(
        plan={name: style for name, style in spec.tp.plan.items() if style not in ends},
        regions={block: row for block, row in spec.tp.regions.items() if block != f"{attention}.self"},
        pointwise_containers=tuple(name for name in spec.sp.pointwise_containers if not name.startswith(attention)),
    )


register_facts(
    "mobilebert",
    facts=TypeFacts(
        tiny={"intra_bottleneck_size": 48, "true_hidden_size": 48, "num_feedforward_networks": 2},
    ),
)
