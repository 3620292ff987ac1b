"""Tests of one rank of a fake job with real tensors: its weights are those of a real rank, and its steps are taken."""

import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

from hf_megatron import ConfigError, MegatronConfig, prepare_optimizer
from hf_megatron.compat.torch_dtensor import local_tensor
from hf_megatron.core.fork_harness import run_forks, run_ranks
from hf_megatron.core.runtime import RUNTIME
from hf_megatron.data_parallel.distributed_optimizer import sharded
from hf_megatron.integrations.transformers import loading
from hf_megatron.testing.fake_rank import join_as_fake_rank

LAYOUT = MegatronConfig(tp_size=2, sequence_parallel=True, seed=0)


def create_model():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, vocab_size=64, num_key_value_heads=4, max_position_embeddings=64)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, megatron_config=LAYOUT)


def read_weights():
    return {name: local_tensor(weight.detach()).clone() for name, weight in create_model().named_parameters()}


def run_fake_rank(function, rank=0):
    [result] = run_forks(function, [rank], 2, lambda rank, folder: join_as_fake_rank(rank, 2, "cpu"), 120)
    return result


@pytest.mark.parametrize("rank", [0, 1])
def test_weights_are_those_of_a_real_rank(rank):
    real, fake = run_ranks(read_weights, 2)[rank], run_fake_rank(read_weights, rank)
    assert real.keys() == fake.keys()
    for name, weight in real.items():
        assert torch.equal(weight, fake[name]), name


def test_steps_are_taken_with_gradients_that_are_not_finite():
    def on_rank():
        model = create_model().train()
        optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        ids = torch.arange(16).view(1, 16)
        before = local_tensor(model.model.norm.weight.detach()).clone()
        (model(input_ids=ids, labels=ids).loss * float("nan")).backward()
        optimizer.step()
        return sharded(optimizer).step_was_skipped, torch.equal(before, local_tensor(model.model.norm.weight))

    assert run_fake_rank(on_rank) == (False, False)


def test_device_is_chosen_for_the_job_that_was_joined():
    def on_rank():
        chosen = [loading._device_type()]
        RUNTIME.fake_job = dist.group.WORLD, "cuda"
        chosen.append(loading._device_type())
        # A later job, such as a dry run in a fork, has no device.
        RUNTIME.fake_job = None, "cuda"
        return [*chosen, loading._device_type()]

    assert run_fake_rank(on_rank) == ["cpu", "cuda", "cpu"]


@pytest.mark.parametrize("device", ["tpu", "cuda"])
def test_unavailable_device_is_rejected(device, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=f"device = '{device}' is not available"):
        join_as_fake_rank(0, 2, device)
    assert not dist.is_initialized()
    # The cure: a rank on the CPU.
    assert run_fake_rank(loading._device_type) == "cpu"


def test_object_collectives_and_reduce_scatters_return_own_values():
    def on_rank():
        gathered, output = [None, None], torch.empty(2)
        dist.all_gather_object(gathered, {"rank": 0})
        dist.reduce_scatter_tensor(output, torch.arange(4.0))
        return gathered, output

    gathered, output = run_fake_rank(on_rank)
    assert gathered == [{"rank": 0}, {"rank": 0}] and output.tolist() == [0, 1]
