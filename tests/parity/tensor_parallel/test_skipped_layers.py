"""Parity tests of LayerDrop with sequence parallelism: the single-process layers are skipped, also first and last."""

import functools

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import CONFIG_MAPPING

from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.errors import RankError
from hf_megatron.models.fingerprint import silence
from hf_megatron.models.verification_gate import ConfigUnderTest
from hf_megatron.tensor_parallel import install_regions
from tests.helpers.shared_tiny_models import make_tiny_model

SEEDS = range(4)


@functools.lru_cache(maxsize=1)
def get_tiny_model(model_type, task):
    return make_tiny_model(CONFIG_MAPPING[model_type](), task=task, min_layers=3)


def train_with_layerdrop(of, checkpointing, **layout):
    """Returns loss and gradients by name (`None` for skipped layers) for each seed."""
    config = of.model_on_meta().config
    config.update({name: 0.5 for name in config.to_dict() if name.endswith("layerdrop")})
    model = of.load(config=config, **layout).train()
    silence(model)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        if "layerdrop" in vars(module):
            module.layerdrop = 0.5
    results = []
    for seed in SEEDS:
        torch.manual_seed(seed)
        loss = model(**of.batches[0]).loss
        loss.backward()
        gradients = {name: gather_gradient(parameter.grad) for name, parameter in model.named_parameters()}
        results.append((loss.item(), gradients))
        model.zero_grad(set_to_none=True)
    return results


def gather_gradient(gradient):
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


def find_differences(of, *, checkpointing=False):
    """Returns the names of gradients that differ from the single-process run, and "loss" if losses differ.

    Requires that the seeds skip and run both layer 0 and other layers.
    """
    run = functools.partial(train_with_layerdrop, of, checkpointing)
    [expected] = run_ranks(run, 1)
    at_ends = {
        (number == "0", gradients[name] is None)
        for _, gradients in expected
        for name in gradients
        if (number := name.partition("layers.")[2].partition(".")[0])
    }
    assert len(at_ends) == 4
    results = run_ranks(run, 2, megatron_config=ConfigUnderTest(tp_size=2, sequence_parallel=True))[0]
    problems = []
    for (loss, gradients), (expected_loss, others) in zip(results, expected, strict=True):
        same = {name for name in others if (others[name] is None) == (gradients[name] is None)}
        problems += sorted(others.keys() - same)
        problems += [
            name
            for name in same
            if others[name] is not None and not torch.allclose(gradients[name], others[name], rtol=1e-3, atol=1e-5)
        ]
        problems += ["loss"] if abs(loss - expected_loss) > 1e-5 else []
    return problems


@pytest.mark.parametrize(
    ("model_type", "task", "checkpointing"),
    [("m2m_100", "seq2seq", False), ("m2m_100", "seq2seq", True), ("opt", "causal", False)],
)
def test_the_same_layers_are_skipped(model_type, task, checkpointing):
    assert not find_differences(get_tiny_model(model_type, task), checkpointing=checkpointing)


def test_unhandled_boundary_layerdrop_is_detected(monkeypatch):
    monkeypatch.setattr(install_regions, "leaves_layers_out", lambda config: False)
    with pytest.raises(RankError):
        find_differences(get_tiny_model("m2m_100", "seq2seq"))
