"""Tests of a new parallel axis: one folder and one entry in `AXES`; the rest follows from its parameter shardings."""

import pytest
import torch
from accelerate import Accelerator
from torch.distributed.tensor import DTensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from hf_megatron import parallelize
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.core.layouts import parse_layouts
from hf_megatron.parallel_state import parallel_state
from hf_megatron.testing.parity import check_tiny_model
from tests.helpers.shared_tiny_models import make_tiny_model
from tests.toy_axis import axis


@pytest.fixture(scope="module")
def tiny_model():
    return make_tiny_model(CONFIG_MAPPING["llama"](), microbatches=2, batch_size=5)


def register_toy_axis():
    parallelize.AXES = (*parallelize.AXES, axis)


def require_only_axis_shards(model):
    split = {name: p for name, p in model.named_parameters() if isinstance(p, DTensor)}
    assert split and all(name.endswith(axis.SPLIT) for name in split)
    assert all(p.to_local().shape[0] * axis.PAIR == p.shape[0] for p in split.values())


@pytest.mark.parametrize("text", ["dp2+zero0", "dp2+zero1", "dp4+zero0", "dp4+zero1", "dp4+zero2", "pp2+dp2+zero1"])
def test_new_axis_matches_single_process(tiny_model, text):
    [layout] = parse_layouts(text)
    comparison = check_tiny_model(tiny_model, layout, sabotage=register_toy_axis, prepare=require_only_axis_shards)
    assert comparison.passed, comparison.worst


def test_wrong_gradient_average_is_detected(tiny_model):
    """Seeded fault: a shard's gradient is averaged over all dp ranks, including ranks with the other shard."""

    def average_over_all_dp_ranks():
        original = axis.place

        def place(model, state):
            original(model, state)
            state.axes = state.axes.with_axis("wrong_shard", state.axes["dp"])
            state.axes = state.axes.with_axis("wrong_replicate", state.axes["dp"].without(state.axes["dp"]))
            for name, sharding in state.shardings.items():
                if sharding.style == axis.NAME:
                    rule = axis.GradientRule(average="wrong")
                    state.shardings[name] = axis.replace(sharding, gradient=rule)

        axis.place = place
        register_toy_axis()

    [layout] = parse_layouts("dp2+zero1")
    comparison = check_tiny_model(tiny_model, layout, sabotage=average_over_all_dp_ranks)
    assert not comparison.passed and comparison.worst.value > 10


def train_and_save(path, config, folder=None, resume=None):
    if config is not None:
        register_toy_axis()
    options = {} if config is None else {"megatron_config": config}
    model = AutoModelForCausalLM.from_pretrained(path, **options)
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4))
    if resume is not None:
        accelerator.load_state(str(resume))
    state = parallel_state(model)
    ids = torch.arange(32).view(4, 8) * 3
    samples = ids if state is None else ids.tensor_split(state.mesh.dp_size)[state.mesh.dp_rank]
    accelerator.backward(model(input_ids=samples, labels=samples).loss)
    optimizer.step()
    optimizer.zero_grad()
    if folder is not None:
        accelerator.save_state(str(folder / "state"))
        model.save_pretrained(folder / "merged")
    weights = accelerator.unwrap_model(model).state_dict()
    return {name: tensor.detach().clone() for name, tensor in weights.items()} if state is None else None


def test_checkpoints_follow_the_shardings(stories, tmp_path):
    [layout] = parse_layouts("dp4+zero1")
    run_ranks(train_and_save, 4, stories, layout, tmp_path)
    [expected] = run_ranks(train_and_save, 1, stories, None)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    # A step of 1e-2 turns the round-off of small gradients into 1e-5; a lost moment changes a full step.
    for name, tensor in expected.items():
        assert torch.allclose(merged[name], tensor, atol=1e-4), name

    # Optimizer moments: a second step resumed from the saved state, in a single process and with the axis.
    again = run_ranks(train_and_save, 1, stories, None, None, tmp_path / "state")[0]
    assert any(not torch.equal(again[name], expected[name]) for name in expected)
    second_folder = tmp_path / "one"
    second_folder.mkdir()
    run_ranks(train_and_save, 4, stories, layout, second_folder, tmp_path / "state")
    continued = AutoModelForCausalLM.from_pretrained(second_folder / "merged").state_dict()
    for name, tensor in again.items():
        assert torch.allclose(continued[name], tensor, atol=1e-4), name
