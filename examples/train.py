"""Trains a causal language model with the stock `transformers.Trainer` and Megatron tensor/sequence parallelism.

    python examples/train.py                                                                         # one process
    accelerate launch --config_file examples/accelerate_tp2_cpu.yaml examples/train.py               # two CPU processes
    torchrun --nproc_per_node 2 examples/train.py --tp_size 2 --sequence_parallel                    # the same by flags

Without flags it trains a 1.3M-parameter Llama on Python's own documentation: nothing is downloaded.
"""

from dataclasses import dataclass, field
from pydoc_data.topics import topics

import torch
from datasets import Dataset, load_dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

# Importing hf_megatron adds the megatron_config argument to from_pretrained and from_config.
from hf_megatron import MegatronConfig, config_from_environment


@dataclass
class ScriptArguments:
    model: str | None = field(default=None, metadata={"help": "Hub name or folder; default: a small new Llama."})
    from_scratch: bool = field(default=False, metadata={"help": "New weights in --model's architecture."})
    data: str | None = field(default=None, metadata={"help": "Data set name or file; default: Python's documentation."})
    data_config: str | None = field(default=None, metadata={"help": "Configuration of a hub data set, if it has any."})
    text_column: str = field(default="text", metadata={"help": "The column that holds the text."})
    experts: int = field(default=0, metadata={"help": "Experts of a small new Qwen3-MoE in place of the Llama."})
    sequence_length: int = field(default=128, metadata={"help": "Tokens per training example."})
    tp_size: int | None = field(default=None, metadata={"help": "Tensor-parallel size; default: the launcher's."})
    sequence_parallel: bool | None = field(default=None, metadata={"nargs": "?", "const": True, "help": "As tp_size."})
    prompt: str = field(default="The value of", metadata={"help": "The trained model continues this."})


def load_texts(args: ScriptArguments) -> Dataset:
    if args.data is None:
        return Dataset.from_dict({args.text_column: list(topics.values())})
    loaders = {"txt": "text", "json": "json", "jsonl": "json", "csv": "csv", "parquet": "parquet"}
    loader = loaders.get(args.data.rpartition(".")[2])
    if loader is None:
        return load_dataset(args.data, args.data_config, split="train")
    # Blank lines separate the examples in a text file: one example per line would cut sentences apart.
    options = {"sample_by": "paragraph"} if loader == "text" else {}
    return load_dataset(loader, data_files=args.data, split="train", **options)


def new_tokenizer(texts: Dataset, column: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer. Training is deterministic, so every process gets the same one."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    end, pad, chars = "<|endoftext|>", "<|pad|>", pre_tokenizers.ByteLevel.alphabet()
    plan = trainers.BpeTrainer(vocab_size=2048, special_tokens=[end, pad], initial_alphabet=chars, show_progress=False)
    bpe.train_from_iterator(texts[column], plan)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token=end, eos_token=end, pad_token=pad)


def new_llama_config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        initializer_range=0.05,  # the usual 0.02 suits wider layers; here it would slow down the first steps
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def new_mixture_config(tokenizer: PreTrainedTokenizerFast, experts: int) -> Qwen3MoeConfig:
    shape = new_llama_config(tokenizer).to_dict()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "tie_word_embeddings", "initializer_range")
    names += ("bos_token_id", "eos_token_id", "pad_token_id")
    return Qwen3MoeConfig(
        **{name: shape[name] for name in names},
        head_dim=32,
        num_experts=experts,
        num_experts_per_tok=2,
        moe_intermediate_size=192,
        output_router_logits=True,  # adds the load balancing loss
    )


def pack(texts: Dataset, column: str, tokenizer, length: int) -> Dataset:
    """Tokenizes the texts, joins them with the end-of-text token, and cuts them into blocks of equal length."""

    def tokenize_and_cut(batch):
        # verbose=False: a text may be longer than the model's context, because it is cut below.
        rows = tokenizer(batch[column], add_special_tokens=False, verbose=False)["input_ids"]
        stream = [token for row in rows for token in [*row, tokenizer.eos_token_id]]
        blocks = [stream[i : i + length] for i in range(0, len(stream) - length + 1, length)]
        return {"input_ids": blocks, "labels": blocks}

    return texts.map(tokenize_and_cut, batched=True, remove_columns=texts.column_names, desc="Packing")


