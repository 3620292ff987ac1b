"""Tests of torch.distributed collectives that a training loop calls on gradients and weights."""

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from hf_megatron import UnsupportedError, prepare_optimizer
from hf_megatron.core.communication import full_collectives
from hf_megatron.core.fork_harness import run_ranks
from tests.helpers.dp_training import count_ranks
from tests.helpers.training import make_batch, parse_layout, shard_batch

LAYOUTS = ["tp2", "dp2+zero0", "dp2", "dp2+zero2", "dp2+zero3", "cp2", "cp2+zero2", "tp2+dp2"]


def average_gradients(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


def average_gradients_in_background(model):
    works = [dist.all_reduce(parameter.grad, async_op=True) for parameter in model.parameters()]
    for work in works:
        work.wait()
    for parameter in model.parameters():
        parameter.grad /= dist.get_world_size()


def average_views(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad.view(-1))
        parameter.grad.data.div_(dist.get_world_size())


def take_largest_gradients(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, op=dist.ReduceOp.MAX)


def broadcast_gradients_and_weights(model):
    for parameter in model.parameters():
        dist.broadcast(parameter.grad, 0)
        dist.broadcast(parameter.data, 0)


def gather_gradients(model):
    for parameter in model.parameters():
        copies = [torch.empty(parameter.shape) for _ in range(dist.get_world_size())]
        dist.all_gather(copies, parameter.grad)
        parameter.grad.copy_(sum(copies) / len(copies))


def average_weights(model):
    for parameter in model.parameters():
        dist.all_reduce(parameter.data)
        parameter.data /= dist.get_world_size()


LOOPS = [
    average_gradients,
    average_gradients_in_background,
    average_views,
    take_largest_gradients,
    broadcast_gradients_and_weights,
    gather_gradients,
    average_weights,
]


def train_in_loops(path, config=None, loops=LOOPS, sabotage=None):
    """Returns for each loop the losses of three steps and the global norm of each step's gradients."""
    if sabotage is not None:
        sabotage()
    results = {}
    for loop in loops:
        model = AutoModelForCausalLM.from_pretrained(path, megatron_config=config).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if config is not None:
            prepare_optimizer(optimizer)
        values = []
        for step in range(3):
            loss = model(**shard_batch(model, make_batch(step))).loss
            loss.backward()
            loop(model)
            values += [loss.item(), sum(float(p.grad.norm()) ** 2 for p in model.parameters()) ** 0.5]
            optimizer.step()
            optimizer.zero_grad()
        results[loop.__name__] = values
    return results


@pytest.mark.parametrize("text", LAYOUTS)
def test_collectives_on_gradients_and_weights(tiny, text):
    """Gradients are averaged already, so that averages, maxima and copies over the ranks leave them as they are."""
    [expected] = run_ranks(lambda: train_in_loops(tiny), 1)
    config = parse_layout(text)
    for results in run_ranks(lambda: train_in_loops(tiny, config), count_ranks(config)):
        for name, values in results.items():
            assert values == pytest.approx(expected[name], rel=1e-4), name


def drop_writes():
    full_collectives.collective_outputs = lambda func, args: []


@pytest.mark.parametrize("text", ["tp2", "dp2"])
def test_dropped_writes_are_detected(tiny, text):
    loops, name = [average_gradients], average_gradients.__name__
    [expected] = run_ranks(lambda: train_in_loops(tiny, loops=loops), 1)
    for results in run_ranks(lambda: train_in_loops(tiny, parse_layout(text), loops, drop_writes), 2):
        assert results[name] != pytest.approx(expected[name], rel=1e-4)


@pytest.mark.parametrize("text", ["tp2", "dp2", "dp2+zero3"])
def test_outputs_that_differ_between_ranks(tiny, text):
    """A sum on one rank cannot be written to the shards of all; it is taken of a copy, and the result copied back."""

    def on_rank():
        model = AutoModelForCausalLM.from_pretrained(tiny, megatron_config=parse_layout(text)).train()
        model(**shard_batch(model, make_batch(0))).loss.backward()
        gradient = model.model.norm.weight.grad
        with pytest.raises(
            UnsupportedError, match=r"reduce would write .* Run it on a copy, `value = tensor.clone\(\)"
        ):
            dist.reduce(gradient, 0)
        before = torch.tensor(gradient.tolist())
        value = gradient.clone()
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        dist.reduce(value, 0)
        dist.broadcast(value, 0)
        gradient.copy_(value)
        torch.testing.assert_close(torch.tensor(gradient.tolist()), before * 2)

    run_ranks(on_rank, 2)
