"""Tests of the parity check: each seeded fault must make the comparison fail."""

import pytest
import torch
from transformers import CONFIG_MAPPING

from hf_megatron.core.communication import collectives
from hf_megatron.core.communication.bucket_collectives import AllGather
from hf_megatron.core.layouts import parse_layouts
from hf_megatron.data_parallel import distributed_optimizer, grad_norm, grad_reducer, param_gather
from hf_megatron.data_parallel.buckets import Bucket, GradScale, Slot
from hf_megatron.tensor_parallel import region, vocab_parallel_head
from hf_megatron.testing.parity import check_tiny_model
from tests.helpers.shared_tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def tiny_model():
    return make_tiny_model(CONFIG_MAPPING["qwen3"](), microbatches=2)


def drop_forward_all_reduce():
    collectives._Reduce.forward = staticmethod(lambda ctx, tensor, group: tensor.view_as(tensor))


def drop_backward_all_reduce():
    collectives._Copy.backward = staticmethod(lambda ctx, gradient: (gradient, None, None))


def scale_gradient_by_tp():
    original = collectives._Copy.backward

    def backward(ctx, gradient):
        gradient, *nothing = original(ctx, gradient)
        return gradient * 2, *nothing

    collectives._Copy.backward = staticmethod(backward)


def shift_labels_twice():
    original = vocab_parallel_head.ShardedLogits.cross_entropy

    def cross_entropy(self, targets, **kwargs):
        return original(self, targets.roll(1, dims=-1), **kwargs)

    vocab_parallel_head.ShardedLogits.cross_entropy = cross_entropy


def slice_instead_of_reduce_scatter():
    collectives.reduce_scatter = lambda tensor, dim, group: collectives.take_shard(tensor, dim, group).contiguous()


def slice_gathered_gradient():
    original = region.gather_from_ranks
    region.gather_from_ranks = lambda *args, sum_gradient=False: original(*args, sum_gradient=False)


def skip_norm_gradient_sum():
    from hf_megatron.tensor_parallel import local_parameters

    local_parameters.local_view = lambda parameter, group=None: parameter.to_local()


TENSOR_PARALLEL = [drop_forward_all_reduce, drop_backward_all_reduce, scale_gradient_by_tp, shift_labels_twice]
SEQUENCE_PARALLEL = [
    drop_backward_all_reduce,
    scale_gradient_by_tp,
    shift_labels_twice,
    slice_instead_of_reduce_scatter,
    slice_gathered_gradient,
    skip_norm_gradient_sum,
]


@pytest.mark.parametrize("fault", TENSOR_PARALLEL, ids=lambda fault: fault.__name__)
def test_tensor_parallel_fault_is_detected(tiny_model, fault):
    [layout] = parse_layouts("tp2")
    assert not check_tiny_model(tiny_model, layout, sabotage=fault).passed


def test_tensor_parallel_without_fault_passes(tiny_model):
    [layout] = parse_layouts("tp2")
    assert check_tiny_model(tiny_model, layout).passed


@pytest.mark.parametrize("fault", SEQUENCE_PARALLEL, ids=lambda fault: fault.__name__)
def test_sequence_parallel_fault_is_detected(tiny_model, fault):
    [layout] = parse_layouts("tp2+sp")
    assert not check_tiny_model(tiny_model, layout, sabotage=fault).passed


def test_sequence_parallel_without_fault_passes(tiny_model):
    [layout] = parse_layouts("tp2+sp")
    assert check_tiny_model(tiny_model, layout).passed


def test_missing_kv_copies_sum_is_detected():
    """Four ranks hold copies of one KV head; without the sum each keeps a quarter of its gradient."""
    tiny_model = make_tiny_model(CONFIG_MAPPING["llama"](), changes={"num_key_value_heads": 1})
    [layout] = parse_layouts("tp4")

    def skip_copies_sum():
        from hf_megatron.tensor_parallel.linear import ParallelLinear

        ParallelLinear.copies_group = property(lambda self: None)

    comparison = check_tiny_model(tiny_model, layout, sabotage=skip_copies_sum)
    assert not comparison.passed
    assert "k_proj" in comparison.worst.quantity or "v_proj" in comparison.worst.quantity


# Data parallel


@pytest.fixture(scope="module")
def uneven_tiny_model():
    """Five samples: dp ranks have unequal numbers of samples and labels."""
    return make_tiny_model(CONFIG_MAPPING["llama"](), microbatches=2, batch_size=5)


def drop_last_rank_gradients():
    original = Bucket.seal_buffer

    def seal_buffer(self):
        buffer = original(self)
        if torch.distributed.get_rank() == torch.distributed.get_world_size() - 1:
            buffer[:, : self.width].zero_()
        return buffer

    Bucket.seal_buffer = seal_buffer


def sum_instead_of_average():
    original = Slot.scatter_into
    Slot.scatter_into = lambda self, rows, local_parameters, *, scale, add: original(
        self, rows, local_parameters, scale=GradScale(1.0, scale.device), add=add
    )


def use_local_denominator():
    from hf_megatron.losses.batch_loss import BatchLoss

    BatchLoss._mean = lambda self, total, terms, at_least=0: total / terms


def zero_gathered_weights():
    class ZeroingAllGather(AllGather):
        def __init__(self, rows, group):
            super().__init__(rows, group)
            self.rows = rows

        def wait(self):
            super().wait()
            self.rows[1 - torch.distributed.get_rank()].zero_()

    param_gather.AllGather = ZeroingAllGather


def skip_param_all_gather():
    distributed_optimizer.ShardedOptimizer.publish = lambda self, moved: None


def drop_earlier_microbatches():
    original = Slot.scatter_into
    Slot.scatter_into = lambda self, rows, local_parameters, *, scale, add: original(
        self, rows, local_parameters, scale=scale, add=False
    )


def count_replicated_gradients_twice():
    grad_norm._distinct = lambda tensor: 2


def skip_replica_all_reduce():
    grad_reducer.sum_over = lambda tensor, group: tensor


DATA_PARALLEL = [
    (drop_last_rank_gradients, "dp2"),
    (drop_last_rank_gradients, "dp2+zero0"),
    (sum_instead_of_average, "dp2"),
    (use_local_denominator, "dp2"),
    (use_local_denominator, "dp2+zero3"),
    (zero_gathered_weights, "dp2"),
    (skip_param_all_gather, "dp2"),
    (drop_earlier_microbatches, "dp2"),
    (count_replicated_gradients_twice, "tp2+dp2"),
    (skip_replica_all_reduce, "dp4+replicas2"),
]


@pytest.mark.parametrize(("fault", "layout"), DATA_PARALLEL, ids=lambda value: getattr(value, "__name__", value))
def test_data_parallel_fault_is_detected(uneven_tiny_model, fault, layout):
    [config] = parse_layouts(layout)
    assert not check_tiny_model(uneven_tiny_model, config, sabotage=fault).passed


@pytest.mark.parametrize("layout", sorted({layout for _, layout in DATA_PARALLEL}))
def test_data_parallel_without_fault_passes(uneven_tiny_model, layout):
    [config] = parse_layouts(layout)
    assert check_tiny_model(uneven_tiny_model, config).passed
