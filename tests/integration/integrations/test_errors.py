"""Tests that features which would train parallelized models incorrectly are rejected by name before they start."""

import contextlib
import importlib
import inspect
import pkgutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    CLIPConfig,
    CLIPVisionConfig,
    Trainer,
    TrainingArguments,
    ViTConfig,
)

from hf_megatron import MegatronConfig, UnsupportedError
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.integrations.torch.ddp_check import reject_other_trl_trainers
from hf_megatron.models.verification_gate import ConfigUnderTest

TP2 = MegatronConfig(tp_size=2)


def test_adapters_of_peft_train(stories, tmp_path):
    from peft import LoraConfig, PeftModel, get_peft_model

    def wrap():
        model = AutoModelForCausalLM.from_pretrained(stories, megatron_config=TP2)
        new = get_peft_model(AutoModelForCausalLM.from_pretrained(stories, megatron_config=TP2), config)
        assert compute_gradient_norm(new)[0] == pytest.approx(plain_loss, rel=1e-5)
        return compute_gradient_norm(PeftModel.from_pretrained(model, tmp_path, is_trainable=True))

    def compute_gradient_norm(model):
        ids = torch.arange(3, 27).view(2, 12)
        loss = model.train()(input_ids=ids, labels=ids).loss
        loss.backward()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return loss.item(), torch.nn.utils.clip_grad_norm_(trained, 1e9).item()

    config = LoraConfig(target_modules=["q_proj", "down_proj"], lora_dropout=0.0)
    plain_loss, _ = compute_gradient_norm(AutoModelForCausalLM.from_pretrained(stories))
    torch.manual_seed(0)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(stories), replace(config, init_lora_weights=False))
    adapted.save_pretrained(tmp_path)
    expected = pytest.approx(compute_gradient_norm(adapted), rel=1e-4)
    assert run_ranks(wrap, 2) == [expected] * 2


SUPPORTED = {
    "trl.trainer": ["DPOTrainer", "DistillationTrainer", "GRPOTrainer", "KTOTrainer", "RLOOTrainer", "RewardTrainer"],
    "trl.experimental": ["CPOTrainer", "GKDTrainer", "ORPOTrainer"],
}


def list_trl_trainers():
    """Returns all trainer classes of the installed TRL package by module and name."""
    import trl

    trainers = {}
    for module in pkgutil.walk_packages(trl.__path__, "trl."):
        if module.name.partition(".")[2].split(".")[0] in ("trainer", "experimental"):
            # Some modules need optional packages.
            with contextlib.suppress(ImportError):
                classes = inspect.getmembers(importlib.import_module(module.name), inspect.isclass)
                trainers |= {(kind.__module__, name): kind for name, kind in classes if issubclass(kind, Trainer)}
    return {key: kind for key, kind in trainers.items() if key[0].startswith("trl.") and not key[1].startswith("_")}


def test_every_trl_trainer_is_supported_or_rejected():
    rejected = set()
    for (module, name), kind in list_trl_trainers().items():
        try:
            reject_other_trl_trainers(kind.__new__(kind))
        except UnsupportedError as error:
            assert str(error).startswith(f"{name}: ") and "these TRL trainers: SFTTrainer, DPOTrainer, " in str(error)
            rejected.add(f"{module}.{name}")
    assert len(rejected) >= 10 and all(name.startswith("trl.experimental.") for name in rejected)
    assert not any(name.endswith(f".{supported}") for name in rejected for supported in SUPPORTED["trl.experimental"])
    listed = (Path(__file__).parents[3] / "docs" / "post_training.md").read_text()
    assert all(f"`{name.rpartition('.')[2]}`" in listed for name in rejected), sorted(rejected)


def test_unsupported_trl_trainers_are_rejected(stories, tmp_path):
    from trl.experimental.gmpo import GMPOConfig, GMPOTrainer
    from trl.experimental.tpo import TPOConfig, TPOTrainer

    def build():
        model = AutoModelForCausalLM.from_pretrained(stories, megatron_config=TP2)
        rows = Dataset.from_list([{"prompt": "a", "chosen": "b", "rejected": "c", "reference": "d"}] * 2)
        options = {"use_cpu": True, "bf16": False, "report_to": "none"}
        with pytest.raises(UnsupportedError, match="GMPOTrainer: .* these TRL trainers: SFTTrainer, DPO"):
            args = GMPOConfig(str(tmp_path), num_generations=2, **options)
            GMPOTrainer(model, reward_funcs=len, args=args, train_dataset=rows)
        message = "Use one of them, transformers.Trainer or an Accelerate loop."
        with pytest.raises(UnsupportedError, match=f"TPOTrainer: .* these TRL trainers: SFTTrainer, DPO.* {message}"):
            TPOTrainer(model, args=TPOConfig(str(tmp_path), **options), train_dataset=rows)
        return train(model)

    def train(model):
        ids = torch.arange(3, 51).view(4, 12).tolist()
        rows = Dataset.from_list([{"input_ids": row, "labels": row} for row in ids])
        arguments = TrainingArguments(
            str(tmp_path), use_cpu=True, report_to=[], max_steps=2, logging_steps=1, per_device_train_batch_size=2
        )
        trainer = Trainer(model, arguments, train_dataset=rows)
        trainer.train()
        return [value for entry in trainer.state.log_history[:2] for value in (entry["loss"], entry["grad_norm"])]

    [expected] = run_ranks(lambda: train(AutoModelForCausalLM.from_pretrained(stories)), 1)
    assert run_ranks(build, 2) == [pytest.approx(expected, rel=1e-4)] * 2


def test_distributed_checkpoint_is_rejected(stories, tmp_path):
    def call():
        model = AutoModelForCausalLM.from_pretrained(stories, megatron_config=TP2)
        with pytest.raises(UnsupportedError, match="distributed_checkpoint"):
            model.save_pretrained(tmp_path, distributed_checkpoint=True)
        # Ranks that do not write may pass an empty state dict.
        with contextlib.nullcontext() if dist.get_rank() else pytest.raises(UnsupportedError, match="state_dict"):
            model.save_pretrained(tmp_path, state_dict={})

    run_ranks(call, 2)
    assert not list(tmp_path.iterdir())


SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
VISION = SMALL | {"image_size": 8, "patch_size": 4}
VISION_ENCODERS = {
    "ViTForImageClassification": (ViTConfig(**VISION), "takes pixel_values"),
    "CLIPVisionModel": (CLIPVisionConfig(**VISION), "takes pixel_values"),
    "CLIPModel": (
        CLIPConfig(text_config=SMALL | {"vocab_size": 64}, vision_config=VISION),
        "must have exactly one list of",
    ),
}


@pytest.mark.parametrize("name", VISION_ENCODERS)
def test_vision_encoders_reject_pipeline_stages(tmp_path, name):
    config, match = VISION_ENCODERS[name]
    getattr(transformers, name)(config).save_pretrained(tmp_path)

    def on_rank():
        with pytest.raises(UnsupportedError, match=f"pp_size.*{name} {match}"):
            getattr(transformers, name).from_pretrained(tmp_path, megatron_config=ConfigUnderTest(pp_size=2))

    run_ranks(on_rank, 2)
