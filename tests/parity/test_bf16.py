"""Tests of bf16 accuracy: the error to an fp32 reference is at most 1.5 times the single-process bf16 error."""

import pytest
import torch
from transformers import CONFIG_MAPPING

from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.models.verification_gate import ConfigUnderTest
from hf_megatron.testing.measure import measure
from tests.helpers.low_precision import reference_error
from tests.helpers.shared_tiny_models import make_tiny_model

LAYOUTS = {
    "tp2": {"tp_size": 2},
    "tp2+sp": {"tp_size": 2, "sequence_parallel": True},
    "cp2": {"cp_size": 2, "cp_comm_type": "p2p"},
    "cp2, heads": {"cp_size": 2, "cp_comm_type": "a2a"},
}


EXPERTS = {
    "ep2 over dp2": {"dp_size": 2, "ep_size": 2},
    "ep2 over tp2": {"tp_size": 2, "ep_size": 2},
    "ep2 over tp2+sp": {"tp_size": 2, "sequence_parallel": True, "ep_size": 2},
}


@pytest.mark.parametrize(
    ("model_type", "name"),
    [*((model_type, name) for model_type in ("llama", "qwen3_moe") for name in LAYOUTS)]
    + [*((model_type, name) for model_type in ("qwen3_moe", "deepseek_v3", "gpt_oss") for name in EXPERTS)],
)
def test_error_relative_to_fp32(model_type, name):
    tiny_model = make_tiny_model(CONFIG_MAPPING[model_type](), microbatches=2)
    single_process = measure(tiny_model.load(dtype=torch.bfloat16), tiny_model.batches, optimizers=())
    layout = ConfigUnderTest(**(LAYOUTS | EXPERTS)[name])

    def on_rank():
        return measure(tiny_model.load(megatron_config=layout, dtype=torch.bfloat16), tiny_model.batches, optimizers=())

    parallel = run_ranks(on_rank, 2)[0]
    assert reference_error(parallel, tiny_model.reference) <= 1.5 * reference_error(
        single_process, tiny_model.reference
    )
    # The single-process loss may be exact by chance: one bf16 epsilon is allowed.
    by_chance = torch.finfo(torch.bfloat16).eps * tiny_model.reference.loss
    assert abs(parallel.loss - tiny_model.reference.loss) <= max(
        1.5 * abs(single_process.loss - tiny_model.reference.loss), by_chance
    )
