"""Tests of the check that all ranks of a replica get the same batch."""

import pytest
import torch
import torch.distributed as dist

from hf_megatron import CheckpointError, ConfigError
from hf_megatron.core.communication.rank_errors import raise_on_all_ranks
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.errors import RankError
from hf_megatron.parallelize import parallel_state
from tests.helpers.dp_training import count_ranks
from tests.helpers.training import make_batch, parse_layout, save_tiny
from tests.integration.core.test_off_stage import load


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny")
    save_tiny(path, num_hidden_layers=4)
    return path


@pytest.mark.parametrize("name", ["input_ids", "attention_mask"])
@pytest.mark.parametrize("text", ["tp2", "pp2", "tp2+pp2"])
def test_different_samples_are_detected_on_all_ranks(folder, text, name):
    def on_rank():
        model = load(folder, text)
        inputs = make_batch(0) | {"attention_mask": torch.ones(4, 9, dtype=torch.long)}
        model(**inputs).loss.backward()
        changed = inputs | {name: inputs[name].roll(dist.get_rank(), dims=0).clone()}
        changed["attention_mask"][dist.get_rank(), -1] = 0 if name == "attention_mask" else 1
        with pytest.raises(ConfigError, match=rf"{name}: the (tp|pp) ranks .* different values \(call 2 of the model"):
            model(**changed)
        # The batch is compared again in the fourth call.
        return model(**inputs).loss.item()

    losses = run_ranks(on_rank, count_ranks(parse_layout(text)))
    assert losses == [losses[0]] * len(losses)


@pytest.mark.parametrize("text", ["tp2", "pp2"])
def test_mismatched_collective_is_reported(folder, text):
    """Ranks may reach different collectives after an error that the loop catches on one rank only."""

    def on_rank():
        model = load(folder, text)
        state = parallel_state(model)
        if dist.get_rank() == 1:
            with pytest.raises(RankError, match="Comparing the batch .*: rank 0 of 2 is at another collective: Saving"):
                model(**make_batch(0))
        else:
            with pytest.raises(CheckpointError, match="rank 1 of 2 is at another collective: Comparing the batch"):
                raise_on_all_ranks(None, state.mesh.host_group(text[:2]), "Saving a checkpoint")

    run_ranks(on_rank, 2)


def test_replicas_take_different_batches(folder):
    def on_rank():
        model = load(folder, "tp2+dp2")
        model(**make_batch(dist.get_rank() // 2)).loss.backward()
        # No rank exits while others still send gradients.
        dist.barrier()

    run_ranks(on_rank, 4)
