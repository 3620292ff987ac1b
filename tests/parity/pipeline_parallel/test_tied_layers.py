"""Tests of blocks shared by layers of two pipeline stages: each stage has a copy, and their gradients are summed."""

import functools
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.errors import RankError
from hf_megatron.models.verification_gate import ConfigUnderTest
from hf_megatron.pipeline_parallel.tied_weight_grads import TiedGradients
from hf_megatron.testing.parity import check_tiny_model
from tests.helpers.shared_tiny_models import make_tiny_model

LAYOUTS = {
    "pp2": {},
    "tp2+sp+pp2": {"tp_size": 2, "sequence_parallel": True, "num_microbatches": 2},
    # Both ends of the pipeline on one rank.
    "zbv": {"pipeline_schedule": "zbv"},
    "pp2+dp2+zero1": {"dp_size": 2, "zero_stage": 1},
}


@functools.lru_cache(maxsize=1)
def get_tiny_model(model_type):
    return make_tiny_model(CONFIG_MAPPING[model_type](), microbatches=2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_match_single_process(layout):
    comparison = check_tiny_model(get_tiny_model("zamba"), ConfigUnderTest(pp_size=2, **LAYOUTS[layout]))
    assert comparison.passed, comparison.report()


def skip_tied_gradient_sum():
    TiedGradients.sum = lambda self: None


def test_seeded_fault_is_detected():
    comparison = check_tiny_model(get_tiny_model("zamba"), ConfigUnderTest(pp_size=2), sabotage=skip_tied_gradient_sum)
    # The embedding, which the head is tied to, fails as well.
    assert any("shared_transf" in str(error) for error in comparison.errors if error.value > 1)


def test_saved_checkpoint_matches_single_process():
    folder, tiny_model = Path(tempfile.mkdtemp()), get_tiny_model("zamba")

    def on_rank():
        tiny_model.load(megatron_config=ConfigUnderTest(pp_size=2)).save_pretrained(folder)

    run_ranks(on_rank, 2)
    expected, saved = tiny_model.load().state_dict(), AutoModelForCausalLM.from_pretrained(folder).state_dict()
    shutil.rmtree(folder)
    assert expected.keys() == saved.keys() and all(torch.equal(expected[name], saved[name]) for name in expected)


def test_sharing_over_more_than_two_stages_raises():
    tiny_model = get_tiny_model("zamba")
    with pytest.raises(RankError, match="a weight of layers of several stages"):
        run_ranks(lambda: tiny_model.load(megatron_config=ConfigUnderTest(pp_size=4)), 4)


def test_adapters_on_a_shared_block_raise():
    def on_rank():
        model = get_tiny_model("zamba").load(megatron_config=ConfigUnderTest(pp_size=2))
        model = get_peft_model(model, LoraConfig(target_modules=["o_proj"])).train()
        model(**get_tiny_model("zamba").batches[0])

    get_tiny_model("zamba")
    with pytest.raises(RankError, match=r"shared_transf.* is tied over two pipeline stages, and an adapter"):
        run_ranks(on_rank, 2)
