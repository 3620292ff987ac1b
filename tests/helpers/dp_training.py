"""Plain training loop for a single process or the ranks of a layout, and the comparisons of its tests."""

import contextlib

import torch
from transformers import AutoModelForCausalLM

from hf_megatron import local_named_parameters
from hf_megatron.checkpoint.gather_full import gather_to_first
from hf_megatron.compat.torch_dtensor import local_tensor
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.core.layouts import parse_layouts
from hf_megatron.data_parallel.fsdp import full_local
from hf_megatron.parallelize import parallel_state
from tests.integration.integrations.trainer.test_trainer import rows


def parse_layout(text):
    [config] = parse_layouts(text)
    return config


def count_ranks(config):
    return config.ranks_per_replica * (config.dp_size or 1)


def load_model(path, config=None, **kwargs):
    return AutoModelForCausalLM.from_pretrained(path, megatron_config=config, **kwargs).train()


def make_batch(seed=0, count=5):
    """Returns a batch with unequal numbers of labels per sample; one sample has none."""
    samples = rows(count, seed, length=33)
    return {name: torch.stack([row[name] for row in samples]) for name in ("input_ids", "labels")}


def shard_batch(model, global_batch):
    state = parallel_state(model)
    if state is None:
        return global_batch
    return {name: value.tensor_split(state.mesh.dp_size)[state.mesh.dp_rank] for name, value in global_batch.items()}


def backward(model, seeds=(0,), scale=lambda loss: loss):
    """Runs one gradient accumulation window, all but the last microbatch in `no_sync`; returns the summed loss."""
    total = 0.0
    for seed in seeds:
        waits = seed != seeds[-1] and parallel_state(model) is not None and hasattr(model, "no_sync")
        with model.no_sync() if waits else contextlib.nullcontext():
            loss = model(**shard_batch(model, make_batch(seed))).loss / len(seeds)
            scale(loss).backward()
        total += loss.item()
    return total


def train(model, optimizer, steps=3, first=0, schedulers=()):
    for step in range(first, first + steps):
        optimizer.zero_grad()
        backward(model, (2 * step, 2 * step + 1))
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()


def gather_weights(model):
    """Returns the full weights on tp rank 0 of each dp rank, and nothing on other ranks."""
    state = parallel_state(model)
    if state is None:
        return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    full = {}
    for name, tensor in model.state_dict().items():
        placement, local = state.placement(name), None
        if state.shards(name):
            local = full_local(tensor, placement.local_shape(tensor.shape, state.axes), state.mesh, state.average(name))
        value = gather_to_first(tensor, placement, state.mesh, None, local)
        if value is not None and state.mesh.tp_rank == 0:
            full[name] = value.clone()
    return full


def clone_parameters(model):
    return {name: parameter.detach().clone() for name, parameter in local_named_parameters(model)}


def parameters_unchanged(model, before):
    """Returns whether the local shard of every parameter equals that in `before`."""
    return all(torch.equal(local_tensor(p.detach()), local_tensor(before[n])) for n, p in local_named_parameters(model))


@torch.no_grad()
def restore_parameters(model, values):
    for name, parameter in local_named_parameters(model):
        parameter.copy_(values[name])


def gather_gradients(model):
    """Returns the reduced gradients of this step, gathered over dp but still sharded over tp."""
    reducer = getattr(getattr(parallel_state(model), "data_parallel", None), "reducer", None)
    if reducer is None:
        return {n: None if p.grad is None else p.grad.clone() for n, p in local_named_parameters(model)}
    reducer.finish()
    return {name: reducer.full_gradient(parameter) for name, parameter in local_named_parameters(model)}


def measure_movement_error(found, expected, start):
    """Returns the distance between `found` and `expected`, relative to the distance from `start` to `expected`."""
    apart = sum((found[name].double() - expected[name].double()).pow(2).sum() for name in expected)
    way = sum((expected[name].double() - start[name].double()).pow(2).sum() for name in expected)
    assert way > 0, "nothing moved"
    return (apart / way).sqrt().item()


def measure_error(stories, run, config, sabotage=None, **kwargs):
    """Returns the largest movement error over dp ranks of `run(model)` relative to the single-process run."""
    expected = load_model(stories, **kwargs)
    start = gather_weights(expected)
    run(expected)

    def on_rank():
        if sabotage is not None:
            sabotage()
        model = load_model(stories, config, **kwargs)
        run(model)
        return gather_weights(model)

    rank_weights = [full for full in run_ranks(on_rank, count_ranks(config)) if full]
    assert len(rank_weights) == (config.dp_size or 1)
    return max(measure_movement_error(full, gather_weights(expected), start) for full in rank_weights)
