"""Text-only tuning in the structure of LLaVA's llava/train/train.py: a Trainer with its own sampler and saving methods,
optionally LoRA on all linears, whose weights and other trained weights go into two files.
"""

import json
import os
import pathlib
from dataclasses import dataclass, field

import torch
import transformers
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, Sampler
from transformers import Trainer

IGNORE_INDEX = -100

local_rank = None


def rank0_print(*args):
    if local_rank == 0:
        print(*args)


@dataclass
class ModelArguments:
    model_name_or_path: str | None = field(default="facebook/opt-125m")
    version: str | None = field(default="v0")
    freeze_backbone: bool = field(default=False)


@dataclass
class DataArguments:
    data_path: str = field(default=None, metadata={"help": "JSON list of conversations."})


@dataclass
class TrainingArguments(transformers.TrainingArguments):
    cache_dir: str | None = field(default=None)
    optim: str = field(default="adamw_torch")
    remove_unused_columns: bool = field(default=False)
    model_max_length: int = field(default=512, metadata={"help": "Longer sequences are cut."})
    tune_mm_mlp_adapter: bool = field(default=False)
    lora_enable: bool = False
    lora_r: int = 64
    lora_alpha: int = 16
    lora_dropout: float = 0.05
    lora_bias: str = "none"
    group_by_modality_length: bool = field(default=False)


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


def get_peft_state_non_lora_maybe_zero_3(named_params):
    to_return = {k: t for k, t in named_params if "lora_" not in k}
    to_return = {k: t for k, t in to_return.items() if t.requires_grad}
    return {k: maybe_zero_3(v).cpu() for k, v in to_return.items()}


def find_all_linear_names(model):
    names = {name.split(".")[-1] for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    return sorted(names - {"lm_head"})


def safe_save_model_for_hf_trainer(trainer, output_dir):
    if trainer.args.deepspeed:
        trainer.save_model(output_dir)
        return
    state_dict = trainer.model.state_dict()
    if trainer.args.should_save:
        cpu_state_dict = {key: value.cpu() for key, value in state_dict.items()}
        del state_dict
        trainer._save(output_dir, state_dict=cpu_state_dict)


def smart_tokenizer_and_embedding_resize(special_tokens_dict, tokenizer, model):
    num_new_tokens = tokenizer.add_special_tokens(special_tokens_dict)
    model.resize_token_embeddings(len(tokenizer))
    if num_new_tokens > 0:
        input_embeddings = model.get_input_embeddings().weight.data
        output_embeddings = model.get_output_embeddings().weight.data
        input_embeddings_avg = input_embeddings[:-num_new_tokens].mean(dim=0, keepdim=True)
        output_embeddings_avg = output_embeddings[:-num_new_tokens].mean(dim=0, keepdim=True)
        input_embeddings[-num_new_tokens:] = input_embeddings_avg
        output_embeddings[-num_new_tokens:] = output_embeddings_avg


class LazySupervisedDataset(Dataset):
    def __init__(self, data_path, tokenizer):
        with open(data_path, encoding="utf-8") as file:
            self.list_data_dict = json.load(file)
        self.tokenizer = tokenizer

    def __len__(self):
        return len(self.list_data_dict)

    @property
    def modality_lengths(self):
        # Samples with an image have positive lengths, text has negative ones.
        sizes = [sum(len(turn["value"].split()) for turn in item["conversations"]) for item in self.list_data_dict]
        return [size if index % 3 == 0 else -size for index, size in enumerate(sizes)]

    def __getitem__(self, i):
        ids, labels = [self.tokenizer.bos_token_id], [IGNORE_INDEX]
        for turn in self.list_data_dict[i]["conversations"]:
            role = "USER :" if turn["from"] == "human" else "ASSISTANT :"
            tokens = self.tokenizer(f"{role} {turn['value']}", add_special_tokens=False).input_ids
            ids += tokens
            labels += [IGNORE_INDEX] * len(tokens) if turn["from"] == "human" else tokens
        return {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels)}


@dataclass
class DataCollatorForSupervisedDataset:
    tokenizer: transformers.PreTrainedTokenizerBase

    def __call__(self, instances):
        input_ids, labels = ([instance[key] for instance in instances] for key in ("input_ids", "labels"))
        input_ids = pad_sequence(input_ids, batch_first=True, padding_value=self.tokenizer.pad_token_id)
        labels = pad_sequence(labels, batch_first=True, padding_value=IGNORE_INDEX)
        input_ids = input_ids[:, : self.tokenizer.model_max_length]
        labels = labels[:, : self.tokenizer.model_max_length]
        return {
            "input_ids": input_ids,
            "labels": labels,
            "attention_mask": input_ids.ne(self.tokenizer.pad_token_id),
        }


