"""SpeechT5: all heads of its encoder read one table of distances, whose vectors are as wide as a head."""

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
        # Each rank's heads give it a part of its gradient.
        {f"{_DISTANCES}.pe_k": "replicated_with_grad_allreduce"},
        # Makes the mask that its encoder's layers on all stages read, of the clips. The decoder's hands on its own.
        run_on_all_stages=tuple(f"{base_prefix(model)}{stack}.prenet" for stack in ("encoder", "decoder")),
        before_layers=(_DISTANCES,),
        pre_layer_arguments=("position_bias",),
    )
    # No tables with an entry for each head are among the arguments of its blocks.
    return spec.updated(local_arguments={})


register_facts(
    "speecht5",
    facts=TypeFacts(
        # Frames that NumPy draws anew for every microbatch are hidden from it while it trains.
        tiny={"apply_spec_augment": False, "conv_dim": [32] * 7},
        no_gradient={r"\.masked_spec_embed$": "stands for frames hidden at random: compared without such"},
    ),
)