def main():
    parser = HfArgumentParser((ScriptArguments, TrainingArguments))
    parser.set_defaults(
        output_dir="outputs/megatron-llama",
        max_steps=100,
        learning_rate=None,  # set below: new weights need a far larger one than trained weights
        warmup_steps=10,
        logging_steps=10,
        logging_first_step=True,
        save_steps=50,
        save_total_limit=2,
        # Without a GPU, Trainer joins the processes of a launch only with `use_cpu`.
        use_cpu=not torch.accelerator.is_available(),
    )
    args, training_args = parser.parse_args_into_dataclasses()
    new_weights = args.model is None or args.from_scratch
    if training_args.learning_rate is None:
        training_args.learning_rate = 6e-3 if new_weights else 2e-5
    set_seed(training_args.seed)

    # Use the flags if there are any, otherwise the accelerate YAML (no parallelism in a plain process).
    flags = {name: value for name in ("tp_size", "sequence_parallel") if (value := getattr(args, name)) is not None}
    megatron_config = MegatronConfig(**flags) if flags else config_from_environment()

    # The first process downloads and prepares the data, the others then read its cache.
    with training_args.main_process_first(desc="data"):
        texts = load_texts(args)
        if args.text_column not in texts.column_names:
            raise SystemExit(f"--text_column {args.text_column!r} is not one of the columns {texts.column_names}")
        tokenizer = AutoTokenizer.from_pretrained(args.model) if args.model else new_tokenizer(texts, args.text_column)
        blocks = pack(texts, args.text_column, tokenizer, args.sequence_length)
        if len(blocks) < 2:
            raise SystemExit(f"--data holds {len(blocks)} blocks of {args.sequence_length} tokens: too few to train on")
        # Full batches on all processes: Trainer pads an incomplete one with repeated samples, which affect its loss.
        batch = training_args.per_device_eval_batch_size * training_args.world_size
        held_out = max(1, min(len(blocks) // 20, 256) // batch * batch)
        data = blocks.train_test_split(test_size=held_out, seed=training_args.seed)

    # Load float32 weights whatever the file's dtype: with --bf16, Trainer computes in bfloat16, updates in float32.
    if new_weights:
        small = new_mixture_config(tokenizer, args.experts) if args.experts else new_llama_config(tokenizer)
        config = AutoConfig.from_pretrained(args.model) if args.model else small
        model = AutoModelForCausalLM.from_config(config, dtype="float32", megatron_config=megatron_config)
    else:
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype="float32", megatron_config=megatron_config)

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=data["train"],
        eval_dataset=data["test"],
        data_collator=default_data_collator,
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=training_args.resume_from_checkpoint)
    eval_loss = trainer.evaluate()["eval_loss"]
    trainer.save_model()  # the full model, merged, with the tokenizer: an ordinary checkpoint folder

    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()  # the rest needs only one process
    if not trainer.is_world_process_zero():
        return

    # From here on it is plain transformers, without megatron_config.
    tokenizer = AutoTokenizer.from_pretrained(training_args.output_dir)
    model = AutoModelForCausalLM.from_pretrained(training_args.output_dir).to(training_args.device).eval()
    with torch.no_grad():
        # Use Trainer's batches: the router loss of experts is not a mean over samples.
        batch_size = training_args.per_device_eval_batch_size * training_args.world_size
        batches = torch.tensor(data["test"]["input_ids"], device=model.device).split(batch_size)
        reloaded_loss = sum(model(input_ids=ids, labels=ids).loss.item() for ids in batches) / len(batches)
    prompt = tokenizer(args.prompt, return_tensors="pt").to(model.device)
    generated = model.generate(**prompt, max_new_tokens=40, do_sample=True, top_k=20)
    print(f"\nGenerated: {tokenizer.decode(generated[0], skip_special_tokens=True)}\n")

    # Trainer's evaluation rounds with mixed precision, while this one uses the weights' own precision.
    tolerance = 1e-5 if training_args.mixed_precision == "no" else 1e-2
    report = f"{eval_loss:.4f} in Trainer, {reloaded_loss:.4f} reloaded from {training_args.output_dir}"
    if not abs(reloaded_loss - eval_loss) <= tolerance * eval_loss:  # this form also catches NaN
        raise SystemExit(f"The reloaded model differs: evaluation loss {report}")
    print(f"Training loss {losses[0]:.4f} -> {losses[-1]:.4f}; evaluation loss {report}: equal within {tolerance:.0e}")


if __name__ == "__main__":
    main()
