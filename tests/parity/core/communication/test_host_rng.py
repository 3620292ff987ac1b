"""What models draw from Python and numpy is the same on ranks that share a batch, and what one process draws."""

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

MASKS_OF_SOUNDS = {"apply_spec_augment": True, "mask_time_prob": 0.4, "mask_time_length": 2, "mask_time_min_masks": 1}
LAYERS_LEFT_OUT = {"layerdrop": 0.5}
CLASSES = {"musicgen_decoder": "MusicgenForCausalLM"}


def draw():
    return random.random(), random.gauss(0, 1), float(numpy.random.rand()), float(numpy.random.randn())


def test_a_state_comes_back():
    # A normal number of each waits for its turn.
    draw()
    state = host_state()
    expected = draw()
    set_host_state(state)
    assert draw() == expected


def losses(tiny_model, changes, seed_of_rank, **kwargs):
    """Trains without steps, and returns the loss of each call and what is drawn behind them."""
    config = tiny_model.model_on_meta().config
    for name, value in changes.items():
        setattr(config, name, value)
    model = tiny_model.load(config=config, **kwargs).train()
    for seed in (random.seed, numpy.random.seed):
        seed(seed_of_rank())
    found = []
    for _ in range(4):
        loss = compute_batch_loss(model, tiny_model.batches[0])[0]
        loss.backward()
        model.zero_grad()
        found.append(loss.item())
    return found, draw()


@pytest.mark.parametrize(
    ("model_type", "task", "changes"),
    [("whisper", "speech", MASKS_OF_SOUNDS), ("musicgen_decoder", "causal", LAYERS_LEFT_OUT)],
    ids=["numpy", "python"],
)
@pytest.mark.parametrize("layout", [{"tp_size": 2}, {"tp_size": 2, "sequence_parallel": True}], ids=["tp", "sp"])
def test_ranks_draw_what_one_process_draws(model_type, task, changes, layout):
    tiny_model = make_tiny_model(CONFIG_MAPPING[model_type](), task=task, class_name=CLASSES.get(model_type))
    [(expected, drawn)] = run_ranks(losses, 1, tiny_model, changes, lambda: 0)
    assert len({*expected}) > 2
    for found, drawn_by_ranks in run_ranks(
        losses, 2, tiny_model, changes, dist.get_rank, megatron_config=ConfigUnderTest(**layout)
    ):
        assert found == pytest.approx(expected, rel=1e-5)
        assert drawn_by_ranks == drawn


def test_states_of_each_rank_are_found():
    """The seeded fault: torch's state alone."""

    def faulty(*args, **kwargs):
        rng.set_host_state = lambda packed: None
        return losses(*args, **kwargs)

    tiny_model = make_tiny_model(CONFIG_MAPPING["whisper"](), task="speech")
    [(expected, _)] = run_ranks(losses, 1, tiny_model, MASKS_OF_SOUNDS, lambda: 0)
    layout = ConfigUnderTest(tp_size=2)
    results = run_ranks(faulty, 2, tiny_model, MASKS_OF_SOUNDS, dist.get_rank, megatron_config=layout)
    assert any(found != pytest.approx(expected, rel=1e-5) for found, _ in results)
