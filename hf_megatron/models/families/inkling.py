"""Inkling: the experts' fused weight has two blocks, unlike transformers' plan; there are shared experts too."""

import inspect
from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import base_prefix, corrected_spec
from ..type_facts import UNHEARD_AUDIO, TypeFacts, register_facts

_CORRECTIONS = {
    "layers.*.mlp.experts.gate_up_proj": "packed_dim_-2",
    # The shared experts' own sharded parameters read the input, so its gradient must be summed as well.
    "layers.*.mlp.shared_experts": "partial_sum",
}
_OTHER_INPUTS = ("key_hidden_states", "value_hidden_states")


@register_model("inkling_text")
def inkling_text(model: Any) -> ModelSpec:
    return corrected_spec(model, corrections=_CORRECTIONS)


@register_model("inkling2_text")
def inkling2_text(model: Any) -> ModelSpec:
    layers, prefix = model.base_model.layers, f"{base_prefix(model)}layers"
    several = [
        i for i, layer in enumerate(layers) if _OTHER_INPUTS[0] in inspect.signature(layer.self_attn.forward).parameters
    ]
    return corrected_spec(
        model,
        corrections=_CORRECTIONS,
        # Each token attends to its own states in earlier layers.
        pointwise_containers=("layers.*.attention_input", "layers.*.mlp_input"),
        per_token_arguments=("block_states",),
        per_token_inputs={f"{prefix}.{index}.self_attn": _OTHER_INPUTS for index in several},
        no_context_parallel="its layer loop keeps full-sequence hidden states for later layers.",
        recorded_layers=tuple(index for index, layer in enumerate(layers) if layer.is_block_boundary),
    )


register_facts(
    "inkling_vision",
    facts=TypeFacts(
        # The width of an encoder layer grows with the square of the patch size.
        tiny={"patch_size": 2},
    ),
)
register_facts(
    "inkling_mm_model",
    facts=TypeFacts(
        no_gradient_without=UNHEARD_AUDIO,
    ),
)
