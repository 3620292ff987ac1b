"""Tests of optimizers that need full parameters (Muon, Adafactor, Shampoo, 8-bit AdamW) on sharded parameters."""

import copy
import functools

import bitsandbytes
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from hf_megatron import local_named_parameters, prepare_optimizer
from hf_megatron.checkpoint.reader import Checkpoint, open_checkpoint
from hf_megatron.checkpoint.training_state import load_model, load_optimizers, pieces, training_metadata
from hf_megatron.checkpoint.transaction import Transaction
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.data_parallel import full_params, layer_wise
from hf_megatron.data_parallel.distributed_optimizer import sharded
from tests.helpers.dp_training import (
    clone_parameters,
    count_ranks,
    measure_movement_error,
    parameters_unchanged,
    parse_layout,
    restore_parameters,
    shard_batch,
)
from tests.helpers.optimizers import LIMIT, ROUNDED_LIMIT, Shampoo, list_matrices, list_others
from tests.helpers.training import gather_full_tensors, make_batch
from tests.integration.integrations.trainer.test_resume import read_full_tensors

STEPS = 3


class Fp32Muon(torch.optim.Optimizer):
    """Muon in fp32, with which differences are visible that bf16 hides."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                momentum = state.setdefault("momentum_buffer", torch.zeros_like(parameter))
                momentum.lerp_(parameter.grad, 0.1)
                update = _orthogonalize(momentum + 0.1 * parameter.grad)
                parameter.mul_(1 - 0.1 * group["lr"]).add_(update, alpha=-group["lr"])


def _orthogonalize(matrix):
    matrix = matrix / matrix.norm()
    for _ in range(3):
        square = matrix @ matrix.T
        matrix = 3.4445 * matrix - 4.775 * square @ matrix + 2.0315 * square @ square @ matrix
    return matrix


def with_adamw(make):
    """Returns a maker of an optimizer for the matrices, and of AdamW for the other parameters."""

    def make_both(model):
        return [make(list_matrices(model)), torch.optim.AdamW(list_others(model), lr=1e-3, eps=1e-4)]

    return make_both


MAKERS = {
    "Muon": (with_adamw(lambda matrices: torch.optim.Muon(matrices, lr=1e-2)), ROUNDED_LIMIT),
    "Muon match_rms_adamw": (
        with_adamw(lambda matrices: torch.optim.Muon(matrices, lr=1e-2, adjust_lr_fn="match_rms_adamw")),
        ROUNDED_LIMIT,
    ),
    "Fp32Muon": (with_adamw(lambda matrices: Fp32Muon(matrices, lr=1e-2)), LIMIT),
    "Shampoo": (lambda model: [Shampoo(model.parameters(), lr=1e-2)], LIMIT),
    "torch Adafactor": (lambda model: [torch.optim.Adafactor(model.parameters(), lr=1e-2)], LIMIT),
    "transformers Adafactor": (
        lambda model: [transformers.Adafactor(model.parameters(), scale_parameter=True, warmup_init=True)],
        LIMIT,
    ),
    "transformers Adafactor with momentum": (
        lambda model: [
            transformers.Adafactor(
                model.parameters(), lr=1e-2, beta1=0.9, relative_step=False, scale_parameter=False, weight_decay=0.1
            )
        ],
        LIMIT,
    ),
    "AdamW8bit": (
        lambda model: [bitsandbytes.optim.AdamW8bit(model.parameters(), lr=1e-3, eps=1e-4, min_8bit_size=256)],
        ROUNDED_LIMIT,
    ),
    "bitsandbytes AdamW": (lambda model: [bitsandbytes.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)], LIMIT),
}
# Classes that only their users know.
DECLARED = (Fp32Muon, Shampoo)


def prepare(optimizer):
    return prepare_optimizer(optimizer, layer_wise=isinstance(optimizer, DECLARED))


def train(model, optimizers, steps=STEPS, first=0):
    """Returns the losses."""
    losses = []
    for step in range(first, first + steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = model(**shard_batch(model, make_batch(step))).loss
        loss.backward()
        losses.append(loss.item())
        # Without compilation: bitsandbytes' and torchao's updates would be compiled for every shape.
        with torch.compiler.set_stance("force_eager"):
            for optimizer in optimizers:
                optimizer.step()
    return losses


def gather_results(model, losses):
    """Returns the losses, and the full gradients and weights on the ranks that gather them."""
    gradients = gather_full_tensors(model, {name: parameter.grad for name, parameter in local_named_parameters(model)})
    return losses, gradients, gather_full_tensors(model, dict(local_named_parameters(model)))


def load(path, text):
    config = None if text is None else parse_layout(text)
    return AutoModelForCausalLM.from_pretrained(path, megatron_config=config).train()


def train_with_each(path, text, names=tuple(MAKERS)):
    model = load(path, text)
    start, results = clone_parameters(model), {}
    for name in names:
        restore_parameters(model, start)
        optimizers = [prepare(optimizer) for optimizer in MAKERS[name][0](model)]
        results[name] = gather_results(model, train(model, optimizers))
    return results


@pytest.fixture(scope="module")
def by_layout(tiny, tiny_experts):
    @functools.cache
    def run(text, experts=False):
        path = tiny_experts if experts else tiny
        if text is None:
            return train_with_each(path, None)
        return run_ranks(train_with_each, count_ranks(parse_layout(text)), path, text, timeout=240)

    return run


def compare(results, expected, start, limit):
    """Compares the losses of all ranks, and the tensors of those that gathered them, with one process."""
    expected_losses, expected_gradients, expected_weights = expected
    compared = set()
    for losses, gradients, weights in results:
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected_losses), rtol=limit, atol=0)
        # Experts are gathered on one of several data-parallel ranks.
        gathered = {name: weight for name, weight in weights.items() if weight is not None}
        if not gathered:
            continue
        compared |= gathered.keys()
        assert measure_movement_error(gathered, {name: expected_weights[name] for name in gathered}, start) < limit
        for name in gathered:
            gradient, expected_gradient = gradients[name], expected_gradients[name]
            assert (gradient is None) == (expected_gradient is None), name
            if gradient is not None:
                scale = expected_gradient.abs().max().item()
                assert (gradient - expected_gradient).abs().max().item() <= 10 * limit * scale, name
    assert compared == expected_weights.keys()


def read_start(path):
    return {name: parameter.detach() for name, parameter in load(path, None).named_parameters()}


LAYOUTS = [
    "tp2",
    "tp2+sp",
    "pp2",
    "dp2+zero0",
    "dp2",
    "dp2+zero2",
    "dp2+zero3",
    "cp2",
    "tp2+dp2",
    "tp2+dp2+zero0",
    "tp2+dp2+zero2",
    "tp2+dp2+zero3",
    "tp2+pp2",
    "pp2+dp2",
    "tp4",
    "dp4+replicas2",
]


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("text", LAYOUTS)
def test_layer_wise_optimizers(tiny, by_layout, name, text):
    results = [rank_results[name] for rank_results in by_layout(text)]
    compare(results, by_layout(None)[name], read_start(tiny), MAKERS[name][1])


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("text", ["dp2+ep2", "tp2+ep2", "dp4+ep2", "pp2+dp2+ep2", "tp2+ep2+etp2+dp2"])
def test_layer_wise_optimizers_with_experts(tiny_experts, by_layout, name, text):
    """Adafactor factors the moments of each expert's matrix, from the statistics of the tensor of all experts."""
    results = [rank_results[name] for rank_results in by_layout(text, experts=True)]
    compare(results, by_layout(None, experts=True)[name], read_start(tiny_experts), MAKERS[name][1])


