"""Tests of torchao's 8-bit AdamW on sharded parameters; its states are tensor subclasses."""

import bitsandbytes
import pytest
import torch

from hf_megatron import CheckpointError, prepare_optimizer
from hf_megatron.checkpoint.reader import Checkpoint
from hf_megatron.core.fork_harness import run_ranks
from tests.helpers.dp_training import load_model, measure_error, parse_layout, train
from tests.integration.data_parallel.test_layer_wise import save

optim = pytest.importorskip("torchao.optim")

# A different rounding of a gradient may select another 8-bit code.
LIMIT = 5e-2


def train_without_compilation(model, optimizer):
    with torch.compiler.set_stance("force_eager"):
        train(model, optimizer, 2)


@pytest.mark.parametrize("text", ["tp2", "dp2"])
def test_adamw_8bit(stories, text):
    def run(model):
        optimizer = prepare_optimizer(optim.AdamW8bit(model.parameters(), lr=1e-3, eps=1e-4))
        train_without_compilation(model, optimizer)

    assert measure_error(stories, run, parse_layout(text)) < LIMIT


def test_state_is_not_saved(stories, tmp_path):
    def on_rank():
        model = load_model(stories, parse_layout("tp2"))
        optimizer = prepare_optimizer(optim.AdamW8bit(model.parameters(), lr=1e-3))
        train_without_compilation(model, optimizer)
        with pytest.raises(CheckpointError, match="Use bitsandbytes.optim.AdamW8bit to save and"):
            save(model, [optimizer], tmp_path / "torchao")
        optimizer = prepare_optimizer(bitsandbytes.optim.AdamW8bit(model.parameters(), lr=1e-3))
        train_without_compilation(model, optimizer)
        save(model, [optimizer], tmp_path / "bitsandbytes")

    run_ranks(on_rank, 2, timeout=120)
    assert Checkpoint(tmp_path / "bitsandbytes").dtype("optimizer/0/state1/model.embed_tokens.weight") == torch.uint8
