"""A plan by structure, on meta models: plans that families state by hand are found, and what does not fit is left."""

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

from hf_megatron.errors import PlanError
from hf_megatron.models.infer import inferred_spec, stated_or_inferred_spec
from hf_megatron.models.registry import registered_spec, spec_for

_CLASSES = {"bert": AutoModelForMaskedLM, "t5": AutoModelForSeq2SeqLM}


def on_meta(model_type, auto_class=AutoModelForCausalLM, **changes):
    with torch.device("meta"):
        return auto_class.from_config(CONFIG_MAPPING[model_type](**changes))


@pytest.mark.parametrize("model_type", ["bert", "t5", "opt", "gptj", "gpt2"])
def test_plans_of_families_are_found(model_type):
    model = on_meta(model_type, _CLASSES.get(model_type, AutoModelForCausalLM))
    stated, found = registered_spec(model), inferred_spec(model)
    assert found.tp.plan == stated.tp.plan
    assert dict(found.tp.regions) == dict(stated.tp.regions) or model_type == "t5"
    assert set(found.tp.multi_input_blocks) == set(stated.tp.multi_input_blocks) and set(
        found.sp.pointwise_containers
    ) == set(stated.sp.pointwise_containers)


def test_layers_of_a_plan_in_transformers_are_not_inferred():
    model = on_meta("llama")
    assert registered_spec(model) is None and spec_for(model).tp.plan["model.layers.*.self_attn.q_proj"] == "colwise"


@pytest.mark.parametrize(
    ("model_type", "auto_class", "changes", "reason"),
    [
        ("xlm", AutoModelForMaskedLM, {}, "separate module lists: transformer.attentions, transformer.ffns"),
        ("electra", AutoModelForMaskedLM, {"chunk_size_feed_forward": 4}, "chunk_size_feed_forward > 0"),
    ],
)
def test_what_has_no_sequence_parallelism(model_type, auto_class, changes, reason):
    assert reason in inferred_spec(on_meta(model_type, auto_class, **changes)).sp.no_sequence_parallel


def test_what_is_around_a_dict_of_experts_runs_on_full_sequences():
    containers = inferred_spec(on_meta("switch_transformers", AutoModelForSeq2SeqLM)).sp.pointwise_containers
    assert "encoder.block.*.layer.*" in containers and not any("mlp" in name for name in containers)


def test_a_norm_over_all_heads_leaves_a_block_unsharded():
    """BitNet's attention and MLPs end in norms of the width that would be split."""
    with pytest.raises(PlanError, match="no known structure"):
        inferred_spec(on_meta("bitnet"))


def test_parameters_next_to_linears_leave_an_attention_unsharded():
    """DiffLlama's attention has vectors of its own; its MLPs are split."""
    plan = inferred_spec(on_meta("diffllama")).tp.plan
    assert not any("self_attn" in name for name in plan) and plan["model.layers.*.mlp.down_proj"] == "rowwise"


def test_biases_of_heads_are_cut_where_no_block_makes_its_own():
    mpnet, mt5 = on_meta("mpnet", AutoModelForMaskedLM), on_meta("mt5", AutoModelForSeq2SeqLM)
    assert spec_for(mpnet).tp.local_arguments == {"mpnet.encoder.layer.*.attention.attn": ("position_bias",)}
    assert spec_for(mt5).tp.local_arguments == {}


def test_counts_that_a_forward_reads_are_those_of_a_rank():
    assert inferred_spec(on_meta("gpt_neo")).tp.local_attributes == {"transformer.h.*.attn.attention": ("num_heads",)}


def test_query_key_and_value_in_one_linear():
    """As three blocks one below the other, or head by head: what the class's reshape says."""

    class PerHead(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_heads, self.head_size = 4, 8
            self.query_key_value, self.dense = nn.Linear(32, 96), nn.Linear(32, 32)

        def forward(self, hidden_states):
            return self.query_key_value(hidden_states).view(
                *hidden_states.shape[:2], self.num_heads, 3 * self.head_size
            )

    model = on_meta("openai-gpt")
    assert inferred_spec(model).tp.plan["transformer.h.*.attn.c_attn"] == "fused_qkv"
    model.transformer.h[0].attn = PerHead()
    assert inferred_spec(model).tp.plan["transformer.h.*.attn.query_key_value"] == "colwise"


def test_unknown_structures_say_what_to_do():
    with pytest.raises(PlanError, match=r"'rwkv' has neither a spec .* its structure is unknown; register one"):
        stated_or_inferred_spec(on_meta("rwkv"))


def test_heads_that_are_no_plain_linear_are_left():
    model = on_meta("gpt_neo")
    model.lm_head = nn.Sequential(model.lm_head)
    assert "lm_head" not in inferred_spec(model).tp.plan


def test_heads_are_joined_where_an_output_has_the_width_of_the_input():
    """TrOCR's attention reshapes what its heads made to the width that it has read off its input."""
    plan = inferred_spec(on_meta("trocr")).tp.plan
    assert plan["model.decoder.layers.*.self_attn.q_proj"] == "colwise_gather_output"
    assert plan["model.decoder.layers.*.self_attn.out_proj"] == "rowwise_split_input"
    assert plan["model.decoder.layers.*.fc1"] == "colwise"
