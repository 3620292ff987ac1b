"""Instruction tuning in the structure of Stanford Alpaca's train.py: a new pad token, embeddings resized with their
mean, sequences padded by the script's own collator, a state dict of every rank saved by one rank.
"""

import copy
import json
import logging
from dataclasses import dataclass, field

import transformers
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset
from transformers import Trainer

IGNORE_INDEX = -100
PROMPT = "instruction : {instruction} response :"
PROMPT_WITH_INPUT = "instruction : {instruction} input : {input} response :"


@dataclass
class ModelArguments:
    model_name_or_path: str | None = field(default="facebook/opt-125m")


@dataclass
class DataArguments:
    data_path: str = field(default=None, metadata={"help": "JSON list of instruction, input and output."})


@dataclass
class TrainingArguments(transformers.TrainingArguments):
    cache_dir: str | None = field(default=None)
    optim: str = field(default="adamw_torch")
    model_max_length: int = field(default=512, metadata={"help": "Longer sequences are cut."})


def safe_save_model_for_hf_trainer(trainer, output_dir):
    state_dict = trainer.model.state_dict()
    if trainer.args.should_save:
        cpu_state_dict = {key: value.cpu() for key, value in state_dict.items()}
        del state_dict
        trainer._save(output_dir, state_dict=cpu_state_dict)


def smart_tokenizer_and_embedding_resize(special_tokens_dict, tokenizer, model):
    num_new_tokens = tokenizer.add_special_tokens(special_tokens_dict)
    model.resize_token_embeddings(len(tokenizer))
    if num_new_tokens > 0:
        for embeddings in (model.get_input_embeddings().weight.data, model.get_output_embeddings().weight.data):
            average = embeddings[:-num_new_tokens].mean(dim=0, keepdim=True)
            embeddings[-num_new_tokens:] = average


def tokenize(strings, tokenizer):
    tokenized = [
        tokenizer(
            text, return_tensors="pt", padding="longest", max_length=tokenizer.model_max_length, truncation=True
        ).input_ids[0]
        for text in strings
    ]
    return tokenized, [ids.ne(tokenizer.pad_token_id).sum().item() for ids in tokenized]


class SupervisedDataset(Dataset):
    def __init__(self, data_path, tokenizer):
        logging.warning("Loading data...")
        with open(data_path, encoding="utf-8") as file:
            examples = json.load(file)
        sources = [(PROMPT_WITH_INPUT if example["input"] else PROMPT).format_map(example) for example in examples]
        targets = [f" {example['output']} {tokenizer.eos_token}" for example in examples]
        self.input_ids, _ = tokenize([s + t for s, t in zip(sources, targets, strict=True)], tokenizer)
        _, source_lens = tokenize(sources, tokenizer)
        self.labels = copy.deepcopy(self.input_ids)
        for label, source_len in zip(self.labels, source_lens, strict=True):
            label[:source_len] = IGNORE_INDEX

    def __len__(self):
        return len(self.input_ids)

    def __getitem__(self, i):
        return {"input_ids": self.input_ids[i], "labels": self.labels[i]}


@dataclass
class DataCollatorForSupervisedDataset:
    tokenizer: transformers.PreTrainedTokenizerBase

    def __call__(self, instances):
        input_ids, labels = ([instance[key] for instance in instances] for key in ("input_ids", "labels"))
        input_ids = pad_sequence(input_ids, batch_first=True, padding_value=self.tokenizer.pad_token_id)
        labels = pad_sequence(labels, batch_first=True, padding_value=IGNORE_INDEX)
        return {
            "input_ids": input_ids,
            "labels": labels,
            "attention_mask": input_ids.ne(self.tokenizer.pad_token_id),
        }


def train():
    parser = transformers.HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        model_args.model_name_or_path, cache_dir=training_args.cache_dir
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        model_args.model_name_or_path,
        cache_dir=training_args.cache_dir,
        model_max_length=training_args.model_max_length,
        padding_side="right",
        use_fast=False,
    )
    special_tokens_dict = {}
    if tokenizer.pad_token is None:
        special_tokens_dict["pad_token"] = "[PAD]"
    if tokenizer.eos_token is None:
        special_tokens_dict["eos_token"] = "</s>"
    smart_tokenizer_and_embedding_resize(special_tokens_dict, tokenizer, model)
    trainer = Trainer(
        model=model,
        processing_class=tokenizer,
        args=training_args,
        train_dataset=SupervisedDataset(data_args.data_path, tokenizer),
        eval_dataset=None,
        data_collator=DataCollatorForSupervisedDataset(tokenizer),
    )
    trainer.train()
    trainer.save_state()
    safe_save_model_for_hf_trainer(trainer, training_args.output_dir)


if __name__ == "__main__":
    train()
