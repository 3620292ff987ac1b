"""Tests of plans inferred from model structure, on meta models, against registered specs."""

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

from hf_megatron.errors import PlanError
from hf_megatron.models.infer import inferred_spec, stated_or_inferred_spec
from hf_megatron.models.registry import registered_spec, spec_for

_CLASSES = {"bert": AutoModelForMaskedLM, "t5": AutoModelForSeq2SeqLM}


def build_on_meta(model_type, auto_class=AutoModelForCausalLM, **changes):
    with torch.device("meta"):
        return auto_class.from_config(CONFIG_MAPPING[model_type](**changes))


@pytest.mark.parametrize("model_type", ["bert", "t5", "opt", "gptj", "gpt2"])
def test_inferred_plans_match_registered_specs(model_type):
    model = build_on_meta(model_type, _CLASSES.get(model_type, AutoModelForCausalLM))
    stated, inferred = registered_spec(model), inferred_spec(model)
    assert inferred.tp.plan == stated.tp.plan
    assert dict(inferred.tp.regions) == dict(stated.tp.regions) or model_type == "t5"
    assert set(inferred.tp.multi_input_blocks) == set(stated.tp.multi_input_blocks) and set(
        inferred.sp.pointwise_containers
    ) == set(stated.sp.pointwise_containers)


def test_transformers_tp_plan_takes_precedence():
    model = build_on_meta("llama")
    assert registered_spec(model) is None and spec_for(model).tp.plan["model.layers.*.self_attn.q_proj"] == "colwise"


@pytest.mark.parametrize(
    ("model_type", "auto_class", "changes", "reason"),
    [
        ("xlm", AutoModelForMaskedLM, {}, "separate module lists: transformer.attentions, transformer.ffns"),
        ("electra", AutoModelForMaskedLM, {"chunk_size_feed_forward": 4}, "chunk_size_feed_forward > 0"),
    ],
)
def test_models_without_sequence_parallelism(model_type, auto_class, changes, reason):
    assert reason in inferred_spec(build_on_meta(model_type, auto_class, **changes)).sp.no_sequence_parallel


def test_expert_dict_parents_run_on_full_sequences():
    containers = inferred_spec(build_on_meta("switch_transformers", AutoModelForSeq2SeqLM)).sp.pointwise_containers
    assert "encoder.block.*.layer.*" in containers and not any("mlp" in name for name in containers)


def test_norm_over_all_heads_prevents_sharding():
    """BitNet's attention and MLP outputs pass through norms over the dimension to be split."""
    with pytest.raises(PlanError, match="no known structure"):
        inferred_spec(build_on_meta("bitnet"))


def test_extra_attention_parameters_prevent_sharding():
    """DiffLlama's attention has additional vector parameters; its MLPs are split."""
    plan = inferred_spec(build_on_meta("diffllama")).tp.plan
    assert not any("self_attn" in name for name in plan) and plan["model.layers.*.mlp.down_proj"] == "rowwise"


def test_shared_position_bias_is_split_by_head():
    mpnet, mt5 = build_on_meta("mpnet", AutoModelForMaskedLM), build_on_meta("mt5", AutoModelForSeq2SeqLM)
    assert spec_for(mpnet).tp.local_arguments == {"mpnet.encoder.layer.*.attention.attn": ("position_bias",)}
    assert spec_for(mt5).tp.local_arguments == {}


def test_head_counts_read_in_forward_are_local():
    assert inferred_spec(build_on_meta("gpt_neo")).tp.local_attributes == {
        "transformer.h.*.attn.attention": ("num_heads",)
    }


def test_query_key_and_value_in_one_linear():
    """The class's reshape determines whether the fused weight is three blocks or interleaved by head."""

    class PerHead(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_heads, self.head_size = 4, 8
            self.query_key_value, self.dense = nn.Linear(32, 96), nn.Linear(32, 32)

        def forward(self, hidden_states):
            return self.query_key_value(hidden_states).view(
                *hidden_states.shape[:2], self.num_heads, 3 * self.head_size
            )

    model = build_on_meta("openai-gpt")
    assert inferred_spec(model).tp.plan["transformer.h.*.attn.c_attn"] == "fused_qkv"
    model.transformer.h[0].attn = PerHead()
    assert inferred_spec(model).tp.plan["transformer.h.*.attn.query_key_value"] == "colwise"


def test_unknown_structure_error_suggests_registration():
    with pytest.raises(PlanError, match=r"'rwkv' has neither a spec .* its structure is unknown; register one"):
        stated_or_inferred_spec(build_on_meta("rwkv"))


def test_lm_head_other_than_linear_is_not_sharded():
    model = build_on_meta("gpt_neo")
    model.lm_head = nn.Sequential(model.lm_head)
    assert "lm_head" not in inferred_spec(model).tp.plan


def test_heads_are_gathered_for_full_width_reshape():
    """TrOCR's attention reshapes the head outputs to the width of its input."""
    plan = inferred_spec(build_on_meta("trocr")).tp.plan
    assert plan["model.decoder.layers.*.self_attn.q_proj"] == "colwise_gather_output"
    assert plan["model.decoder.layers.*.self_attn.out_proj"] == "rowwise_split_input"
    assert plan["model.decoder.layers.*.fc1"] == "colwise"
