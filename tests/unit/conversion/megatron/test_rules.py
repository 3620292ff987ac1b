"""Tests of the conversion rules to Megatron: completeness, reversibility and equality with Megatron-Bridge."""

import json
import re
from pathlib import Path

import pytest
import torch

from hf_megatron import CheckpointError
from hf_megatron.conversion.architecture import Architecture
from hf_megatron.conversion.families import get_family, known_families
from hf_megatron.conversion.families.multimodal import packed_qkv
from hf_megatron.conversion.megatron.names import spellings
from hf_megatron.conversion.megatron.rules import (
    Chain,
    Deinterleave,
    Divided,
    GroupedQKV,
    InterleaveHeadRows,
    Joined,
    PaddedVocabulary,
    Reshaped,
)
from hf_megatron.conversion.megatron.splits import RankSplit, tensor_parallel_split
from tests.helpers.tiny_models import FAMILIES, MULTIMODAL, build_tiny_model, make_config

TABLE = json.loads((Path(__file__).parents[3] / "data" / "megatron_bridge_names.json").read_text())["families"]


def list_rules(case: str, padded: int = 256) -> list:
    config = make_config(case)
    return list(get_family(config).rules(config, padded, names=Architecture(build_tiny_model(case)).names))


def test_every_family_has_a_tiny_model():
    assert {model_type for model_type, _ in {**FAMILIES, **MULTIMODAL}.values()} == set(known_families())


@pytest.mark.parametrize("case", {**FAMILIES, **MULTIMODAL})
def test_every_tensor_has_one_rule(case):
    rules, architecture = list_rules(case), Architecture(build_tiny_model(case))
    names = [name for rule in rules for name in rule.transformers]
    assert sorted(names) == sorted(architecture.names)
    megatron = [name for rule in rules for name in rule.megatron]
    assert len(set(megatron)) == len(megatron)
    for name in megatron:
        # The legacy layout requires the tensor-parallel split of every name.
        tensor_parallel_split(name)
        assert not set(spellings(name)) & set(megatron)


@pytest.mark.parametrize("case", {**FAMILIES, **MULTIMODAL})
def test_rules_are_reversible_and_work_on_meta(case):
    state = build_tiny_model(case).state_dict()
    for rule in list_rules(case):
        tensors = [state[name] for name in rule.transformers]
        converted = rule.operation.to_megatron(tensors)
        meta = rule.operation.to_megatron([tensor.to("meta") for tensor in tensors])
        assert [tensor.shape for tensor in converted] == [tensor.shape for tensor in meta]
        restored = rule.operation.to_transformers(converted)
        assert all(torch.equal(one, other) for one, other in zip(tensors, restored, strict=True)), rule


@pytest.mark.parametrize("case", {**FAMILIES, **MULTIMODAL})
def test_tiny_model_tensors_are_distinct(case):
    """Tensors of equal shape differ in a tiny model, so that conversion tests detect swapped tensors."""
    tensors = list(build_tiny_model(case).state_dict().items())
    by_shape: dict[tuple, list] = {}
    for name, tensor in tensors:
        for other_name, other in by_shape.get(tuple(tensor.shape), []):
            tied = tensor.data_ptr() == other.data_ptr()
            assert tied or not torch.equal(tensor, other), (name, other_name)
        by_shape.setdefault(tuple(tensor.shape), []).append((name, tensor))


