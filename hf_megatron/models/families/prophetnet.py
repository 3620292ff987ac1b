"""ProphetNet: the decoder computes parallel streams for several future tokens."""

from typing import Any

from ..registry import register_model
from ..spec import ModelSpec
from ..spec_helpers import corrected_spec
from ..type_facts import TypeFacts, register_facts

_PLAN = {
    **{f"{stack}.layers.*.feed_forward.intermediate": "colwise" for stack in ("encoder", "decoder")},
    **{f"{stack}.layers.*.feed_forward.output": "rowwise" for stack in ("encoder", "decoder")},
    # The forward derives its output width from its input, so heads cannot be sharded; shard the weights only.
    **{f"decoder.layers.*.self_attn.{name}_proj": "colwise_gather_output" for name in ("query", "key", "value")},
    "decoder.layers.*.self_attn.relative_pos_embeddings": "colwise_gather_output",
    "decoder.layers.*.self_attn.out_proj": "rowwise_split_input",
}


@register_model("prophetnet")
def prophetnet(model: Any) -> ModelSpec:
    names = [name for name, _ in model.named_modules() if name.endswith("position_embeddings")]
    # Every stage needs them: they return the position ids too, and the decoder embeds further positions afterwards.
    return corrected_spec(model, _PLAN, run_on_all_stages=tuple(names))


register_facts(
    "prophetnet",
    facts=TypeFacts(
        batch_coupling="the label smoothing of its loss (eps) is averaged over the labels of each sub-batch",
        batch_coupling_if=lambda config: config.eps > 0,
    ),
)
