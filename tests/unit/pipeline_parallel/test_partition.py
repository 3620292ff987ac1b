"""Tests of layer partitioning against exhaustive search, and of estimated layer costs against counted weights."""

import itertools
import random

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, GptOssConfig, LlamaConfig, MixtralConfig

from hf_megatron.errors import ConfigError
from hf_megatron.models.layer_cost import estimate_cost, estimate_costs
from hf_megatron.pipeline_parallel.partition import Stages, check_partition, even, partition

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 96}
ATTENTION = 32 * (32 + 16 + 16 + 32)


def meta(config):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def iter_partitions(layers, stages):
    for cuts in itertools.combinations(range(1, layers), stages - 1):
        yield tuple(stop - start for start, stop in itertools.pairwise((0, *cuts, layers)))


def sum_stage_costs(costs, counts, before, after):
    stops = list(itertools.accumulate(counts))
    sums = [sum(costs[start:stop]) for start, stop in zip([0, *stops], stops, strict=False)]
    sums[0] += before
    sums[-1] += after
    return sums


def test_partition_is_optimal():
    generator = random.Random(0)
    for _ in range(300):
        layers = generator.randint(1, 9)
        stages = generator.randint(1, layers)
        costs = [generator.randint(0, 6) for _ in range(layers)]
        before, after = generator.choice([0, 3]), generator.choice([0, 5, 20])

        def sort_key(counts, costs=costs, before=before, after=after):
            sums = sum_stage_costs(costs, counts, before, after)
            return max(sums), sum(one**2 for one in sums), [-count for count in counts]

        assert partition(costs, stages, before=before, after=after) == min(
            iter_partitions(layers, stages), key=sort_key
        )


@pytest.mark.parametrize("cost", [1, 0.1, 1e-30, 7e12])
def test_equal_layers_are_partitioned_evenly(cost):
    for layers in range(1, 14):
        for stages in range(1, layers + 1):
            assert partition([cost] * layers, stages) == even(layers, stages)


def test_head_cost_replaces_layers():
    assert partition([1.0] * 8, 2) == (4, 4)
    assert partition([1.0] * 8, 2, after=2.0) == (5, 3)
    assert partition([1.0] * 8, 2, before=2.0) == (3, 5)
    assert partition([1.0] * 8, 4, after=100.0) == (3, 2, 2, 1)


def test_even():
    assert even(8, 4) == (2, 2, 2, 2)
    assert even(7, 4) == (2, 2, 2, 1)
    assert even(4, 4) == (1, 1, 1, 1)


@pytest.mark.parametrize("function", [lambda: even(3, 4), lambda: partition([1.0] * 3, 4), lambda: even(3, 0)])
def test_more_stages_than_layers_is_rejected(function):
    with pytest.raises(ConfigError, match="pp_size x virtual_stages"):
        function()


@pytest.mark.parametrize("counts", [(4, 4, 4), (5, 4), (8, 0), (9, -1), (), (8,)])
def test_invalid_partition_is_rejected(counts):
    with pytest.raises(ConfigError) as error:
        check_partition(counts, 8, 2)
    words = ["MegatronConfig.pipeline_partition", str(list(counts)), "2 positive integers", "8 layers", "[4, 4]"]
    assert all(word in str(error.value) for word in words)


def test_valid_partition_is_accepted():
    check_partition((5, 3), 8, 2)
    check_partition([1] * 8, 8, 8)


def test_stages():
    stages = Stages.of((3, 2, 1, 2), (0, 1, 1, 0))
    assert stages.ranges == ((0, 3), (3, 5), (5, 6), (6, 8))
    assert stages.of_rank(0) == (0, 3) and stages.of_rank(1) == (1, 2) and stages.of_rank(2) == ()
    assert [stages.get_layer_stage(layer) for layer in range(8)] == [0, 0, 0, 1, 1, 2, 3, 3]
    with pytest.raises(IndexError):
        stages.get_layer_stage(8)
    with pytest.raises(ValueError):
        Stages.of((3, 2), (0,))
    assert Stages.of((3, 2), (0, 1)) == Stages.of([3, 2], [0, 1])


def test_dense_layer_cost():
    model = meta(LlamaConfig(**SIZES, num_key_value_heads=2))
    assert estimate_costs(model.model.layers, model.config) == (ATTENTION + 3 * 32 * 48,) * 3
    assert estimate_cost(model.lm_head) == 32 * 96
    assert estimate_cost(model.model.embed_tokens) == estimate_cost(model.model.norm) == 0


def test_expert_cost_counts_active_experts():
    model = meta(MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2))
    expected = ATTENTION + 8 * 32 + 2 * 3 * 32 * 48
    assert estimate_costs(model.model.layers, model.config) == (expected,) * 3
    assert estimate_cost(model.model.layers[0]) == ATTENTION + 8 * 32 + 8 * 3 * 32 * 48


def test_expert_biases_cost_nothing():
    config = GptOssConfig(
        **SIZES, num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=1, layer_types=None
    )
    model = meta(config)
    assert estimate_cost(model.model.layers[0], config) == ATTENTION + 4 * 32 + 3 * 32 * 48


def test_expert_list_cost():
    layer = nn.Module()
    layer.router = nn.Linear(8, 4, device="meta")
    layer.experts = nn.ModuleList(nn.Linear(8, 16, device="meta") for _ in range(4))
    layer.bias_table = nn.Embedding(32, 4, device="meta")
    config = MixtralConfig(num_local_experts=4, num_experts_per_tok=1)
    assert estimate_cost(layer, config) == 8 * 4 + 8 * 16