def get_sizes(config) -> dict[str, int]:
    """Returns the sizes for the letters in the table of expected shapes."""
    text, vision = config.get_text_config(), getattr(config, "vision_config", None)
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    sizes = {
        "V": text.vocab_size,
        "h": text.hidden_size,
        "f": text.intermediate_size,
        "2f": 2 * text.intermediate_size,
        "d": head,
        "nd": text.num_attention_heads * head,
        "gd": text.num_key_value_heads * head,
        "(n+2g)d": (text.num_attention_heads + 2 * text.num_key_value_heads) * head,
    }
    if config.model_type == "qwen3_vl_moe":
        width = text.moe_intermediate_size
        sizes |= {"E": text.num_experts, "e": width, "2e": 2 * width}
    if config.model_type == "nemotron_h":
        heads, states = config.mamba_num_heads, config.n_groups * config.ssm_state_size
        width = heads * config.mamba_head_dim
        sizes |= {"H": heads, "i": width, "i+2S": width + 2 * states, "2i+2S+H": 2 * width + 2 * states + heads}
        sizes |= {"E": config.n_routed_experts, "e": config.moe_intermediate_size, "l": config.moe_latent_size}
        sizes |= {"a": config.moe_shared_expert_intermediate_size}
    if vision is not None:
        width = vision.hidden_size
        sizes |= {"w": width, "3w": 3 * width, "v": vision.intermediate_size, "s": vision.patch_size}
    if config.model_type.startswith("qwen3_vl"):
        merged = width * vision.spatial_merge_size**2
        sizes |= {"m": merged, "o": vision.out_hidden_size, "p": vision.num_position_embeddings}
    elif config.model_type == "llava":
        sizes["p"] = (vision.image_size // vision.patch_size) ** 2 + 1
    return sizes


def strip_layer_numbers(name: str) -> str:
    """Returns the tensor name with stars for layer numbers; expert tensors get their local name."""
    name = re.sub(r"(layers|blocks|deepstack_merger_list)\.\d+", r"\1.*", name)
    return re.sub(r"\.experts\.experts\.(linear_fc\d)\.weight", r".experts.\1.weight*", name)


def get_expected_tensors(case: str, state: dict) -> dict[str, tuple]:
    """Returns the tensors of the table with `**` wildcards expanded."""
    config = make_config(case)
    sizes, expected = get_sizes(config), {}
    for name, entry in TABLE[config.model_type]["tensors"].items():
        sources = entry["transformers"]
        if name == "language_model.output_layer.weight" and config.tie_word_embeddings:
            continue
        if name.endswith("**"):
            (source,) = sources
            start = source.removesuffix("**")
            for source_name, tensor in state.items():
                if source_name.startswith(start):
                    target = strip_layer_numbers(name.removesuffix("**") + source_name.removeprefix(start))
                    expected[target] = ([strip_layer_numbers(source_name)], list(tensor.shape))
            continue
        expected[name] = (sources, [sizes.get(size, size) for size in entry["shape"]])
    return expected


@pytest.mark.parametrize("case", ["gemma2", "gemma3", "olmo2", "nemotron_h_latent", *MULTIMODAL])
def test_names_and_shapes_match_megatron_bridge(case):
    state = build_tiny_model(case).state_dict()
    tensors: dict[str, tuple] = {}
    for rule in list_rules(case, padded=make_config(case).get_text_config().vocab_size):
        converted = rule.operation.to_megatron([state[name] for name in rule.transformers])
        for name, tensor in zip(rule.megatron, converted, strict=True):
            key, names = strip_layer_numbers(name), [strip_layer_numbers(other) for other in rule.transformers]
            shape = list(tensor.shape[1:] if key.endswith("*") else tensor.shape)
            assert tensors.setdefault(key, (names, shape)) == (names, shape)
    assert tensors == get_expected_tensors(case, state)


def test_table_covers_all_tensors_and_wildcards_match():
    """An incomplete table would weaken the comparison."""
    for case in MULTIMODAL:
        state, config = build_tiny_model(case).state_dict(), make_config(case)
        for name, entry in TABLE[config.model_type]["tensors"].items():
            if name.endswith("**"):
                assert any(source.startswith(entry["transformers"][0].removesuffix("**")) for source in state), name
        source = {name for names, _ in get_expected_tensors(case, state).values() for name in names}
        tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
        assert source == {strip_layer_numbers(name) for name in state} - tied


def test_vision_encoder_qkv_is_grouped_by_head():
    """Expected by hand for two heads of width 1; transformers stores all queries, then keys, then values."""
    values = torch.arange(6.0)
    assert packed_qkv(2, 2).to_megatron([values])[0].tolist() == [0, 2, 4, 1, 3, 5]
    assert packed_qkv(4, 2).to_megatron([torch.arange(12.0)])[0].tolist() == [0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11]
    (token,) = Reshaped(3).to_megatron([values])
    assert token.shape == (1, 1, 6)
    assert torch.equal(Reshaped(3).to_transformers([token])[0], values)
    with pytest.raises(CheckpointError, match=r"a single row, got shape \(1, 2, 3\)"):
        Reshaped(3).to_transformers([values.reshape(1, 2, 3)])


@pytest.mark.parametrize(
    ("name", "split"),
    {
        "language_model.decoder.layers.0.mlp.linear_fc1.weight": RankSplit(0, halves=True),
        "vision_model.decoder.layers.0.mlp.linear_fc1.weight": RankSplit(0),
        "vision_model.decoder.layers.0.self_attention.linear_proj.weight": RankSplit(1),
        "vision_model.decoder.deepstack_merger_list.1.linear_fc2.weight": RankSplit(1),
        "vision_model.class_token": None,
        "visual.blocks.0.mlp.gate_proj.weight": None,
        "multi_modal_projector.proj.weight": RankSplit(0),
        "vision_projection.encoder.linear_fc1.bias": RankSplit(0),
    }.items(),
)
def test_only_megatron_vision_encoders_are_split(name, split):
    assert tensor_parallel_split(name) == split


def test_parallel_residual_keeps_names():
    """megatron-core uses the names of the sequential GPT-NeoX, whose tensors are the same."""
    assert list_rules("gpt_neox_parallel") == list_rules("gpt_neox")


def test_queries_are_grouped_with_their_key_and_value():
    query, key, value = torch.arange(8.0), 10 + torch.arange(4.0), 20 + torch.arange(4.0)
    (packed,) = GroupedQKV(heads=4, groups=2, head_dim=2).to_megatron([query, key, value])
    assert packed.tolist() == [0, 1, 2, 3, 10, 11, 20, 21, 4, 5, 6, 7, 12, 13, 22, 23]
    with pytest.raises(CheckpointError, match=r"\(8, 8, 4\).*\(8, 4, 4\)"):
        GroupedQKV(heads=4, groups=2, head_dim=2).to_megatron([query, query, value])
    with pytest.raises(CheckpointError, match="16 rows in total, expected 24"):
        GroupedQKV(heads=4, groups=4, head_dim=2).to_transformers([packed])


def test_interleaved_rows():
    values = torch.arange(6.0)
    assert Deinterleave(dim=0).to_megatron([values])[0].tolist() == [0, 2, 4, 1, 3, 5]
    interleaved = InterleaveHeadRows(heads=2, start=1, size=4).to_megatron([torch.arange(12.0)])[0]
    assert interleaved.tolist() == [0, 1, 3, 2, 4, 5, 6, 7, 9, 8, 10, 11]


def test_chained_operations():
    chain = Chain((Divided((2, 2)), Joined((2, 2)), PaddedVocabulary(4, 8)))
    values = torch.arange(4.0)
    (padded,) = chain.to_megatron([values])
    assert padded.tolist() == [0, 1, 2, 3, 0, 0, 0, 0]
    assert chain.to_transformers([padded])[0].tolist() == values.tolist()
