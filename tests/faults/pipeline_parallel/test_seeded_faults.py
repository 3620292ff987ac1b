"""Tests of the pipeline parity check: each seeded fault must make the comparison fail."""

import contextlib
import dataclasses

import pytest
from transformers import CONFIG_MAPPING

from hf_megatron.core.layouts import parse_layouts
from hf_megatron.data_parallel.model_parameters import ModelParameters
from hf_megatron.errors import RankError
from hf_megatron.losses.batch_loss import BatchLoss
from hf_megatron.pipeline_parallel import executor
from hf_megatron.pipeline_parallel.boundary import StageBoundary
from hf_megatron.pipeline_parallel.loss_grad_scale import ScheduledGradients
from hf_megatron.pipeline_parallel.p2p import Transport
from hf_megatron.pipeline_parallel.tied_weight_grads import TiedGradients
from hf_megatron.testing.parity import check_tiny_model
from tests.helpers.shared_tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def tiny_model():
    """Tied embeddings, several microbatches per call and two calls per step."""
    return make_tiny_model(CONFIG_MAPPING["gemma2"](), microbatches=2, batch_size=5)


def drop_stage_gradients():
    original = executor.Execution._hand_back

    def hand_back(self, cell, inputs):
        original(self, cell, inputs)
        if cell[1] == 2:
            for gradient in self._buffers.gradients[cell[0] - 1, cell[1]]:
                gradient.zero_()

    executor.Execution._hand_back = hand_back


def double_microbatch_gradients():
    original = executor.Execution._backward

    def backward(self, action):
        seeds = self.backward.seeds
        if action.microbatch == 2:
            self.backward.seeds = lambda microbatch: tuple(2 * seed for seed in seeds(microbatch))
        original(self, action)
        self.backward.seeds = seeds

    executor.Execution._backward = backward


def skip_tied_gradient_sum():
    Transport.sum_with = lambda self, tensor, peer, tag: None


def sum_tied_gradients_twice():
    """Sums the tied gradients of earlier calls once more after each call."""
    TiedGradients.parameters = lambda self: []

    original = ScheduledGradients.finalize

    def finalize(self, scale, **kwargs):
        flushed = original(self, scale, **kwargs)
        tied = self.sum_tied.__self__
        for _, parameter in tied.named():
            other = tied.holders[int(tied.runner.rank == tied.holders[0])]
            index = [id(reached) for reached in self.store.parameters].index(id(parameter))
            tied.runner.transport.sum_with(flushed[index], other, 0)
            if parameter.grad is not None:
                tied.runner.transport.sum_with(parameter.grad, other, 0)
        return flushed

    ScheduledGradients.finalize = finalize


def count_tied_weight_twice_in_norm():
    ModelParameters.holders = lambda self, parameter: self.state.axes.size("stage")


def ignore_backward_scale():
    original = ScheduledGradients.finalize
    ScheduledGradients.finalize = lambda self, scale, **kwargs: original(self, self.seed, **kwargs)


def use_microbatch_denominator():
    @contextlib.contextmanager
    def with_denominators(self, denominators):
        self.used = {"labels"}
        yield

    BatchLoss.with_denominators = with_denominators


def discard_received_activations():
    StageBoundary._enter = lambda self, index, args, kwargs: (args, kwargs)


def shift_received_activations():
    original = executor.Execution._take_inputs

    def take_inputs(self, cell, message):
        if cell[1] == 2:
            message = dataclasses.replace(message, tensors=tuple(tensor.roll(1, dims=1) for tensor in message.tensors))
        original(self, cell, message)

    executor.Execution._take_inputs = take_inputs


FAULTS = [
    drop_stage_gradients,
    double_microbatch_gradients,
    skip_tied_gradient_sum,
    sum_tied_gradients_twice,
    count_tied_weight_twice_in_norm,
    ignore_backward_scale,
    use_microbatch_denominator,
    discard_received_activations,
    shift_received_activations,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_fault_is_detected(tiny_model, fault):
    [layout] = parse_layouts("pp2")
    comparison = check_tiny_model(tiny_model, layout, sabotage=fault)
    assert not comparison.passed, comparison.worst
    assert comparison.worst.value > 10


def keep_every_fourth_weight_gradient():
    original = executor.backward_weights
    calls = []

    def backward_weights(parameters, groups):
        calls.append(1)
        if len(calls) % 4 == 0:
            original(parameters, groups)

    executor.backward_weights = backward_weights


def test_split_backward_fault_is_detected(tiny_model):
    [layout] = parse_layouts("pp2")
    layout = dataclasses.replace(layout, pipeline_schedule="zbv")
    assert check_tiny_model(tiny_model, layout).passed
    comparison = check_tiny_model(tiny_model, layout, sabotage=keep_every_fourth_weight_gradient)
    assert not comparison.passed and comparison.worst.value > 10


def use_local_denominator():
    original = BatchLoss.denominators
    BatchLoss.denominators = lambda self, *args, over_ranks: original(self, *args, over_ranks=False)


def reduce_on_first_microbatch():
    """Reduces each bucket with the first microbatch that fills it."""
    original = ScheduledGradients.before_backward

    def before_backward(self, action):
        original(self, action)
        self.store.synchronize = True

    ScheduledGradients.before_backward = before_backward


def test_data_parallel_faults_are_detected(tiny_model):
    [layout] = parse_layouts("pp2+dp2+zero1")
    comparison = check_tiny_model(tiny_model, layout, sabotage=use_local_denominator)
    assert not comparison.passed and comparison.worst.value > 10
    # The gradient of a tied weight is complete last in any case, which hides the fault: use an untied model.
    untied = make_tiny_model(CONFIG_MAPPING["llama"](), microbatches=2, batch_size=5)
    with pytest.raises(RankError, match="another gradient after it was reduced"):
        check_tiny_model(untied, layout, sabotage=reduce_on_first_microbatch)


def test_tiny_model_without_fault_passes(tiny_model):
    for layout in parse_layouts("pp2,pp2+dp2+zero1"):
        assert check_tiny_model(tiny_model, layout).passed
    assert (tiny_model.batches[0]["labels"][1] == -100).all()
