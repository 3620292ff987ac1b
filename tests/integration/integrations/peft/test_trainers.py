"""Tests that TRL trainers with `peft_config=` match the logs and adapters of a single process."""

import shutil

import pytest
import torch
from peft import LoraConfig, PromptEncoderConfig
from transformers import AutoModelForCausalLM
from trl import DPOTrainer, SFTTrainer

from tests.integration.integrations.trl.test_base import compare, completions, preferences, texts

SCHEDULE = {"max_steps": 30, "eval_steps": 15, "learning_rate": 1e-3}
TRAINERS = [(SFTTrainer, completions), (DPOTrainer, preferences)]


def lora(path, config):
    return LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")


@pytest.mark.parametrize("text", ["tp2", "tp2+sp", "pp2", "dp2", "tp2+pp2", "cp2"])
@pytest.mark.parametrize(("trainer_class", "samples"), TRAINERS)
def test_thirty_steps_match_single_process(stories, tmp_path, text, trainer_class, samples):
    compare(stories, tmp_path, text, trainer_class, samples, tolerance=2e-4, peft_config=lora, **SCHEDULE)


def make_p_tuning_config(path, config):
    return PromptEncoderConfig(num_virtual_tokens=4, encoder_hidden_size=16, task_type="CAUSAL_LM")


def make_unequal_texts(count, seed=0):
    rows = texts(count, seed)
    return [{"text": row["text"][:8]} if index < count // 2 else row for index, row in enumerate(rows)]


@pytest.mark.parametrize("text", ["tp2", "pp2", "dp2"])
def test_p_tuning_matches_single_process(stories, tmp_path, text):
    """With virtual tokens the first token is a target too; the global loss is weighted by the targets of each rank."""
    compare(stories, tmp_path, text, SFTTrainer, make_unequal_texts, peft_config=make_p_tuning_config)


def make_head_config(path, config):
    return LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")


@pytest.mark.parametrize("text", ["tp2", "pp2"])
@pytest.mark.parametrize(("trainer_class", "samples"), TRAINERS)
def test_untied_trainable_head(stories, tmp_path, text, trainer_class, samples):
    source = tmp_path / "untied"
    shutil.copytree(stories, source)
    model = AutoModelForCausalLM.from_pretrained(stories)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 0.9)
    model.save_pretrained(source)
    compare(source, tmp_path / "out", text, trainer_class, samples, peft_config=make_head_config)
