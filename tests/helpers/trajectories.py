"""Thirty steps of each TRL trainer on layouts, compared with a single process: `python -m tests.helpers.trajectories
[NAME ...]`.

Every logged value of training and evaluation and the final weights (adapter weights with `peft_config`) are compared.
`tests/trajectories.json` has the largest difference of each run and the name of that value; differences are relative
to the single-process value, or to 0.1 if it is smaller. In trainers that generate, data-parallel ranks use their
samples of recorded completions. "tp2 > pp2" runs the first half of the steps on tp2 and resumes on pp2 from a
checkpoint.
"""

import argparse
import json
import tempfile
from pathlib import Path

import trl
from peft import LoraConfig
from trl.experimental import cpo, gkd, orpo

from hf_megatron.core.fork_harness import run_ranks
from tests.helpers.dp_training import count_ranks
from tests.integration.integrations.trl import test_base
from tests.integration.integrations.trl.test_base import (
    adapter,
    completions,
    layout,
    parallelized_reference,
    preferences,
    train,
)
from tests.integration.integrations.trl.test_losses import conversations, tokenizer, unpaired
from tests.integration.integrations.trl.test_online import RECORDED, REWARDS, prompts, save_experts

RECORD = Path(__file__).parents[1] / "trajectories.json"
STORIES = Path(__file__).parents[1] / "data" / "stories260K_hf"
LAYOUTS = ("tp2", "tp2+sp", "pp2", "dp2", "tp2+pp2", "tp2 > pp2")
OTHER_LAYOUTS = {"GRPO": (*LAYOUTS, "cp2"), "GRPO of experts": ("tp2+ep2", "dp2+ep2")}
_HALF = 15
STEPS = {"max_steps": 2 * _HALF, "eval_steps": _HALF, "learning_rate": 1e-4}
GENERATES = {"max_completion_length": 8}
GROUPS = GENERATES | REWARDS | {"num_generations": 4}
CHAT = {"processing_class": tokenizer, "max_length": 64}


def make_classifier_adapter(path, config):
    return LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="SEQ_CLS")


test_base.UNEQUAL = (*test_base.UNEQUAL, "step_time")


# Name -> trainer class, config class, samples, options.
TRAINERS = {
    "SFT": (trl.SFTTrainer, trl.SFTConfig, completions, {}),
    "DPO": (trl.DPOTrainer, trl.DPOConfig, preferences, {}),
    "KTO": (trl.KTOTrainer, trl.KTOConfig, unpaired, {}),
    "Reward": (trl.RewardTrainer, trl.RewardConfig, preferences, {}),
    "ORPO": (orpo.ORPOTrainer, orpo.ORPOConfig, preferences, CHAT),
    "CPO": (cpo.CPOTrainer, cpo.CPOConfig, preferences, CHAT),
    "GKD": (
        gkd.GKDTrainer,
        gkd.GKDConfig,
        conversations,
        CHAT | {"lmbda": 0.0, "teacher_model": parallelized_reference},
    ),
    "GRPO": (trl.GRPOTrainer, trl.GRPOConfig, prompts, GROUPS | {"beta": 0.1}),
    "GRPO of experts": (trl.GRPOTrainer, trl.GRPOConfig, prompts, GROUPS | {"beta": 0.1}),
    "RLOO": (trl.RLOOTrainer, trl.RLOOConfig, prompts, GROUPS),
    "Distillation": (
        trl.DistillationTrainer,
        trl.DistillationConfig,
        prompts,
        GENERATES | {"teacher_model": parallelized_reference},
    ),
}


def run_trainer(name, text, has_adapter):
    """Returns the log and the weights of each rank."""
    trainer_class, config_class, samples, options = TRAINERS[name]
    test_base.CONFIGS[trainer_class] = config_class
    options = STEPS | options
    if has_adapter:
        options |= {"peft_config": make_classifier_adapter if name == "Reward" else adapter, "learning_rate": 1e-3}
    elif name in ("DPO", "KTO"):
        options["ref_model"] = parallelized_reference
    if text is not None and "dp2" in text and "max_completion_length" in options:
        options |= RECORDED
    with tempfile.TemporaryDirectory() as folder:
        model = STORIES
        if "experts" in name:
            model = Path(folder, "model")
            save_experts(STORIES, model)
        first, resumes, second = (text or "").partition(">")

        def run_on_layout(part, **further):
            config = layout(part.strip()) if part.strip() else None
            arguments = (model, Path(folder), config, trainer_class, samples)
            return run_ranks(
                train, 1 if config is None else count_ranks(config), *arguments, timeout=900, **options, **further
            )

        if not resumes:
            return run_on_layout(first)
        run_on_layout(first, stop_at=_HALF, save_strategy="steps", save_steps=_HALF)
        return run_on_layout(second, resume=True)


def measure_differences(found, expected):
    """Returns the largest difference of a logged value with its name and step, and the largest of a weight."""
    worst = (0.0, "", 0)
    for entry, other in zip(found[0], expected[0], strict=True):
        assert entry.keys() == other.keys(), (entry, other)
        for name, value in other.items():
            if value is not None and entry[name] is not None:
                difference = abs(entry[name] - value) / max(abs(value), 0.1)
                worst = max(worst, (difference, name, other.get("step", 0)))
    weights = max((found[1][name] - weight).abs().max().item() for name, weight in expected[1].items())
    return worst, weights


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(TRAINERS))
    parser.add_argument("--layouts", nargs="*", help='of LAYOUTS, such as "tp2 > pp2"; all of them by default')
    args = parser.parse_args()
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    for name in args.names:
        for has_adapter in (False, True):
            key = f"{name}{', adapter' * has_adapter}"
            layouts = args.layouts or OTHER_LAYOUTS.get(name, LAYOUTS)
            record[key] = {text: row for text, row in record.get(key, {}).items() if text not in layouts}
            reference = run_trainer(name, None, has_adapter) if any(">" not in text for text in layouts) else None
            for text in layouts:
                # The reference resumes too, since TRL restarts its token count on resume.
                expected = run_trainer(name, ">", has_adapter) if ">" in text else reference
                if "dp2" in text and "max_completion_length" in TRAINERS[name][3]:
                    expected = run_with_recorded_completions(name, has_adapter)
                results = run_trainer(name, text, has_adapter)
                assert all(log == results[0][0] for log, *_ in results), "every rank logs the same"
                worst, weights = measure_differences(results[0], expected[0])
                record[key][text] = {"number": worst[0], "of": worst[1], "weight": weights}
                print(f"{key}, {text}: {worst[0]:.1e} of {worst[1]}, weights {weights:.1e}", flush=True)
            RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def run_with_recorded_completions(name, has_adapter):
    """Runs in a single process with the recorded completions that dp ranks share."""
    entry = TRAINERS[name]
    TRAINERS[name] = (*entry[:3], entry[3] | RECORDED)
    try:
        return run_trainer(name, None, has_adapter)
    finally:
        TRAINERS[name] = entry


if __name__ == "__main__":
    main()
