"""Trains a model on preferences with TRL's stock `DPOTrainer`, sharded over processes.

    python examples/dpo.py                                                                   # one process
    accelerate launch --config_file examples/accelerate_tp2_cpu.yaml examples/dpo.py         # two CPU processes
    torchrun --nproc_per_node 2 examples/dpo.py --pp_size 2 --use_peft                       # an adapter, in a pipeline

Without flags it first trains a small Llama on Python's own documentation for a minute, and then trains it to prefer
docstrings of Python's library over the same words shuffled. The saved model is an ordinary checkpoint.
"""

import builtins
import inspect
import math
import os
import random
import statistics
import textwrap
from dataclasses import dataclass, field

import torch
from datasets import Dataset
from peft import AutoPeftModelForCausalLM, LoraConfig
from small_llama import layout_of, model_and_tokenizer
from transformers import AutoModelForCausalLM, HfArgumentParser
from trl import DPOConfig, DPOTrainer


@dataclass
class PreferenceArguments:
    model: str | None = field(default=None, metadata={"help": "Hub name or folder; default: a small Llama, trained."})
    base_steps: int = field(default=60, metadata={"help": "Steps of the small Llama."})
    use_peft: bool = field(default=False, metadata={"help": "Train a LoRA adapter."})
    tp_size: int | None = field(default=None, metadata={"help": "Tensor-parallel size; default: the launcher's."})
    pp_size: int | None = field(default=None, metadata={"help": "Pipeline stages; default: the launcher's."})


def preferences() -> Dataset:
    """Docstrings as preference pairs: their first words, the original continuation, and the same words shuffled."""
    texts = (inspect.getdoc(value) for module in (builtins, math, os, statistics) for value in vars(module).values())
    draw, rows = random.Random(0), []
    for text in sorted({textwrap.shorten(text, 160, placeholder="") for text in texts if text}):
        words = text.split()
        if len(words) > 10:
            shuffled = draw.sample(words[4:], len(words) - 4)
            rows.append(
                {
                    "prompt": " ".join(words[:4]),
                    "chosen": f" {' '.join(words[4:])}",
                    "rejected": f" {' '.join(shuffled)}",
                }
            )
    return Dataset.from_list(rows)


def main():
    parser = HfArgumentParser((PreferenceArguments, DPOConfig))
    parser.set_defaults(
        output_dir="outputs/megatron-dpo",
        max_steps=30,
        learning_rate=5e-4,
        max_length=96,
        logging_steps=5,
        save_strategy="no",
        eval_strategy="no",
        report_to=[],
        bf16=False,
        use_cpu=not torch.accelerator.is_available(),
    )
    args, training_args = parser.parse_args_into_dataclasses()
    layout = layout_of(args, "tp_size", "pp_size")
    model, tokenizer = model_and_tokenizer(args, training_args, layout)
    data = preferences().train_test_split(test_size=16, seed=0)

    # From here on it is plain TRL.
    adapter = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM") if args.use_peft else None
    trainer = DPOTrainer(
        model,
        args=training_args,
        train_dataset=data["train"],
        eval_dataset=data["test"],
        processing_class=tokenizer,
        peft_config=adapter,
    )
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    trainer.save_model()
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()
    if not trainer.is_world_process_zero():
        return

    # From here on it is plain transformers, without megatron_config.
    loader = AutoPeftModelForCausalLM if args.use_peft else AutoModelForCausalLM
    model = loader.from_pretrained(training_args.output_dir).eval()
    preferred = 0
    with torch.no_grad():
        for row in data["test"]:
            chosen, rejected = (log_prob(model, tokenizer, row["prompt"], row[name]) for name in ("chosen", "rejected"))
            preferred += chosen > rejected
    margin = "eval_rewards/margins"
    print(
        f"Margin of rewards {before[margin]:.2f} -> {after[margin]:.2f}; of {len(data['test'])} texts nobody trained "
    )
    print(f"on, {preferred} are likelier than their shuffled words in plain transformers.")
    if not after["eval_loss"] < before["eval_loss"]:  # this form also catches NaN
        raise SystemExit(f"The loss went from {before['eval_loss']:.4f} to {after['eval_loss']:.4f}")


def log_prob(model, tokenizer, prompt: str, text: str) -> float:
    ids = tokenizer(prompt + text, return_tensors="pt")["input_ids"]
    first = len(tokenizer(prompt)["input_ids"])
    logits = model(ids).logits[0, :-1].log_softmax(-1)
    return logits.gather(1, ids[0, 1:, None])[first - 1 :].sum().item()


if __name__ == "__main__":
    main()
