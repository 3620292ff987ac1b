"""TRL's trainers with `peft_config=` on split models: every logged number, and the adapter, of one process."""

import pytest
from peft import LoraConfig
from trl import DPOTrainer, SFTTrainer

from .test_trl import compare, completions, preferences

SCHEDULE = {"max_steps": 30, "eval_steps": 15, "learning_rate": 1e-3}


def lora(path, config):
    return LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")


@pytest.mark.parametrize("text", ["tp2", "tp2+sp", "pp2", "dp2", "tp2+pp2", "cp2"])
@pytest.mark.parametrize(("trainer_class", "samples"), [(SFTTrainer, completions), (DPOTrainer, preferences)])
def test_thirty_steps(stories, tmp_path, text, trainer_class, samples):
    compare(stories, tmp_path, text, trainer_class, samples, tolerance=2e-4, peft_config=lora, **SCHEDULE)
