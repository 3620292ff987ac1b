"""Fine-tunes a LoRA adapter with the stock `transformers.Trainer` on a model that is sharded over processes.

    python examples/lora.py                                                                    # one process
    accelerate launch --config_file examples/accelerate_tp2_cpu.yaml examples/lora.py          # two CPU processes
    torchrun --nproc_per_node 2 examples/lora.py --tp_size 2 --sequence_parallel --method dora # the same by flags
    torchrun --nproc_per_node 2 examples/lora.py --tp_size 2 --quantization nf4                # QLoRA

Without flags it first trains a small Llama on Python's own documentation for a minute, and then an adapter on the
docstrings of Python's library. The saved adapter is an ordinary one: at the end, plain PEFT generates text with it.
"""

import builtins
import inspect
import math
import os
import statistics
from dataclasses import dataclass, field
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from small_llama import layout_of, train_small_llama
from train import pack
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    HfArgumentParser,
    TorchAoConfig,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)


@dataclass
class AdapterArguments:
    model: str | None = field(default=None, metadata={"help": "Hub name or folder; default: a small Llama, trained."})
    method: str = field(default="lora", metadata={"help": "lora, rslora, dora or pissa."})
    quantization: str = field(default="none", metadata={"help": "Of the frozen base: none, nf4, nf4-double or int8."})
    rank: int = field(default=8, metadata={"help": "Of the adapter."})
    base_steps: int = field(default=60, metadata={"help": "Steps of the small Llama."})
    sequence_length: int = field(default=64, metadata={"help": "Tokens per training example."})
    tp_size: int | None = field(default=None, metadata={"help": "Tensor-parallel size; default: the launcher's."})
    sequence_parallel: bool | None = field(default=None, metadata={"nargs": "?", "const": True, "help": "As tp_size."})
    prompt: str = field(default="Return the", metadata={"help": "The model continues this with its adapter."})


METHODS = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "pissa": {"init_lora_weights": "pissa"},
}


def quantization_config(name: str):
    """Quantization of the base model's linears; needs `pip install "hf_megatron[quantized]"`."""
    if name == "int8":
        from torchao.quantization import Int8WeightOnlyConfig

        return TorchAoConfig(Int8WeightOnlyConfig())
    is_double = name == "nf4-double"
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=is_double)


def docstrings() -> Dataset:
    texts = (inspect.getdoc(value) for module in (builtins, math, os, statistics) for value in vars(module).values())
    return Dataset.from_dict({"text": sorted({text for text in texts if text})})


def main():
    parser = HfArgumentParser((AdapterArguments, TrainingArguments))
    parser.set_defaults(
        output_dir="outputs/megatron-lora",
        max_steps=60,
        learning_rate=5e-3,
        warmup_steps=5,
        logging_steps=10,
        save_steps=30,
        save_total_limit=1,
        report_to=[],
        # Without a GPU, Trainer joins the processes of a launch only with `use_cpu`.
        use_cpu=not torch.accelerator.is_available(),
    )
    args, training_args = parser.parse_args_into_dataclasses()
    if args.method not in METHODS:
        raise SystemExit(f"--method {args.method!r}: valid are {', '.join(METHODS)}")
    if args.quantization not in ("none", "nf4", "nf4-double", "int8"):
        raise SystemExit(f"--quantization {args.quantization!r}: valid are none, nf4, nf4-double and int8")
    quantized = {}
    if args.quantization != "none":
        quantized["quantization_config"] = quantization_config(args.quantization)
    set_seed(training_args.seed)
    layout = layout_of(args, "tp_size", "sequence_parallel")

    base = args.model or str(Path(training_args.output_dir, "base"))
    if args.model is None:
        train_small_llama(Path(base), layout, training_args.use_cpu, args.base_steps, args.sequence_length)
    tokenizer = AutoTokenizer.from_pretrained(base)
    data = pack(docstrings(), "text", tokenizer, args.sequence_length).train_test_split(test_size=16, seed=0)

    # One changed argument; the rest is plain PEFT and Trainer.
    model = AutoModelForCausalLM.from_pretrained(base, dtype="float32", megatron_config=layout, **quantized)
    if quantized:
        model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    model = get_peft_model(
        model,
        LoraConfig(
            r=args.rank,
            lora_alpha=2 * args.rank,
            target_modules="all-linear",
            task_type="CAUSAL_LM",
            **METHODS[args.method],
        ),
    )
    if training_args.should_log:
        model.print_trainable_parameters()
    trainer = Trainer(
        model,
        training_args,
        default_data_collator,
        train_dataset=data["train"],
        eval_dataset=data["test"],
        processing_class=tokenizer,
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    after = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()
    if not trainer.is_world_process_zero():
        return

    # From here on it is plain PEFT, without megatron_config.
    plain = AutoModelForCausalLM.from_pretrained(base, **quantized)
    model = PeftModel.from_pretrained(plain, training_args.output_dir).to(training_args.device).eval()
    with torch.no_grad():
        rows = torch.tensor(data["test"]["input_ids"], device=training_args.device).split(1)
        reloaded = sum(model(input_ids=row, labels=row).loss.item() for row in rows) / len(rows)
    prompt = tokenizer(args.prompt, return_tensors="pt").to(training_args.device)
    generated = model.generate(**prompt, max_new_tokens=40, do_sample=True, top_k=20)
    print(f"\nGenerated: {tokenizer.decode(generated[0], skip_special_tokens=True)}\n")
    # bitsandbytes evaluates in bf16 on CPUs with bf16 instructions.
    tolerance = 1e-5 if training_args.mixed_precision == "no" and not quantized else 1e-2
    report = f"{after:.4f} in Trainer, {reloaded:.4f} with the adapter from {training_args.output_dir} in plain PEFT"
    if not abs(reloaded - after) <= tolerance * after:  # this form also catches NaN
        raise SystemExit(f"The adapter differs: evaluation loss {report}")
    print(f"Evaluation loss {before:.4f} -> {report}: equal within {tolerance:.0e}")


if __name__ == "__main__":
    main()
