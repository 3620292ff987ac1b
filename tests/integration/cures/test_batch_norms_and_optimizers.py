"""Tests that cures for batch norms and for optimizers of experts give the results of a single process."""

import re

import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from transformers import CONFIG_MAPPING

from hf_megatron import UnsupportedError, prepare_optimizer
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.parallelize import parallel_state
from hf_megatron.testing.measure import silence
from tests.helpers.shared_tiny_models import make_tiny_model
from tests.helpers.training import parse_layout, shard_batch

STEPS = 2


def train(model, optimizer, batch, prepare=lambda model: None):
    """Returns the losses and gradient norms of some steps; `model.train()` is called in each, as by Trainer."""
    values = []
    for _ in range(STEPS):
        prepare(model.train())
        loss = model(**shard_batch(model, batch)).loss
        loss.backward()
        values += [loss.item(), float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))]
        optimizer.step()
        optimizer.zero_grad()
    return values


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("text", ["dp2", "pp2"])
def test_batch_norms_in_evaluation_mode(text, keeps):
    """Canary has a batch norm in every layer of its encoder."""
    # The parity tests of speech models share this tiny model.
    tiny = make_tiny_model(CONFIG_MAPPING["canary"](), task="speech", microbatches=2)
    batch = tiny.batches[0]

    def freeze_batch_norms(model):
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.eval()
                if keeps:
                    module.train = lambda mode, module=module: module

    def on_rank(layout):
        model = tiny.load(**({} if layout is None else {"megatron_config": layout})).train()
        silence(model)
        if layout is not None:
            cure = (
                "Call module.eval() on every BatchNorm module after each model.train(), or once and set `module.train "
                "= lambda mode: module` for Trainer, which calls model.train() in every step, or load the model with "
                "dp_size=1 and num_microbatches=1."
            )
            with pytest.raises(UnsupportedError, match=re.escape(cure)):
                model(**shard_batch(model, batch))
        freeze_batch_norms(model)
        optimizer = prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
        return train(model, optimizer, batch, (lambda model: None) if keeps else freeze_batch_norms)

    expected = pytest.approx(on_rank(None), rel=1e-4)
    assert run_ranks(on_rank, 2, parse_layout(text)) == [expected] * 2


def test_batch_norms_without_running_statistics_need_the_full_batch():
    # The parity tests of speech models share this tiny model.
    tiny = make_tiny_model(CONFIG_MAPPING["canary"](), task="speech", microbatches=2)
    batch = tiny.batches[0]

    def load(layout):
        model = tiny.load(**({} if layout is None else {"megatron_config": layout})).eval()
        silence(model)
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.track_running_stats, module.running_mean, module.running_var = False, None, None
        return model

    def compute_loss(layout):
        if layout is not None:
            model = load(layout)
            cure = "Load the model with dp_size=1 and num_microbatches=1."
            with pytest.raises(UnsupportedError, match=re.escape(f"from a single process. {cure}")):
                model(**shard_batch(model, batch))
        model = load(None if layout is None else parse_layout("pp2+mb1"))
        assert layout is None or parallel_state(model) is not None
        loss = model(**batch).loss
        loss.backward()
        return loss.item(), float(nn.utils.clip_grad_norm_(model.parameters(), 1.0))

    expected = pytest.approx(compute_loss(None), rel=1e-4)
    assert run_ranks(compute_loss, 2, parse_layout("dp2")) == [expected] * 2