# Seeded faults


def keep_shards_before_the_step():
    layer_wise.LayerWiseStep.scatter = lambda self: None


def leave_out_a_shard():
    original = full_params.FullParam.fill
    full_params.FullParam.fill = lambda self, target, pieces: original(self, target.zero_(), list(pieces)[:1])


def step_on_shards():
    def add(self, leaves):
        pass

    layer_wise.LayerWiseStep.add = add


@pytest.mark.parametrize(
    "fault", [keep_shards_before_the_step, leave_out_a_shard, step_on_shards], ids=lambda fault: fault.__name__
)
@pytest.mark.parametrize("text", ["tp2", "dp2"])
def test_faults_are_detected(tiny, text, fault):
    names = ("Fp32Muon",) if fault is not step_on_shards or text == "tp2" else ("transformers Adafactor",)
    start, expected = read_start(tiny), train_with_each(tiny, None, names)

    def on_rank():
        fault()
        return train_with_each(tiny, text, names)

    for results in run_ranks(on_rank, 2):
        for name, (_, _, weights) in results.items():
            if weights:
                assert not measure_movement_error(weights, expected[name][2], start) < 50 * LIMIT


# State


def test_state_is_distributed_over_ranks(tiny):
    """Every parameter's state is on one of the ranks that hold its shards; with ZeRO stage 0, once per replica."""

    def count_entries(text):
        model = load(tiny, text)
        optimizers = [prepare(optimizer) for optimizer in MAKERS["Muon"][0](model)]
        train(model, optimizers, 1)
        return sum(state["momentum_buffer"].numel() for state in optimizers[0].state.values())

    full = count_entries(None)
    for text, shares in {"tp2": 2, "dp2": 2, "tp2+dp2": 4, "dp2+zero0": 1, "dp2+zero3": 2}.items():
        counts = run_ranks(count_entries, count_ranks(parse_layout(text)), text)
        assert sum(counts) == full * len(counts) // shares, text
        assert max(counts) < 1.3 * full / shares, text


