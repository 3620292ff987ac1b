"""Tests of the tests: each seeded fault must make the comparison fail."""

import pytest
from transformers import CONFIG_MAPPING

from hf_megatron.communication import collectives
from hf_megatron.tensor_parallel import logits, region
from hf_megatron.verify.check import parse_layouts
from hf_megatron.verify.parity import check_twin, make_twin


@pytest.fixture(scope="module")
def twin():
    return make_twin(CONFIG_MAPPING["qwen3"](), microbatches=2)


def drop_forward_all_reduce():
    collectives._Reduce.forward = staticmethod(lambda ctx, tensor, group: tensor.view_as(tensor))


def drop_backward_all_reduce():
    collectives._Copy.backward = staticmethod(lambda ctx, gradient: (gradient, None))


def scale_gradient_by_tp():
    original = collectives._Copy.backward

    def backward(ctx, gradient):
        gradient, nothing = original(ctx, gradient)
        return gradient * 2, nothing

    collectives._Copy.backward = staticmethod(backward)


def shift_labels_by_one_more():
    original = logits.ShardedLogits.cross_entropy

    def cross_entropy(self, targets, **kwargs):
        return original(self, targets.roll(1, dims=-1), **kwargs)

    logits.ShardedLogits.cross_entropy = cross_entropy


def slice_instead_of_reduce_scatter():
    collectives.reduce_scatter = lambda tensor, dim, group: collectives.take_shard(tensor, dim, group).contiguous()


def gather_gradient_is_a_slice():
    original = region.gather_from_ranks
    region.gather_from_ranks = lambda *args, sum_gradient=False: original(*args, sum_gradient=False)


def forget_the_sum_over_norms():
    from hf_megatron.tensor_parallel import local

    local.local_view = lambda parameter, group=None: parameter.to_local()


TENSOR_PARALLEL = [drop_forward_all_reduce, drop_backward_all_reduce, scale_gradient_by_tp, shift_labels_by_one_more]
SEQUENCE_PARALLEL = [
    drop_backward_all_reduce,
    scale_gradient_by_tp,
    shift_labels_by_one_more,
    slice_instead_of_reduce_scatter,
    gather_gradient_is_a_slice,
    forget_the_sum_over_norms,
]


@pytest.mark.parametrize("fault", TENSOR_PARALLEL, ids=lambda fault: fault.__name__)
def test_tensor_parallel_fault_is_found(twin, fault):
    [layout] = parse_layouts("tp2")
    assert check_twin(twin, layout).passed
    assert not check_twin(twin, layout, sabotage=fault).passed


@pytest.mark.parametrize("fault", SEQUENCE_PARALLEL, ids=lambda fault: fault.__name__)
def test_sequence_parallel_fault_is_found(twin, fault):
    [layout] = parse_layouts("tp2+sp")
    assert not check_twin(twin, layout, sabotage=fault).passed


def test_sequence_parallel_is_equal_without_a_fault(twin):
    [layout] = parse_layouts("tp2+sp")
    assert check_twin(twin, layout).passed


def test_missing_copies_sum_is_found():
    """Four ranks share one KV head; without the sum each keeps a quarter of its gradient."""
    twin = make_twin(CONFIG_MAPPING["llama"](), changes={"num_key_value_heads": 1})
    [layout] = parse_layouts("tp4")

    def forget():
        from hf_megatron.tensor_parallel.linear import ParallelLinear

        ParallelLinear.copies_group = property(lambda self: None)

    comparison = check_twin(twin, layout, sabotage=forget)
    assert not comparison.passed
    assert "k_proj" in comparison.worst.quantity or "v_proj" in comparison.worst.quantity
