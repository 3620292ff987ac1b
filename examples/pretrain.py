"""Pretrains on an indexed dataset (`.bin` and `.idx`) in Megatron-LM's order, with the stock `transformers.Trainer`.

    python examples/pretrain.py                                         # one process
    torchrun --nproc_per_node 2 examples/pretrain.py --tp_size 2        # two CPU processes that shard the model
    torchrun --nproc_per_node 2 examples/pretrain.py --resume           # two data-parallel processes resume

Without flags it first builds a dataset of Python's own documentation. After any interruption, it resumes with the next
sample after its last checkpoint, on any layout and with any batch size.
"""

import pydoc_data.topics
from dataclasses import dataclass, field
from pathlib import Path

from train import ScriptArguments, load_texts, new_llama_config, new_tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
)

from hf_megatron import MegatronConfig
from hf_megatron.datasets import MegatronScheduler, build_pair, datasets_from_megatron_args, schedule_from_megatron_args


@dataclass
class PretrainArguments:
    data_path: str | None = field(default=None, metadata={"help": "Megatron's --data-path; default: a pair it builds."})
    tokenizer: str | None = field(default=None, metadata={"help": "Of the pair; default: one it trains."})
    seq_length: int = field(default=64, metadata={"help": "Megatron's --seq-length."})
    global_batch_size: int = field(default=16, metadata={"help": "Megatron's --global-batch-size."})
    train_iters: int = field(default=60, metadata={"help": "Megatron's --train-iters."})
    tp_size: int = field(default=1, metadata={"help": "Processes that share the model."})
    resume: bool = field(default=False, metadata={"help": "Go on from the last checkpoint."})
    output_dir: str = field(default="outputs/pretrain", metadata={"help": "Of checkpoints, and of what it builds."})


def build(folder: Path, args) -> None:
    """Trains a tokenizer on Python's documentation and writes the dataset; runs on one process while others wait."""
    texts = load_texts(ScriptArguments())
    tokenizer = new_tokenizer(texts, "text")
    tokenizer.save_pretrained(folder / "tokenizer")
    for name, text in pydoc_data.topics.topics.items():
        (folder / "texts").mkdir(parents=True, exist_ok=True)
        (folder / "texts" / f"{name}.txt").write_text(text, encoding="utf-8")
    build_pair(folder / "topics_text_document", sorted((folder / "texts").glob("*.txt")), tokenizer, append_eod=True)


def main() -> None:
    [args] = HfArgumentParser(PretrainArguments).parse_args_into_dataclasses()
    layout = MegatronConfig(tp_size=args.tp_size)
    folder = Path(args.output_dir)
    numbers = {"train-iters": args.train_iters, "global-batch-size": args.global_batch_size}
    options = TrainingArguments(
        args.output_dir,
        max_steps=args.train_iters,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        weight_decay=0.01,
        logging_steps=10,
        save_steps=20,
        report_to=[],
        use_cpu=True,
    )
    if args.data_path is None:
        with options.main_process_first():
            if not (folder / "topics_text_document.idx").exists():
                build(folder, args)
    tokenizer = AutoTokenizer.from_pretrained(args.tokenizer or folder / "tokenizer")
    model = AutoModelForCausalLM.from_config(new_llama_config(tokenizer), dtype="float32", megatron_config=layout)
    # With a parallelized model, the world size counts replicas.
    samples = 4 * options.world_size
    options.gradient_accumulation_steps, rest = divmod(args.global_batch_size, samples)
    if rest or not options.gradient_accumulation_steps:
        raise SystemExit(f"--global_batch_size {args.global_batch_size}: expected a multiple of {samples}.")
    data = datasets_from_megatron_args({
        "data-path": args.data_path or str(folder / "topics_text_document"),
        "split": "90,10,0",
        "seq-length": args.seq_length,
        "eval-iters": 2,
        "data-cache-path": folder / "cache",
        **numbers,
    })  # fmt: skip
    trainer = Trainer(model, options, default_data_collator, data.train, data.evaluation, processing_class=tokenizer)
    schedule = schedule_from_megatron_args(
        {"lr": 6e-3, "min-lr": 6e-4, "lr-decay-style": "cosine", "lr-warmup-iters": 5, **numbers}
    )
    trainer.create_optimizer()
    trainer.lr_scheduler = MegatronScheduler(trainer.optimizer, schedule, args.global_batch_size)
    trainer.train(resume_from_checkpoint=args.resume or None)
    loss = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        print(f"evaluation loss {loss:.3f} after {trainer.state.global_step} steps")


if __name__ == "__main__":
    main()
