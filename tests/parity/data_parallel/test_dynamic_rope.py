"""Parity tests of rotary embeddings scaled by the longest sequence of a batch that is sharded over ranks."""

import dataclasses
import functools

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import CONFIG_MAPPING

from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.data_parallel import dynamic_rope
from hf_megatron.models.verification_gate import ConfigUnderTest
from hf_megatron.parallel_state import parallel_state
from hf_megatron.testing.measure import measure
from hf_megatron.testing.parity import check_tiny_model
from tests.helpers.shared_tiny_models import make_tiny_model

SCALED = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 8,
    },
}
LAYOUTS = {
    "pp2": {"pp_size": 2, "num_microbatches": 2},
    "dp2": {"dp_size": 2},
    "tp2+pp2": {"tp_size": 2, "pp_size": 2, "num_microbatches": 2},
    "cp2": {"cp_size": 2},
    "pp2+cp2": {"pp_size": 2, "cp_size": 2, "num_microbatches": 2},
}


@functools.lru_cache(maxsize=2)
def get_tiny_model(kind):
    """Returns a tiny model; in its batch, two samples have long documents and two have short documents."""
    changes = {"rope_parameters": SCALED[kind], "max_position_embeddings": 8, "head_dim": 16}
    base = make_tiny_model(CONFIG_MAPPING["llama"](), changes=changes)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, base.config.vocab_size, (4, 13), generator=generator)
    positions = torch.arange(13).repeat(4, 1)
    positions[2:] %= 4
    batches = [{"input_ids": ids, "labels": ids, "position_ids": positions, "use_cache": False}]
    reference = measure(base.load(), batches)
    reference.without, reference.cancelled = base.reference.without, base.reference.cancelled
    return dataclasses.replace(base, batches=batches, reference=reference)


@pytest.mark.parametrize("kind", SCALED)
@pytest.mark.parametrize("name", LAYOUTS)
def test_rope_scale_follows_the_global_batch(kind, name):
    comparison = check_tiny_model(get_tiny_model(kind), ConfigUnderTest(**LAYOUTS[name]))
    assert comparison.passed, comparison.report()


def use_local_rope_scale():
    dynamic_rope.DynamicRopeSync.install = lambda self, model: None


@pytest.mark.parametrize("name", ["pp2", "dp2"])
@pytest.mark.parametrize("kind", SCALED)
def test_local_rope_scales_are_detected(kind, name):
    assert not check_tiny_model(
        get_tiny_model(kind), ConfigUnderTest(**LAYOUTS[name]), sabotage=use_local_rope_scale
    ).passed


def compute_external_loss(model, labels, **batch):
    """Returns this rank's share of the mean loss of a global batch of four samples, computed from its local logits."""
    state = parallel_state(model)
    logits = model(**batch).logits[:, :-1].flatten(0, 1)
    total = cross_entropy(logits, labels[:, 1:].flatten(), reduction="sum")
    return total / (4 * 12) * (1 if state is None else state.mesh.dp_size)


def measure_gradient_errors(kind, sabotage=None):
    tiny_model = get_tiny_model(kind)

    def compute_gradient(layout=None):
        if sabotage is not None:
            sabotage()
        model = tiny_model.load(**({} if layout is None else {"megatron_config": layout})).train()
        state, [batch] = parallel_state(model), tiny_model.batches
        if state is not None:
            rank, ranks = state.mesh.dp_rank, state.mesh.dp_size
            batch = {n: v.tensor_split(ranks)[rank] if isinstance(v, torch.Tensor) else v for n, v in batch.items()}
        compute_external_loss(model, **batch).backward()
        return model.model.layers[0].self_attn.q_proj.weight.grad.clone()

    [expected] = run_ranks(compute_gradient, 1)
    return [
        ((gradient - expected).norm() / expected.norm()).item()
        for gradient in run_ranks(compute_gradient, 2, ConfigUnderTest(dp_size=2, zero_stage=0))
    ]


@pytest.mark.parametrize("kind", SCALED)
def test_rope_scale_with_external_losses(kind):
    assert max(measure_gradient_errors(kind)) < 1e-4
    assert min(measure_gradient_errors(kind, use_local_rope_scale)) > 1e-3
