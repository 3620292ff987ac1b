"""Chat tuning in the structure of FastChat's fastchat/train/train.py: conversations padded to one length with masked
user turns, train and evaluation split by numpy's generator, training resumed from `checkpoint-*`.
"""

import json
import pathlib
from dataclasses import dataclass, field

import numpy as np
import torch
import transformers
from torch.utils.data import Dataset
from transformers import Trainer
from transformers.trainer_pt_utils import LabelSmoother

IGNORE_TOKEN_ID = LabelSmoother.ignore_index
SYSTEM = "a chat between a user and an assistant ."
ROLES = {"human": "USER :", "gpt": "ASSISTANT :"}

local_rank = None


def rank0_print(*args):
    if local_rank == 0:
        print(*args)


@dataclass
class ModelArguments:
    model_name_or_path: str | None = field(default="facebook/opt-125m")


@dataclass
class DataArguments:
    data_path: str = field(default=None, metadata={"help": "JSON list of conversations."})
    lazy_preprocess: bool = False


@dataclass
class TrainingArguments(transformers.TrainingArguments):
    cache_dir: str | None = field(default=None)
    optim: str = field(default="adamw_torch")
    model_max_length: int = field(default=512, metadata={"help": "Sequences are padded or cut to this length."})


def safe_save_model_for_hf_trainer(trainer, output_dir):
    state_dict = trainer.model.state_dict()
    if trainer.args.should_save:
        cpu_state_dict = {key: value.cpu() for key, value in state_dict.items()}
        del state_dict
        trainer._save(output_dir, state_dict=cpu_state_dict)


def preprocess(conversations, tokenizer):
    turns = [[f"{ROLES[turn['from']]} {turn['value']}" for turn in turns] for turns in conversations]
    texts = [" ".join([SYSTEM, *parts, tokenizer.eos_token]) for parts in turns]
    input_ids = tokenizer(
        texts, return_tensors="pt", padding="max_length", max_length=tokenizer.model_max_length, truncation=True
    ).input_ids
    targets = input_ids.clone()
    for conversation, parts, target in zip(conversations, turns, targets, strict=True):
        total = int(target.ne(tokenizer.pad_token_id).sum())
        # The beginning-of-sequence token precedes the system message.
        end = 1 + len(tokenizer(SYSTEM, add_special_tokens=False).input_ids)
        target[:end] = IGNORE_TOKEN_ID
        for turn, part in zip(conversation, parts, strict=True):
            length = len(tokenizer(part, add_special_tokens=False).input_ids)
            if turn["from"] == "human":
                target[end : end + length] = IGNORE_TOKEN_ID
            end += length
        target[end + 1 :] = IGNORE_TOKEN_ID
        if end + 1 < tokenizer.model_max_length and end + 1 != total:
            target[:] = IGNORE_TOKEN_ID
            rank0_print(f"WARNING: tokenization mismatch: {end + 1} vs. {total}. (ignored)")
    return {"input_ids": input_ids, "labels": targets, "attention_mask": input_ids.ne(tokenizer.pad_token_id)}


class SupervisedDataset(Dataset):
    def __init__(self, raw_data, tokenizer):
        rank0_print("Formatting inputs...")
        self.data = preprocess([example["conversations"] for example in raw_data], tokenizer)

    def __len__(self):
        return len(self.data["input_ids"])

    def __getitem__(self, i):
        return {name: values[i] for name, values in self.data.items()}


class LazySupervisedDataset(Dataset):
    def __init__(self, raw_data, tokenizer):
        rank0_print("Formatting inputs...Skip in lazy mode")
        self.raw_data, self.tokenizer = raw_data, tokenizer
        self.cached_data_dict = {}

    def __len__(self):
        return len(self.raw_data)

    def __getitem__(self, i) -> dict[str, torch.Tensor]:
        if i not in self.cached_data_dict:
            data = preprocess([self.raw_data[i]["conversations"]], self.tokenizer)
            self.cached_data_dict[i] = {name: values[0] for name, values in data.items()}
        return self.cached_data_dict[i]


def make_supervised_data_module(tokenizer, data_args):
    dataset_cls = LazySupervisedDataset if data_args.lazy_preprocess else SupervisedDataset
    rank0_print("Loading data...")
    with open(data_args.data_path, encoding="utf-8") as file:
        raw_data = json.load(file)
    np.random.seed(0)
    perm = np.random.permutation(len(raw_data))
    split = int(len(perm) * 0.9)
    train_data, eval_data = ([raw_data[i] for i in part] for part in (perm[:split], perm[split:]))
    rank0_print(f"#train {len(train_data)}, #eval {len(eval_data)}")
    return {
        "train_dataset": dataset_cls(train_data, tokenizer=tokenizer),
        "eval_dataset": dataset_cls(eval_data, tokenizer=tokenizer),
    }


def train():
    global local_rank

    parser = transformers.HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    local_rank = training_args.local_rank
    model = transformers.AutoModelForCausalLM.from_pretrained(
        model_args.model_name_or_path, cache_dir=training_args.cache_dir
    )
    model.config.use_cache = False
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        model_args.model_name_or_path,
        cache_dir=training_args.cache_dir,
        model_max_length=training_args.model_max_length,
        padding_side="right",
        use_fast=False,
    )
    tokenizer.pad_token = tokenizer.unk_token
    data_module = make_supervised_data_module(tokenizer=tokenizer, data_args=data_args)
    trainer = Trainer(model=model, processing_class=tokenizer, args=training_args, **data_module)
    if list(pathlib.Path(training_args.output_dir).glob("checkpoint-*")):
        trainer.train(resume_from_checkpoint=True)
    else:
        trainer.train()
    trainer.save_state()
    safe_save_model_for_hf_trainer(trainer=trainer, output_dir=training_args.output_dir)


if __name__ == "__main__":
    train()
