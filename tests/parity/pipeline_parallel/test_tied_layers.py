"""Blocks that layers share: where these lie on two stages of a pipeline, each rank holds one, and gradients add up."""

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
def tiny_model(model_type):
    return make_tiny_model(CONFIG_MAPPING[model_type](), microbatches=2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_equal_one_process(layout):
    comparison = check_tiny_model(tiny_model("zamba"), ConfigUnderTest(pp_size=2, **LAYOUTS[layout]))
    assert comparison.passed, comparison.report()


def gradients_of_one_stage():
    TiedGradients.sum = lambda self: None


def test_a_seeded_fault_is_found():
    comparison = check_tiny_model(tiny_model("zamba"), ConfigUnderTest(pp_size=2), sabotage=gradients_of_one_stage)
    # Beside the embedding, which the head is tied to.
    assert any("shared_transf" in str(error) for error in comparison.errors if error.value > 1)


def test_what_is_saved_is_one_process_s():
    folder, made = Path(tempfile.mkdtemp()), tiny_model("zamba")

    def on_rank():
        made.load(megatron_config=ConfigUnderTest(pp_size=2)).save_pretrained(folder)

    run_ranks(on_rank, 2)
    expected, found = made.load().state_dict(), AutoModelForCausalLM.from_pretrained(folder).state_dict()
    shutil.rmtree(folder)
    assert expected.keys() == found.keys() and all(torch.equal(expected[name], found[name]) for name in expected)


def test_more_than_two_ranks_are_refused():
    made = tiny_model("zamba")
    with pytest.raises(RankError, match="a weight of layers of several stages"):
        run_ranks(lambda: made.load(megatron_config=ConfigUnderTest(pp_size=4)), 4)


def test_adapters_on_a_shared_block_are_refused():
    def on_rank():
        model = tiny_model("zamba").load(megatron_config=ConfigUnderTest(pp_size=2))
        model = get_peft_model(model, LoraConfig(target_modules=["o_proj"])).train()
        model(**tiny_model("zamba").batches[0])

    tiny_model("zamba")
    with pytest.raises(RankError, match=r"shared_transf.* is tied over two pipeline stages, and an adapter"):
        run_ranks(on_rank, 2)