def test_full_parameters_are_freed_between_steps(tiny):
    def on_rank():
        model = load(tiny, "tp2")
        optimizers = [prepare(optimizer) for optimizer in MAKERS["Muon"][0](model)]
        train(model, optimizers, 1)
        full = [leaf.full for leaf in sharded(optimizers[0]).leaves]
        assert all(parameter.tensor.grad is None for parameter in full)
        return len(full), sum(parameter.tensor.untyped_storage().nbytes() for parameter in full)

    assert run_ranks(on_rank, 2) == [(14, 0), (14, 0)]


def save(model, optimizers, target):
    with Transaction(target, training_metadata(model, optimizers)) as transaction:
        transaction.write(pieces(model, optimizers))


CHAIN = [None, "tp2", "pp2", "dp2", "tp2+dp2+zero2", "dp2+zero3", "dp2+zero0", "tp2+pp2", "cp2", None]


@pytest.mark.parametrize(
    "name", ["Fp32Muon", "Shampoo", "torch Adafactor", "transformers Adafactor with momentum", "AdamW8bit"]
)
def test_state_resumes_on_other_layouts(tiny, tmp_path, name):
    """A run of one step on each layout equals the uninterrupted run; a checkpoint that was only moved is unchanged."""

    def step_on(text, index):
        model = load(tiny, text)
        optimizers = [prepare(optimizer) for optimizer in MAKERS[name][0](model)]
        if index:
            checkpoint = open_checkpoint(tmp_path / f"{index - 1}")
            load_model(model, checkpoint)
            load_optimizers(model, optimizers, checkpoint)
            save(model, optimizers, tmp_path / f"{index - 1} again")
        losses = train(model, optimizers, 1, first=index)
        save(model, optimizers, tmp_path / str(index))
        return gather_results(model, losses)

    model = load(tiny, None)
    optimizers = [prepare(optimizer) for optimizer in MAKERS[name][0](model)]
    for index, text in enumerate(CHAIN):
        expected = gather_results(model, train(model, optimizers, 1, first=index))
        results = run_ranks(step_on, 1 if text is None else count_ranks(parse_layout(text)), text, index, timeout=120)
        compare(results, expected, read_start(tiny), MAKERS[name][1])
        if index:
            moved, unchanged = (read_full_tensors(tmp_path / f"{index - 1}{end}") for end in (" again", ""))
            assert moved.keys() == unchanged.keys()
            assert all(torch.equal(moved[key], unchanged[key]) for key in moved), text
            saved, reread = (
                Checkpoint(tmp_path / f"{index - 1}{end}").metadata["optimizers"] for end in ("", " again")
            )
            assert [optimizer["scalars"] for optimizer in saved] == [optimizer["scalars"] for optimizer in reread]


@pytest.mark.parametrize("text", ["tp2", "dp2", "tp2+dp2+zero2"])
def test_state_dict_round_trip_is_bitwise_identical(tiny, text):
    def on_rank():
        model = load(tiny, text)
        [optimizer] = map(prepare, MAKERS["transformers Adafactor with momentum"][0](model))
        train(model, [optimizer], 2)
        state, middle = copy.deepcopy(optimizer.state_dict()), clone_parameters(model)
        train(model, [optimizer], 1, first=2)
        expected = clone_parameters(model)
        results = []
        for load_it in (True, False):
            restore_parameters(model, middle)
            [again] = map(prepare, MAKERS["transformers Adafactor with momentum"][0](model))
            if load_it:
                again.load_state_dict(state)
            train(model, [again], 1, first=2)
            results.append(parameters_unchanged(model, expected))
        return results

    assert run_ranks(on_rank, count_ranks(parse_layout(text))) == [[True, False]] * count_ranks(parse_layout(text))


# Parameters without gradients


@pytest.mark.parametrize("text", ["tp2", "dp2", "dp2+zero2"])
def test_frozen_parameters(tiny, text):
    def run(text):
        model = load(tiny, text)
        [optimizer] = map(prepare, MAKERS["transformers Adafactor with momentum"][0](model))
        losses = []
        for index, part in enumerate(("q_proj", "mlp", "norm")):
            optimizer.zero_grad()
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(part in name)
            losses += train(model, [optimizer], 1, first=index)
        model.requires_grad_(True)
        optimizer.zero_grad()
        return gather_results(model, losses)

    compare(run_ranks(run, 2, text), run(None), read_start(tiny), LIMIT)
