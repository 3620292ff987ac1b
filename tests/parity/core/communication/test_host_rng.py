"""Parity tests of Python and numpy RNG states: ranks of a model-parallel group draw the single-process values."""

import random

import numpy
import pytest
import torch.distributed as dist
from transformers import CONFIG_MAPPING

from hf_megatron.core.communication import rng
from hf_megatron.core.communication.rng import host_state, set_host_state
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.models.verification_gate import ConfigUnderTest
from hf_megatron.testing.measure import compute_batch_loss
from tests.helpers.shared_tiny_models import make_tiny_model

AUDIO_MASKS = {"apply_spec_augment": True, "mask_time_prob": 0.4, "mask_time_length": 2, "mask_time_min_masks": 1}
LAYERDROP = {"layerdrop": 0.5}
CLASSES = {"musicgen_decoder": "MusicgenForCausalLM"}


def draw():
    return random.random(), random.gauss(0, 1), float(numpy.random.rand()), float(numpy.random.randn())


def test_host_state_round_trip():
    # Both generators cache the second normal sample.
    draw()
    state = host_state()
    expected = draw()
    set_host_state(state)
    assert draw() == expected


def train_and_draw(tiny_model, changes, seed_of_rank, **kwargs):
    """Runs four forward and backward passes; returns their losses and the values drawn afterwards."""
    config = tiny_model.model_on_meta().config
    for name, value in changes.items():
        setattr(config, name, value)
    model = tiny_model.load(config=config, **kwargs).train()
    for seed in (random.seed, numpy.random.seed):
        seed(seed_of_rank())
    losses = []
    for _ in range(4):
        loss = compute_batch_loss(model, tiny_model.batches[0])[0]
        loss.backward()
        model.zero_grad()
        losses.append(loss.item())
    return losses, draw()


@pytest.mark.parametrize(
    ("model_type", "task", "changes"),
    [("whisper", "speech", AUDIO_MASKS), ("musicgen_decoder", "causal", LAYERDROP)],
    ids=["numpy", "python"],
)
@pytest.mark.parametrize("layout", [{"tp_size": 2}, {"tp_size": 2, "sequence_parallel": True}], ids=["tp", "sp"])
def test_host_rng_matches_single_process(model_type, task, changes, layout):
    tiny_model = make_tiny_model(CONFIG_MAPPING[model_type](), task=task, model_class=CLASSES.get(model_type))
    [(expected, expected_draws)] = run_ranks(train_and_draw, 1, tiny_model, changes, lambda: 0)
    assert len({*expected}) > 2
    for losses, draws in run_ranks(
        train_and_draw, 2, tiny_model, changes, dist.get_rank, megatron_config=ConfigUnderTest(**layout)
    ):
        assert losses == pytest.approx(expected, rel=1e-5)
        assert draws == expected_draws


def test_unsynced_host_rng_is_detected():
    """Seeded fault: only torch's RNG state is synchronized."""

    def train_without_host_sync(*args, **kwargs):
        rng.set_host_state = lambda packed: None
        return train_and_draw(*args, **kwargs)

    tiny_model = make_tiny_model(CONFIG_MAPPING["whisper"](), task="speech")
    [(expected, _)] = run_ranks(train_and_draw, 1, tiny_model, AUDIO_MASKS, lambda: 0)
    layout = ConfigUnderTest(tp_size=2)
    results = run_ranks(train_without_host_sync, 2, tiny_model, AUDIO_MASKS, dist.get_rank, megatron_config=layout)
    assert any(losses != pytest.approx(expected, rel=1e-5) for losses, _ in results)
