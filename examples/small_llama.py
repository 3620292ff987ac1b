"""A small Llama for the other examples, trained on Python's own documentation for a minute."""

from pathlib import Path

from train import ScriptArguments, load_texts, new_llama_config, new_tokenizer, pack
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, default_data_collator

from hf_megatron import MegatronConfig, config_from_environment


def layout_of(args, *names: str) -> MegatronConfig:
    """The layout from the given flags, otherwise from the accelerate YAML (no parallelism in a plain process)."""
    flags = {name: value for name in names if (value := getattr(args, name)) is not None}
    return MegatronConfig(**flags) if flags else config_from_environment()


def model_and_tokenizer(args, training_args, layout: MegatronConfig):
    """The model from the flags, or a small one that is trained first, loaded with one changed argument."""
    base = args.model or str(Path(training_args.output_dir, "base"))
    if args.model is None:
        train_small_llama(Path(base), layout, training_args.use_cpu, args.base_steps)
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return AutoModelForCausalLM.from_pretrained(base, dtype="float32", megatron_config=layout), tokenizer


def train_small_llama(
    folder: Path, layout: MegatronConfig, use_cpu: bool, steps: int, sequence_length: int = 64
) -> None:
    """Trains the model on a layout and saves it, with its tokenizer, in `folder`."""
    texts = load_texts(ScriptArguments())
    tokenizer = new_tokenizer(texts, "text")
    model = AutoModelForCausalLM.from_config(new_llama_config(tokenizer), dtype="float32", megatron_config=layout)
    options = TrainingArguments(
        str(folder),
        max_steps=steps,
        learning_rate=6e-3,
        warmup_steps=10,
        save_strategy="no",
        logging_steps=20,
        use_cpu=use_cpu,
        report_to=[],
    )
    rows = pack(texts, "text", tokenizer, sequence_length)
    trainer = Trainer(model, options, default_data_collator, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    trainer.save_model()
    trainer.accelerator.wait_for_everyone()  # the first process writes the tokenizer, which all processes read
