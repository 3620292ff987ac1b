"""Chat tuning in the structure of Qwen's finetune.py: int32 tensors in ChatML, an edited config passed to
`from_pretrained`, evaluation data, optionally LoRA with trained embeddings and head.
"""

import json
import os
from dataclasses import dataclass, field

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset
from transformers import Trainer
from transformers.trainer_pt_utils import LabelSmoother

IGNORE_TOKEN_ID = LabelSmoother.ignore_index

local_rank = None


def rank0_print(*args):
    if local_rank == 0:
        print(*args)


@dataclass
class ModelArguments:
    model_name_or_path: str | None = field(default="Qwen/Qwen-7B")


@dataclass
class DataArguments:
    data_path: str = field(default=None, metadata={"help": "JSON list of conversations."})
    eval_data_path: str = field(default=None, metadata={"help": "JSON list of conversations."})
    lazy_preprocess: bool = False


@dataclass
class TrainingArguments(transformers.TrainingArguments):
    cache_dir: str | None = field(default=None)
    optim: str = field(default="adamw_torch")
    model_max_length: int = field(default=8192, metadata={"help": "Sequences are padded or cut to this length."})
    use_lora: bool = False


@dataclass
class LoraArguments:
    lora_r: int = 64
    lora_alpha: int = 16
    lora_dropout: float = 0.05
    lora_target_modules: list[str] = field(default_factory=lambda: ["q_proj", "k_proj", "o_proj", "down_proj"])
    lora_bias: str = "none"


def maybe_zero_3(param):
    if hasattr(param, "ds_id"):
        raise NotImplementedError("DeepSpeed")
    return param.detach().cpu().clone()


def get_peft_state_maybe_zero_3(named_params, bias):
    if bias == "none":
        to_return = {k: t for k, t in named_params if "lora_" in k}
    elif bias == "all":
        to_return = {k: t for k, t in named_params if "lora_" in k or "bias" in k}
    else:
        raise NotImplementedError
    return {k: maybe_zero_3(v) for k, v in to_return.items()}


def safe_save_model_for_hf_trainer(trainer, output_dir, bias="none"):
    if trainer.args.use_lora:
        state_dict = get_peft_state_maybe_zero_3(trainer.model.named_parameters(), bias)
    else:
        state_dict = trainer.model.state_dict()
    if trainer.args.should_save and trainer.args.local_rank == 0:
        trainer._save(output_dir, state_dict=state_dict)


def preprocess(sources, tokenizer, max_len, system_message="you are a helpful assistant"):
    im_start, im_end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    nl_tokens = tokenizer("nl").input_ids
    input_ids, targets = [], []
    for source in sources:
        system = [im_start, *tokenizer("system").input_ids, *nl_tokens, *tokenizer(system_message).input_ids]
        input_id = [*system, im_end, *nl_tokens]
        target = [im_start, *[IGNORE_TOKEN_ID] * (len(input_id) - 3), im_end, *nl_tokens]
        for sentence in source:
            role = [im_start, *tokenizer(sentence["from"]).input_ids, *nl_tokens]
            text = tokenizer(sentence["value"]).input_ids
            input_id += [*role, *text, im_end, *nl_tokens]
            shown = text if sentence["from"] == "assistant" else [IGNORE_TOKEN_ID] * len(text)
            target += [im_start, *[IGNORE_TOKEN_ID] * (len(role) - 1), *shown, im_end, *nl_tokens]
        assert len(input_id) == len(target)
        input_id += [tokenizer.pad_token_id] * (max_len - len(input_id))
        target += [IGNORE_TOKEN_ID] * (max_len - len(target))
        input_ids.append(input_id[:max_len])
        targets.append(target[:max_len])
    input_ids = torch.tensor(input_ids, dtype=torch.int)
    targets = torch.tensor(targets, dtype=torch.int)
    return {"input_ids": input_ids, "labels": targets, "attention_mask": input_ids.ne(tokenizer.pad_token_id)}


class SupervisedDataset(Dataset):
    def __init__(self, raw_data, tokenizer, max_len):
        rank0_print("Formatting inputs...")
        self.data = preprocess([example["conversations"] for example in raw_data], tokenizer, max_len)

    def __len__(self):
        return len(self.data["input_ids"])

    def __getitem__(self, i):
        return {name: values[i] for name, values in self.data.items()}


class LazySupervisedDataset(Dataset):
    def __init__(self, raw_data, tokenizer, max_len):
        self.raw_data, self.tokenizer, self.max_len = raw_data, tokenizer, max_len
        self.cached_data_dict = {}

    def __len__(self):
        return len(self.raw_data)

    def __getitem__(self, i):
        if i not in self.cached_data_dict:
            data = preprocess([self.raw_data[i]["conversations"]], self.tokenizer, self.max_len)
            self.cached_data_dict[i] = {name: values[0] for name, values in data.items()}
        return self.cached_data_dict[i]


def make_supervised_data_module(tokenizer, data_args, max_len):
    dataset_cls = LazySupervisedDataset if data_args.lazy_preprocess else SupervisedDataset
    datasets = []
    for path in (data_args.data_path, data_args.eval_data_path):
        if path is None:
            datasets.append(None)
            continue
        with open(path, encoding="utf-8") as file:
            datasets.append(dataset_cls(json.load(file), tokenizer=tokenizer, max_len=max_len))
    return dict(zip(("train_dataset", "eval_dataset"), datasets, strict=True))


def train():
    global local_rank

    parser = transformers.HfArgumentParser((ModelArguments, DataArguments, TrainingArguments, LoraArguments))
    model_args, data_args, training_args, lora_args = parser.parse_args_into_dataclasses()
    local_rank = training_args.local_rank
    ddp = int(os.environ.get("WORLD_SIZE", "1")) != 1
    rank0_print(f"distributed: {ddp}")
    config = transformers.AutoConfig.from_pretrained(
        model_args.model_name_or_path, cache_dir=training_args.cache_dir, trust_remote_code=True
    )
    config.use_cache = False
    model = transformers.AutoModelForCausalLM.from_pretrained(
        model_args.model_name_or_path,
        config=config,
        cache_dir=training_args.cache_dir,
        device_map=None,
        trust_remote_code=True,
        quantization_config=None,
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        model_args.model_name_or_path,
        cache_dir=training_args.cache_dir,
        model_max_length=training_args.model_max_length,
        padding_side="right",
        use_fast=False,
        trust_remote_code=True,
    )
    tokenizer.pad_token_id = tokenizer.eos_token_id
    if training_args.use_lora:
        is_chat = "chat" in model_args.model_name_or_path.lower()
        lora_config = LoraConfig(
            r=lora_args.lora_r,
            lora_alpha=lora_args.lora_alpha,
            target_modules=lora_args.lora_target_modules,
            lora_dropout=lora_args.lora_dropout,
            bias=lora_args.lora_bias,
            task_type="CAUSAL_LM",
            modules_to_save=None if is_chat else ["embed_tokens", "lm_head"],
        )
        model = get_peft_model(model, lora_config)
        if training_args.gradient_checkpointing:
            model.enable_input_require_grads()
    data_module = make_supervised_data_module(
        tokenizer=tokenizer, data_args=data_args, max_len=training_args.model_max_length
    )
    trainer = Trainer(model=model, processing_class=tokenizer, args=training_args, **data_module)
    trainer.train()
    trainer.save_state()
    safe_save_model_for_hf_trainer(trainer=trainer, output_dir=training_args.output_dir, bias=lora_args.lora_bias)


if __name__ == "__main__":
    train()
