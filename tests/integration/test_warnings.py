"""First use prints no warning that this library, or a dependency by its doing, provokes."""

import subprocess
import sys
import warnings

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import hf_megatron
from hf_megatron.core.fork_harness import run_ranks

LAYOUTS = {
    "tp2+sp": {"tp_size": 2, "sequence_parallel": True},
    "pp2": {"pp_size": 2},
    "cp2": {"cp_size": 2},
    "dp2": {"dp_size": 2},
    "dp2+zero3": {"dp_size": 2, "zero_stage": 3},
}


def collect_warnings(layout):
    """What making, training, asking and saving nothing of a model warns of on this rank."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = LlamaConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64
        )
        model = LlamaForCausalLM._from_config(config, megatron_config=layout).train()
        optimizer = hf_megatron.prepare_optimizer(torch.optim.AdamW(model.parameters()))
        ids = torch.arange(10)[None].repeat(2, 1)
        group = hf_megatron.data_parallel_group()
        own = ids + (0 if group is None else torch.distributed.get_rank(group))
        for _ in range(2):
            model(input_ids=own, labels=own).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, max_new_tokens=2, do_sample=False)
    return [f"{warning.category.__name__}: {warning.message}" for warning in caught]


@pytest.mark.parametrize("text", LAYOUTS)
def test_training_emits_no_warnings(text):
    assert run_ranks(collect_warnings, 2, LAYOUTS[text]) == [[], []]


@pytest.mark.parametrize("command", [["plan", "llama", "--num-gpus", "8"], ["dry-run", "llama", "--help"]])
def test_commands_emit_no_warnings(command):
    result = subprocess.run(
        [sys.executable, "-m", "hf_megatron.cli", *command], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "Warning" not in result.stderr


def test_import_emits_no_warnings_or_cuda_init():
    code = "import warnings; warnings.simplefilter('error'); import hf_megatron"
    code += "; import torch; assert not torch.cuda.is_initialized()"
    options = ["-W", "ignore::DeprecationWarning", "-W", "ignore::SyntaxWarning"]
    code = code.replace("import torch", "warnings.simplefilter('default'); import torch")
    result = subprocess.run([sys.executable, *options, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0 and "hf_megatron" not in result.stderr, result.stderr
