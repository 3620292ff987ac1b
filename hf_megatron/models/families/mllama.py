"""Mllama (Llama 3.2 Vision): some layers cross-attend to image states, which are sent to all pipeline stages."""

from typing import Any

from ..composite import composite_spec, moved_spec
from ..registry import register_model
from ..spec import ModelSpec, module_name
from ..spec_helpers import family_spec, gated_decoder_plan
from ..type_facts import TypeFacts, register_facts

_ATTENTION, _CROSS = "layers.*.self_attn", "layers.*.cross_attn"
_TEXT = "model"
_COUNTS = ("num_heads", "num_key_value_heads")


@register_model("mllama_text_model")
def mllama_text_model(model: Any) -> ModelSpec:
    if _TEXT in model._modules:
        # The class with a head, as it is contained in the vision-language model.
        spec = moved_spec(mllama_text_model(model.get_submodule(_TEXT)), f"{_TEXT}.")
        return spec.updated(
            plan={**spec.tp.plan, module_name(model, model.get_output_embeddings()): "vocab_parallel_head"}
        )
    cross = {f"{_CROSS}.{name}_proj": "colwise" for name in "qkv"} | {f"{_CROSS}.o_proj": "rowwise"}
    # Per-head norms: all heads share one weight and each rank has some of the heads, so gradients are all-reduced.
    cross |= {f"{_CROSS}.{name}_norm": "replicated_with_grad_allreduce" for name in "qk"}
    return family_spec(
        model,
        gated_decoder_plan() | cross,
        local_attributes={_ATTENTION: _COUNTS, _CROSS: _COUNTS},
        multi_input_blocks=(_CROSS,),
        per_token_arguments=("full_text_row_masked_out_mask",),
        sequence_dims={"full_text_row_masked_out_mask": 2},
        pre_layer_arguments=("cross_attention_states",),
    )


@register_model("mllama")
def mllama(model: Any) -> ModelSpec | None:
    spec, head = composite_spec(model, {"mllama_text_model": mllama_text_model}), model.get_output_embeddings()
    if spec is None or head is None:
        return spec
    return spec.updated(plan={**spec.tp.plan, module_name(model, head): "vocab_parallel_head"})


register_facts(
    "mllama_text_model",
    facts=TypeFacts(
        # Cross-attention layers are skipped in calls without images, so they must not be a stage's first or last layer.
        tiny={"num_hidden_layers": 6, "cross_attention_layers": [1, 4]},
    ),
)
