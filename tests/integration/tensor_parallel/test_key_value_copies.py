"""Tests of fewer key and value heads than ranks: neighboring ranks hold copies, and sums must count them once."""

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM

from hf_megatron import MegatronConfig
from hf_megatron.core.axes import Axes
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.core.placement import GradientRule, ParameterSharding, Placement, count_shared_copies
from tests.helpers.training import PatternRuns, save_tiny


def train_with_l2_penalty(loop):
    for seed in range(2):
        loss = loop.loss(seed)
        square = sum(parameter.float().pow(2).sum() for parameter in loop.model.parameters())
        loop.see(f"square {seed}", square.full_tensor() if isinstance(square, DTensor) else square)
        (loss + 0.1 * square).backward()
        loop.losses.append(loss.item())
        loop.see_gradients(f"step {seed}")
        loop.optimizer.step()
        loop.optimizer.zero_grad()


def train_with_manual_clipping(loop):
    for seed in range(2):
        loss = loop.loss(seed)
        loss.backward()
        norms = [parameter.grad.norm() for parameter in loop.model.parameters()]
        loop.see(f"norm {seed}", float(torch.stack(norms).norm()))
        total = sum(norm**2 for norm in norms) ** 0.5
        for parameter in loop.model.parameters():
            parameter.grad.mul_(0.1 / total)
        loop.losses.append(loss.item())
        loop.see_gradients(f"step {seed}")
        loop.optimizer.step()
        loop.optimizer.zero_grad()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    models = {}
    for heads, entries in ((1, 64), (2, 64), (2, 66)):
        folder = tmp_path_factory.mktemp(f"heads{heads}")
        save_tiny(folder, num_key_value_heads=heads, vocab_size=entries)
        models[heads, entries] = PatternRuns(
            folder, {"train_with_l2_penalty": train_with_l2_penalty, "cut by hand": train_with_manual_clipping}
        )
    return models


@pytest.mark.parametrize(
    ("heads", "entries", "text"),
    [
        (1, 64, "tp2"),
        (1, 64, "tp2+sp"),
        (1, 64, "tp2+dp2+zero3"),
        (2, 64, "tp4"),
        (1, 64, "tp4"),
        # The embedding is on a different mesh than the key and value projections.
        (2, 66, "tp4"),
        (2, 66, "tp4+sp"),
    ],
)
def test_sums_over_all_parameters(runs, heads, entries, text):
    runs[heads, entries].compare(text, "train_with_l2_penalty")
    runs[heads, entries].compare(text, "cut by hand")


def test_full_tensors_equal_saved_weights(tmp_path):
    """`DTensor.full_tensor` returns the saved weights, although two mesh dims shard some of them."""
    save_tiny(tmp_path)
    stock = LlamaForCausalLM.from_pretrained(tmp_path).state_dict()

    def read():
        model = LlamaForCausalLM.from_pretrained(tmp_path, megatron_config=MegatronConfig(tp_size=4))
        parameters = dict(model.named_parameters())
        assert {parameter.device_mesh.mesh_dim_names for parameter in parameters.values()} == {("tp_shard", "tp_copy")}
        return {name: parameter.full_tensor().detach() for name, parameter in parameters.items()}

    for unsharded in run_ranks(read, 4):
        for name, value in unsharded.items():
            assert torch.equal(value, stock[name]), name


def make_shardings(*sizes, copies=2, groups=1):
    specs = [ParameterSharding("k", (8, 4), "colwise", Placement.split("tp", 0, copies=copies), GradientRule())]
    specs.append(ParameterSharding("n", (4,), "replicated", Placement(), GradientRule()))
    return specs + [
        ParameterSharding("w", (size, 4), "colwise", Placement.split("tp", 0, groups=groups), GradientRule())
        for size in sizes
    ]


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (make_shardings(8), 2),
        (make_shardings(67), 2),
        # Shard sizes: 17, 17, 17, 15 with a single split; 17, 16, 17, 16 with two nested splits.
        (make_shardings(66), 1),
        (make_shardings(8, groups=2), 1),
        (make_shardings(8, copies=1), 1),
        (make_shardings(66, copies=4), 1),
        ([*make_shardings(8), *make_shardings(8, copies=4)], 2),
    ],
)
def test_shared_copies_require_identical_splits(made, expected):
    assert count_shared_copies(made, Axes.from_sizes(0, tp=4)) == expected
