"""Trains a model on rewards with TRL's stock `GRPOTrainer`, which generates with the layout it trains on.

    python examples/grpo.py                                                                  # one process
    accelerate launch --config_file examples/accelerate_tp2_cpu.yaml examples/grpo.py        # two CPU processes
    torchrun --nproc_per_node 2 examples/grpo.py --pp_size 2 --use_peft                      # an adapter, in a pipeline

Without flags it first trains a small Llama on Python's own documentation for a minute, and then trains it to end its
sentences after eight tokens. The saved model is an ordinary checkpoint, which generates in plain transformers.
"""

import builtins
import inspect
import math
import os
import statistics
from dataclasses import dataclass, field

import torch
from datasets import Dataset
from peft import AutoPeftModelForCausalLM, LoraConfig
from small_llama import layout_of, model_and_tokenizer
from transformers import AutoModelForCausalLM, HfArgumentParser
from trl import GRPOConfig, GRPOTrainer

TOKENS = 8


@dataclass
class RewardArguments:
    model: str | None = field(default=None, metadata={"help": "Hub name or folder; default: a small Llama, trained."})
    base_steps: int = field(default=60, metadata={"help": "Steps of the small Llama."})
    use_peft: bool = field(default=False, metadata={"help": "Train a LoRA adapter."})
    tp_size: int | None = field(default=None, metadata={"help": "Tensor-parallel size; default: the launcher's."})
    pp_size: int | None = field(default=None, metadata={"help": "Pipeline stages; default: the launcher's."})


def prompts(stop: int) -> Dataset:
    """The first words of docstrings as prompts, and the token that ends a sentence."""
    texts = (inspect.getdoc(value) for module in (builtins, math, os, statistics) for value in vars(module).values())
    starts = sorted({" ".join(text.split()[:3]) for text in texts if text and len(text.split()) > 3})
    return Dataset.from_list([{"prompt": start, "stop": stop} for start in starts])


def ends_in_time(completion_ids, stop, **kwargs):
    """Reward: 1 for a full stop after `TOKENS` tokens, less if it comes earlier or later."""
    places = [ids.index(end) if end in ids else 2 * TOKENS for ids, end in zip(completion_ids, stop, strict=True)]
    return [1 - abs(place - TOKENS) / TOKENS for place in places]


def main():
    parser = HfArgumentParser((RewardArguments, GRPOConfig))
    parser.set_defaults(
        output_dir="outputs/megatron-grpo",
        max_steps=100,
        learning_rate=1e-3,
        num_generations=8,
        per_device_train_batch_size=16,
        max_completion_length=2 * TOKENS,
        logging_steps=10,
        save_strategy="no",
        report_to=[],
        bf16=False,
        use_cpu=not torch.accelerator.is_available(),
    )
    args, training_args = parser.parse_args_into_dataclasses()
    layout = layout_of(args, "tp_size", "pp_size")
    model, tokenizer = model_and_tokenizer(args, training_args, layout)
    data = prompts(tokenizer(" The end.")["input_ids"][-1])

    # From here on it is plain TRL.
    adapter = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM") if args.use_peft else None
    trainer = GRPOTrainer(
        model, ends_in_time, training_args, train_dataset=data, processing_class=tokenizer, peft_config=adapter
    )
    trainer.train()
    trainer.save_model()
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()
    if not trainer.is_world_process_zero():
        return

    # From here on it is plain transformers, without megatron_config.
    loader = AutoPeftModelForCausalLM if args.use_peft else AutoModelForCausalLM
    model = loader.from_pretrained(training_args.output_dir).eval()
    prompt = tokenizer(data[0]["prompt"], return_tensors="pt")
    generated = model.generate(**prompt, max_new_tokens=2 * TOKENS, do_sample=True)
    print(f"\nGenerated: {tokenizer.decode(generated[0], skip_special_tokens=True)}\n")
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    print(f"Mean reward {rewards[0]:.2f} -> {rewards[-1]:.2f}")
    if not rewards[-1] > rewards[0]:  # this form also catches NaN
        raise SystemExit("The reward has not risen.")


if __name__ == "__main__":
    main()
