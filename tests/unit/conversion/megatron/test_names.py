"""Tests of Megatron-Core tensor names: tensor-parallel splits, alternative names and experts."""

import pytest
import torch

from hf_megatron.conversion.interfaces import MegatronModel
from hf_megatron.conversion.megatron.names import (
    build_local_expert_name,
    canonical,
    extra_states,
    local,
    spellings,
    split_expert_name,
)
from hf_megatron.conversion.megatron.splits import RankSplit, blocks_of, rank_views, tensor_parallel_split
from hf_megatron.errors import CheckpointError

LAYER = "decoder.layers.3."
MTP = "mtp.layers.0.transformer_layer."
SPLITS = {
    "embedding.word_embeddings.weight": RankSplit(0),
    "embedding.position_embeddings.weight": None,
    "output_layer.weight": RankSplit(0),
    "output_layer.bias": RankSplit(0),
    "decoder.final_layernorm.weight": None,
    "decoder.final_layernorm.bias": None,
    "decoder.final_norm.weight": None,
    "mtp.layers.0.eh_proj.weight": RankSplit(0),
    "mtp.layers.0.enorm.weight": None,
    "mtp.layers.0.final_layernorm.weight": None,
}
IN_LAYER = {
    "input_layernorm.weight": None,
    "pre_mlp_layernorm.bias": None,
    "self_attention.linear_qkv.weight": RankSplit(0),
    "self_attention.linear_qkv.bias": RankSplit(0),
    "self_attention.linear_qkv.layer_norm_weight": None,
    "self_attention.linear_qkv.layer_norm_bias": None,
    "self_attention.linear_proj.weight": RankSplit(1),
    "self_attention.linear_proj.bias": None,
    "self_attention.linear_proj.post_layernorm.weight": None,
    "self_attention.q_layernorm.weight": None,
    "self_attention.k_layernorm.weight": None,
    "self_attention.core_attention.softmax_offset": RankSplit(0),
    "self_attention.linear_q_proj.weight": RankSplit(0),
    "self_attention.linear_q_down_proj.weight": RankSplit(0, replicated_in_te=True),
    "self_attention.linear_q_up_proj.weight": RankSplit(0),
    "self_attention.linear_q_up_proj.layer_norm_weight": None,
    "self_attention.linear_kv_down_proj.weight": RankSplit(0, replicated_in_te=True),
    "self_attention.linear_kv_up_proj.weight": RankSplit(0),
    "self_attention.kv_layernorm.weight": None,
    "mlp.linear_fc1.weight": RankSplit(0, halves=True),
    "mlp.linear_fc1.bias": RankSplit(0, halves=True),
    "mlp.linear_fc1.layer_norm_weight": None,
    "mlp.linear_fc2.weight": RankSplit(1),
    "mlp.linear_fc2.bias": None,
    "mlp.router.weight": None,
    "mlp.router.bias": None,
    "mlp.router.expert_bias": None,
    "mlp.shared_experts.linear_fc1.weight": RankSplit(0, halves=True),
    "mlp.shared_experts.linear_fc2.weight": RankSplit(1),
    "mlp.shared_experts.gate_weight": None,
    "mlp.experts.experts.linear_fc1.weight": RankSplit(1, halves=True),
    "mlp.experts.experts.linear_fc1.bias": RankSplit(1, halves=True),
    "mlp.experts.experts.linear_fc2.weight": RankSplit(2),
    "mlp.experts.experts.linear_fc2.bias": None,
    "mlp.fc1_latent_proj.weight": None,
    "mixer.in_proj.weight": RankSplit(0),
    "mixer.in_proj.layer_norm_weight": None,
    "mixer.conv1d.weight": RankSplit(0),
    "mixer.conv1d.bias": RankSplit(0),
    "mixer.A_log": RankSplit(0),
    "mixer.norm.weight": RankSplit(0),
    "mixer.out_proj.weight": RankSplit(1),
}
# Norm fused into a linear -> separate norm.
NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
    "self_attention.linear_q_up_proj.layer_norm_": "self_attention.q_layernorm.",
    "self_attention.linear_kv_up_proj.layer_norm_": "self_attention.kv_layernorm.",
    "mixer.in_proj.layer_norm_": "norm.",
}


@pytest.mark.parametrize("name", SPLITS)
def test_split_outside_layers(name):
    assert tensor_parallel_split(name) == SPLITS[name]


@pytest.mark.parametrize("prefix", [LAYER, MTP])
@pytest.mark.parametrize("name", IN_LAYER)
def test_split_in_layers(prefix, name):
    assert tensor_parallel_split(prefix + name) == IN_LAYER[name]


@pytest.mark.parametrize(
    "name",
    [
        "decoder.layers.weight",
        "decoder.layers.0.self_attention.linear_qkv.weight.more",
        "decoder.layers.0.mlp.linear_fc1.weight0",
        "decoder.layers.0.self_attention.unknown.weight",
        "language_model.encoder.layers.0.attention.dense.weight",
        "vision_model.head.weight",
        "model.embed_tokens.weight",
    ],
)
def test_unknown_name_is_rejected(name):
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        tensor_parallel_split(name)


