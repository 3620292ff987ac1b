"""Rules between the names of a model and those of Megatron: complete, reversible, and as others write them."""

import json
import re
from pathlib import Path

import pytest
import torch

from hf_megatron import CheckpointError
from hf_megatron.conversion.architecture import Architecture
from hf_megatron.conversion.families import family_of, known_families
from hf_megatron.conversion.megatron.names import spellings, tensor_parallel_split
from hf_megatron.conversion.megatron.rules import (
    Chain,
    Divided,
    GroupedQKV,
    Interleaved,
    InterleavedRows,
    Joined,
    PaddedVocabulary,
)
from tests.twins import FAMILIES, config_of, twin

TABLE = json.loads((Path(__file__).parents[1] / "data" / "megatron_bridge_names.json").read_text())["families"]


def rules_of(case: str, padded: int = 256) -> list:
    config = config_of(case)
    return list(family_of(config).rules(config, padded))


def test_every_family_has_a_twin():
    assert {model_type for model_type, _ in FAMILIES.values()} == set(known_families())


@pytest.mark.parametrize("case", FAMILIES)
def test_every_tensor_has_one_rule(case):
    rules, architecture = rules_of(case), Architecture(twin(case))
    names = [name for rule in rules for name in rule.transformers]
    assert sorted(names) == sorted(architecture.names)
    megatron = [name for rule in rules for name in rule.megatron]
    assert len(set(megatron)) == len(megatron)
    for name in megatron:
        # The legacy layout has to know how it is split.
        tensor_parallel_split(name)
        assert not set(spellings(name)) & set(megatron)


@pytest.mark.parametrize("case", FAMILIES)
def test_rules_are_reversible_and_keep_their_shapes_on_meta(case):
    state = twin(case).state_dict()
    for rule in rules_of(case):
        tensors = [state[name] for name in rule.transformers]
        there = rule.operation.to_megatron(tensors)
        meta = rule.operation.to_megatron([tensor.to("meta") for tensor in tensors])
        assert [tensor.shape for tensor in there] == [tensor.shape for tensor in meta]
        back = rule.operation.to_transformers(there)
        assert all(torch.equal(one, other) for one, other in zip(tensors, back, strict=True)), rule


@pytest.mark.parametrize("case", FAMILIES)
def test_a_swapped_pair_would_be_seen(case):
    """No two tensors of a twin that have the same shape are equal: the comparisons of conversions can fail."""
    tensors = list(twin(case).state_dict().items())
    seen: dict[tuple, list] = {}
    for name, tensor in tensors:
        for other_name, other in seen.get(tuple(tensor.shape), []):
            tied = tensor.data_ptr() == other.data_ptr()
            assert tied or not torch.equal(tensor, other), (name, other_name)
        seen.setdefault(tuple(tensor.shape), []).append((name, tensor))


@pytest.mark.parametrize("case", ["gemma2", "gemma3", "olmo2"])
def test_names_and_shapes_are_those_of_megatron_bridge(case):
    config = config_of(case)
    head = config.head_dim if case != "olmo2" else config.hidden_size // config.num_attention_heads
    sizes = {
        "V": config.vocab_size,
        "h": config.hidden_size,
        "f": config.intermediate_size,
        "2f": 2 * config.intermediate_size,
        "d": head,
        "nd": config.num_attention_heads * head,
        "gd": config.num_key_value_heads * head,
        "(n+2g)d": (config.num_attention_heads + 2 * config.num_key_value_heads) * head,
    }
    state = twin(case).state_dict()
    found: dict[str, tuple] = {}
    for rule in rules_of(case, padded=config.vocab_size):
        made = rule.operation.to_megatron([state[name] for name in rule.transformers])
        for name, tensor in zip(rule.megatron, made, strict=True):
            key = re.sub(r"layers\.\d+", "layers.*", name)
            names = [re.sub(r"layers\.\d+", "layers.*", other) for other in rule.transformers]
            assert found.setdefault(key, (names, list(tensor.shape))) == (names, list(tensor.shape))
    tensors = TABLE[config.model_type]["tensors"]
    expected = {
        name: (entry["transformers"], [sizes[size] for size in entry["shape"]]) for name, entry in tensors.items()
    }
    assert found == expected


def test_a_parallel_residual_changes_no_name():
    """megatron-core loads the names of the sequential GPT-NeoX; the other has the same tensors."""
    assert rules_of("gpt_neox_parallel") == rules_of("gpt_neox")


def test_queries_are_grouped_with_their_key_and_value():
    query, key, value = torch.arange(8.0), 10 + torch.arange(4.0), 20 + torch.arange(4.0)
    (packed,) = GroupedQKV(heads=4, groups=2, head_dim=2).to_megatron([query, key, value])
    assert packed.tolist() == [0, 1, 2, 3, 10, 11, 20, 21, 4, 5, 6, 7, 12, 13, 22, 23]
    with pytest.raises(CheckpointError, match=r"\(8, 8, 4\).*\(8, 4, 4\)"):
        GroupedQKV(heads=4, groups=2, head_dim=2).to_megatron([query, query, value])
    with pytest.raises(CheckpointError, match="16 rows together, expected 24"):
        GroupedQKV(heads=4, groups=4, head_dim=2).to_transformers([packed])


def test_alternating_rows():
    rows = torch.arange(6.0)
    assert Interleaved(dim=0).to_megatron([rows])[0].tolist() == [0, 2, 4, 1, 3, 5]
    turned = InterleavedRows(heads=2, start=1, size=4).to_megatron([torch.arange(12.0)])[0]
    assert turned.tolist() == [0, 1, 3, 2, 4, 5, 6, 7, 9, 8, 10, 11]


def test_operations_one_after_another():
    chain = Chain((Divided((2, 2)), Joined((2, 2)), PaddedVocabulary(4, 8)))
    rows = torch.arange(4.0)
    (padded,) = chain.to_megatron([rows])
    assert padded.tolist() == [0, 1, 2, 3, 0, 0, 0, 0]
    assert chain.to_transformers([padded])[0].tolist() == rows.tolist()
