"""Tests of the pipeline's tests: each seeded fault must make the comparison fail."""

import contextlib
import dataclasses

import pytest
from transformers import CONFIG_MAPPING

from hf_megatron.data_parallel.model_parameters import ModelParameters
from hf_megatron.errors import RankError
from hf_megatron.losses.batch_loss import BatchLoss
from hf_megatron.pipeline_parallel import executor
from hf_megatron.pipeline_parallel.boundary import StageBoundary
from hf_megatron.pipeline_parallel.loss_grad_scale import ScheduledGradients
from hf_megatron.pipeline_parallel.p2p import Transport
from hf_megatron.pipeline_parallel.tied_weight_grads import TiedGradients
from hf_megatron.testing.check import parse_layouts
from hf_megatron.testing.parity import check_tiny_model
from tests.helpers.shared_tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def tiny_model():
    """Tied embeddings, several microbatches per call and two calls per step."""
    return make_tiny_model(CONFIG_MAPPING["gemma2"](), microbatches=2, batch_size=5)


def drop_the_gradient_of_a_stage():
    original = executor.Execution._hand_back

    def hand_back(self, cell, inputs):
        original(self, cell, inputs)
        if cell[1] == 2:
            for gradient in self._buffers.gradients[cell[0] - 1, cell[1]]:
                gradient.zero_()

    executor.Execution._hand_back = hand_back


def count_a_microbatch_twice():
    original = executor.Execution._backward

    def backward(self, action):
        seeds = self.backward.seeds
        if action.microbatch == 2:
            self.backward.seeds = lambda microbatch: tuple(2 * seed for seed in seeds(microbatch))
        original(self, action)
        self.backward.seeds = seeds

    executor.Execution._backward = backward


def forget_to_sum_tied_gradients():
    Transport.sum_with = lambda self, tensor, peer, tag: None


def sum_tied_gradients_of_the_full_step_again():
    """Sums what was summed in the call before once more."""
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


def count_the_tied_weight_twice_in_the_norm():
    ModelParameters.holders = lambda self, parameter: self.state.axes.size("stage")


def ignore_the_scale_of_backward():
    original = ScheduledGradients.finalize
    ScheduledGradients.finalize = lambda self, scale, **kwargs: original(self, self.seed, **kwargs)


def each_microbatch_by_its_own_targets():
    @contextlib.contextmanager
    def over(self, share):
        self.used = {"labels"}
        yield

    BatchLoss.over = over


def keep_the_zeros_instead_of_what_was_received():
    StageBoundary._enter = lambda self, index, args, kwargs: (args, kwargs)


def mix_up_microbatches():
    original = executor.Execution._take_inputs

    def take_inputs(self, cell, message):
        if cell[1] == 2:
            message = dataclasses.replace(message, tensors=tuple(tensor.roll(1, dims=1) for tensor in message.tensors))
        original(self, cell, message)

    executor.Execution._take_inputs = take_inputs


FAULTS = [
    drop_the_gradient_of_a_stage,
    count_a_microbatch_twice,
    forget_to_sum_tied_gradients,
    sum_tied_gradients_of_the_full_step_again,
    count_the_tied_weight_twice_in_the_norm,
    ignore_the_scale_of_backward,
    each_microbatch_by_its_own_targets,
    keep_the_zeros_instead_of_what_was_received,
    mix_up_microbatches,
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_fault_is_found(tiny_model, fault):
    [layout] = parse_layouts("pp2")
    comparison = check_tiny_model(tiny_model, layout, sabotage=fault)
    assert not comparison.passed, comparison.worst
    assert comparison.worst.value > 10


def add_up_weights_of_the_last_microbatch_only():
    original = executor.backward_weights
    seen = []

    def backward_weights(parameters, groups):
        seen.append(1)
        if len(seen) % 4 == 0:
            original(parameters, groups)

    executor.backward_weights = backward_weights


def test_faults_of_a_split_backward_are_found(tiny_model):
    [layout] = parse_layouts("pp2")
    layout = dataclasses.replace(layout, pipeline_schedule="zbv")
    assert check_tiny_model(tiny_model, layout).passed
    comparison = check_tiny_model(tiny_model, layout, sabotage=add_up_weights_of_the_last_microbatch_only)
    assert not comparison.passed and comparison.worst.value > 10


def average_over_stages_instead_of_dp_ranks():
    original = BatchLoss.denominators
    BatchLoss.denominators = lambda self, *args, over_ranks: original(self, *args, over_ranks=False)


def forget_that_reduction_runs_last():
    """Buckets are reduced with the first microbatch that fills them."""
    original = ScheduledGradients.before_backward

    def before_backward(self, action):
        original(self, action)
        self.store.synchronize = True

    ScheduledGradients.before_backward = before_backward


def test_faults_with_data_parallelism_are_found(tiny_model):
    [layout] = parse_layouts("pp2+dp2+zero1")
    comparison = check_tiny_model(tiny_model, layout, sabotage=average_over_stages_instead_of_dp_ranks)
    assert not comparison.passed and comparison.worst.value > 10
    # A tied weight's gradient comes last in any case.
    untied = make_tiny_model(CONFIG_MAPPING["llama"](), microbatches=2, batch_size=5)
    with pytest.raises(RankError, match="another gradient after it was reduced"):
        check_tiny_model(untied, layout, sabotage=forget_that_reduction_runs_last)


def test_a_tiny_model_without_faults_passes(tiny_model):
    for layout in parse_layouts("pp2,pp2+dp2+zero1"):
        assert check_tiny_model(tiny_model, layout).passed
    assert (tiny_model.batches[0]["labels"][1] == -100).all()