@pytest.mark.parametrize("kind", ["weight", "bias"])
@pytest.mark.parametrize("inside", NORMS)
def test_norms_have_fused_and_unfused_names(inside, kind):
    fused, unfused = LAYER + inside + kind, LAYER + NORMS[inside] + kind
    assert spellings(fused) == (unfused,)
    assert spellings(unfused) == (fused,)
    linear = fused.rpartition(".")[0] + ".weight"
    assert canonical(unfused, {unfused, linear}) == fused
    assert canonical(unfused, {unfused}) == unfused
    assert canonical(fused, {fused, linear}) == fused
    assert local(fused) == unfused
    assert local(unfused) == unfused


def test_norm_from_another_layer_keeps_its_name():
    assert canonical("decoder.layers.1.pre_mlp_layernorm.weight", {"decoder.layers.0.mlp.linear_fc1.weight"}) == (
        "decoder.layers.1.pre_mlp_layernorm.weight"
    )


def test_other_names_have_one_spelling():
    for name in ("decoder.final_layernorm.weight", LAYER + "mlp.linear_fc1.weight"):
        assert spellings(name) == ()
        assert local(name) == name


def test_newer_state_space_model_names():
    assert spellings("decoder.final_norm.weight") == ("decoder.final_layernorm.weight",)
    for kind in ("weight", "bias"):
        assert canonical(f"{LAYER}mixer.conv1d_{kind}", ()) == f"{LAYER}mixer.conv1d.{kind}"


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("tensor", ["linear_fc1.weight", "linear_fc2.weight", "linear_fc1.bias"])
def test_local_expert_names(grouped, tensor):
    name = f"{LAYER}mlp.experts.experts.{tensor}"
    local_name = build_local_expert_name(name, 12, grouped)
    assert local_name == (
        f"{LAYER}mlp.experts.{tensor}12" if grouped else f"{LAYER}mlp.experts.local_experts.12.{tensor}"
    )
    assert split_expert_name(local_name) == (name, 12)


def test_grouped_expert_tensor_names():
    assert split_expert_name(LAYER + "mlp.experts.weight1") == (LAYER + "mlp.experts.experts.linear_fc1.weight", None)
    assert split_expert_name(LAYER + "mlp.experts.weight2") == (LAYER + "mlp.experts.experts.linear_fc2.weight", None)
    assert split_expert_name(LAYER + "mlp.shared_experts.linear_fc1.weight") is None


@pytest.mark.parametrize("gated", [True, False])
def test_gate_and_up_are_split_separately(gated):
    tensor = torch.arange(8)
    split = RankSplit(0, halves=True)
    blocks = blocks_of("decoder.layers.0.mlp.linear_fc1.weight", split, 8, MegatronModel({}, gated))
    shards = [torch.cat(rank_views(tensor, split, rank, 2, blocks)).tolist() for rank in range(2)]
    assert shards == ([[0, 1, 4, 5], [2, 3, 6, 7]] if gated else [[0, 1, 2, 3], [4, 5, 6, 7]])


def test_mixer_blocks_are_split_separately():
    model = MegatronModel({}, False, blocks={"mixer.conv1d.bias": {"x": 4, "B": 2, "C": 2}})
    blocks = blocks_of("decoder.layers.0.mixer.conv1d.bias", RankSplit(0), 8, model)
    shards = [torch.cat(rank_views(torch.arange(8), RankSplit(0), rank, 2, blocks)).tolist() for rank in range(2)]
    assert shards == [[0, 1, 4, 6], [2, 3, 5, 7]]
    assert blocks_of("decoder.layers.0.mixer.D", RankSplit(0), 8, model) == (8,)


def test_column_shards_are_views():
    tensor = torch.arange(12).view(2, 6)
    (shard,) = rank_views(tensor, RankSplit(1), 1, 3)
    assert shard.tolist() == [[2, 3], [8, 9]]
    assert shard.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


def test_uneven_split_is_rejected():
    with pytest.raises(CheckpointError, match="length 10 in dimension 0 cannot be split evenly over 4 ranks"):
        rank_views(torch.empty(10), RankSplit(0), 0, 4)
    with pytest.raises(CheckpointError, match="over 2 ranks in separate blocks of 3, 3"):
        rank_views(torch.empty(6), RankSplit(0, halves=True), 0, 2, (3, 3))
    with pytest.raises(CheckpointError, match=r"6 in dimension 0, expected 4 \+ 4"):
        rank_views(torch.empty(6), RankSplit(0), 0, 2, (4, 4))


def test_extra_states_follow_their_modules():
    names = ["linear_qkv.weight", "linear_qkv.bias", "linear_proj.weight", "q_layernorm.weight", "k_layernorm.weight"]
    names = [f"decoder.layers.0.self_attention.{name}" for name in names]
    prefix = "decoder.layers.0.self_attention."
    linear_states = [f"{prefix}linear_qkv._extra_state", f"{prefix}linear_proj._extra_state"]
    assert list(extra_states(names, local_names=True, last=False)) == linear_states
    assert set(extra_states(names, local_names=False, last=True)) == {
        *linear_states,
        f"{prefix}core_attention._extra_state",
        f"{prefix}q_layernorm._extra_state",
        f"{prefix}k_layernorm._extra_state",
        "output_layer._extra_state",
    }