class LengthGroupedSampler(Sampler):
    """Batches of either modality, drawn from torch's generator and sorted by length within a step."""

    def __init__(self, batch_size, world_size, lengths, generator=None):
        self.batch_size, self.world_size, self.lengths, self.generator = batch_size, world_size, lengths, generator

    def __len__(self):
        return len(self.lengths)

    def __iter__(self):
        megabatch_size = self.world_size * self.batch_size
        megabatches, rest = [], []
        for sign in (1, -1):
            chosen = [index for index, length in enumerate(self.lengths) if sign * length > 0]
            shuffled = [chosen[index] for index in torch.randperm(len(chosen))]
            split = [shuffled[i : i + megabatch_size] for i in range(0, len(shuffled), megabatch_size)]
            split = [sorted(batch, key=lambda index: abs(self.lengths[index]), reverse=True) for batch in split]
            megabatches += split[:-1]
            rest += split[-1]
        order = torch.randperm(len(megabatches), generator=self.generator)
        return iter([index for batch in (*(megabatches[i] for i in order), rest) for index in batch])


class LLaVATrainer(Trainer):
    def _get_train_sampler(self, train_dataset=None):
        if self.args.group_by_modality_length:
            return LengthGroupedSampler(
                self.args.train_batch_size,
                world_size=self.args.world_size * self.args.gradient_accumulation_steps,
                lengths=self.train_dataset.modality_lengths,
            )
        return super()._get_train_sampler(train_dataset)

    def _save_checkpoint(self, model, trial, metrics=None):
        if getattr(self.args, "tune_mm_mlp_adapter", False):
            raise NotImplementedError("vision")
        super()._save_checkpoint(model, trial)

    def _save(self, output_dir=None, state_dict=None):
        if getattr(self.args, "tune_mm_mlp_adapter", False):
            return
        super()._save(output_dir, state_dict)


def train():
    global local_rank

    parser = transformers.HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
    model_args, data_args, training_args = parser.parse_args_into_dataclasses()
    local_rank = training_args.local_rank
    model = transformers.LlamaForCausalLM.from_pretrained(
        model_args.model_name_or_path, cache_dir=training_args.cache_dir
    )
    model.config.use_cache = False
    if model_args.freeze_backbone:
        model.model.requires_grad_(False)
    if training_args.gradient_checkpointing:
        model.enable_input_require_grads()
    if training_args.lora_enable:
        from peft import LoraConfig, get_peft_model

        lora_config = LoraConfig(
            r=training_args.lora_r,
            lora_alpha=training_args.lora_alpha,
            target_modules=find_all_linear_names(model),
            lora_dropout=training_args.lora_dropout,
            bias=training_args.lora_bias,
            task_type="CAUSAL_LM",
        )
        rank0_print("Adding LoRA adapters...")
        model = get_peft_model(model, lora_config)
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        model_args.model_name_or_path,
        cache_dir=training_args.cache_dir,
        model_max_length=training_args.model_max_length,
        padding_side="right",
        use_fast=False,
    )
    if model_args.version == "v0":
        if tokenizer.pad_token is None:
            smart_tokenizer_and_embedding_resize({"pad_token": "[PAD]"}, tokenizer, model)
    else:
        tokenizer.pad_token = tokenizer.unk_token
    trainer = LLaVATrainer(
        model=model,
        processing_class=tokenizer,
        args=training_args,
        train_dataset=LazySupervisedDataset(data_args.data_path, tokenizer),
        eval_dataset=None,
        data_collator=DataCollatorForSupervisedDataset(tokenizer),
    )
    if list(pathlib.Path(training_args.output_dir).glob("checkpoint-*")):
        trainer.train(resume_from_checkpoint=True)
    else:
        trainer.train()
    trainer.save_state()
    model.config.use_cache = True
    if training_args.lora_enable:
        state_dict = get_peft_state_maybe_zero_3(model.named_parameters(), training_args.lora_bias)
        non_lora_state_dict = get_peft_state_non_lora_maybe_zero_3(model.named_parameters())
        if training_args.local_rank == 0 or training_args.local_rank == -1:
            model.config.save_pretrained(training_args.output_dir)
            model.save_pretrained(training_args.output_dir, state_dict=state_dict)
            torch.save(non_lora_state_dict, os.path.join(training_args.output_dir, "non_lora_trainables.bin"))
    else:
        safe_save_model_for_hf_trainer(trainer=trainer, output_dir=training_args.output_dir)


if __name__ == "__main__":
    train()
