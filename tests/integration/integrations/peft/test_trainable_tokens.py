"""Tests of LoRA's `trainable_token_indices` against the single-process run."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from hf_megatron import UnsupportedError, prepare_optimizer
from hf_megatron.core.fork_harness import run_ranks
from tests.helpers.training import make_batch, parse_layout, save_tiny, shard_batch

TOKENS = [5, 9, 63]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Returns the folders of a model with tied and of one with untied embeddings."""
    folders = {tied: tmp_path_factory.mktemp(f"tied-{tied}") for tied in (True, False)}
    for tied, folder in folders.items():
        save_tiny(folder, tie_word_embeddings=tied)
    return folders


def wrap(path, text):
    layout = {} if text is None else {"megatron_config": parse_layout(text)}
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["q_proj"], trainable_token_indices=TOKENS)
    return get_peft_model(AutoModelForCausalLM.from_pretrained(path, **layout), config).train()


def train_and_save(path, text, folder):
    model = wrap(path, text)
    optimizer = prepare_optimizer(torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01))
    losses = []
    for seed in range(3):
        loss = model(**shard_batch(model.get_base_model(), make_batch(seed))).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.save_pretrained(folder)
    return losses


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("text", ["dp2+zero0", "dp2", "dp2+zero2"])
def test_trained_tokens_match_the_single_process(checkpoints, tmp_path, text, tied):
    [expected] = run_ranks(train_and_save, 1, checkpoints[tied], None, tmp_path / "alone")
    assert (
        run_ranks(train_and_save, 2, checkpoints[tied], text, tmp_path / "ranks")
        == [pytest.approx(expected, rel=1e-5)] * 2
    )
    saved, right = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("ranks", "alone"))
    assert saved.keys() == right.keys() and any("token" in name for name in right)
    for name, weight in right.items():
        torch.testing.assert_close(saved[name], weight, rtol=1e-4, atol=2e-5, msg=name)


@pytest.mark.parametrize("text", ["tp2", "pp2", "cp2", "dp2+zero3"])
def test_split_vocabularies_are_rejected(checkpoints, text):
    def on_rank():
        with pytest.raises(UnsupportedError, match="use data parallelism with zero_stage=2"):
            wrap(checkpoints[True], text)

    run_ranks(on_rank, 2)
