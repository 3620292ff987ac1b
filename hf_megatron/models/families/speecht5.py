"""SpeechT5: all encoder heads share one relative position table, with vectors of the head size."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import base_prefix, corrected_spec
from ..type_facts import TypeFacts, register_facts

_ENCODER = "encoder.wrapped_encoder"
_DISTANCES = f"{_ENCODER}.embed_positions"


@register_model("speecht5")
def speecht5(model: Any) -> ModelSpec:
    spec = corrected_spec(
        model,
        # The local heads compute a partial gradient of the table.
        {f"{_DISTANCES}.pe_k": "replicated_with_grad_allreduce"},
        # The encoder's prenet computes the encoder mask from the clips; the decoder's prenet passes on its own mask.
        run_on_all_stages=tuple(f"{base_prefix(model)}{stack}.prenet" for stack in ("encoder", "decoder")),
        before_layers=(_DISTANCES,),
        pre_layer_arguments=("position_bias",),
    )
    # The `position_bias` argument has no head dim, so the entry that is inferred from its name is dropped.
    return spec.updated(local_arguments={})


register_facts(
    "speecht5",
    facts=TypeFacts(
        # SpecAugment draws masked frames with NumPy for each microbatch, so runs would not be comparable.
        tiny={"apply_spec_augment": False, "conv_dim": [32] * 7},
        no_gradient={r"\.masked_spec_embed$": "stands for frames hidden at random: compared without such"},
    ),
)
