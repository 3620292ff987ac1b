"""Tests of fine-tuning on images: TRL trainers with a processor, and Trainer with a collator."""

import numpy as np
import pytest
import torch
from datasets import Dataset
from PIL import Image
from transformers import (
    CONFIG_MAPPING,
    AutoModelForImageTextToText,
    AutoTokenizer,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3Processor,
    Trainer,
    TrainingArguments,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.models.verification_gate import ConfigUnderTest
from hf_megatron.testing.multimodal_batch import make_multimodal_batch
from tests.helpers.shared_tiny_models import make_tiny_model

WORDS = [
    *("once", "upon", "a", "time", "there", "was", "a", "little", "girl", "who"),
    *("liked", "to", "play", "in", "the", "park", "with", "her", "dog"),
]
LAYOUTS = {
    "tp2+sp": {"tp_size": 2, "sequence_parallel": True},
    "pp2": {"pp_size": 2},
    "dp2": {"dp_size": 2},
}
COMMON = {
    **{"logging_steps": 1, "learning_rate": 1e-3, "use_cpu": True, "report_to": [], "save_strategy": "no"},
    **{"disable_tqdm": True, "bf16": False, "gradient_accumulation_steps": 2, "gradient_checkpointing": False},
}
TOKENS = {"boi_token": "<boi>", "image_token": "<img>", "eoi_token": "<eoi>"}


@pytest.fixture(scope="module")
def gemma(stories, tmp_path_factory):
    """Folder with a tiny Gemma 3 model and its processor."""
    folder = tmp_path_factory.mktemp("gemma")
    tokenizer = AutoTokenizer.from_pretrained(stories, extra_special_tokens=TOKENS)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    images = Gemma3ImageProcessorPil(size={"height": 28, "width": 28}, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    Gemma3Processor(image_processor=images, tokenizer=tokenizer, image_seq_length=4).save_pretrained(folder)
    ids = {name: tokenizer.convert_tokens_to_ids(token) for name, token in TOKENS.items()}
    text = {
        **{"vocab_size": len(tokenizer) + 5, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8},
        **{"layer_types": ["sliding_attention", "full_attention"] * 2},
        **{name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")},
    }
    vision_config = {
        **{"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"image_size": 28, "patch_size": 7, "vision_use_head": False},
    }
    torch.manual_seed(0)
    config = Gemma3Config(
        text_config=text,
        vision_config=vision_config,
        mm_tokens_per_image=4,
        image_token_index=ids["image_token"],
        boi_token_index=ids["boi_token"],
        eoi_token_index=ids["eoi_token"],
    )
    Gemma3ForConditionalGeneration(config).save_pretrained(folder)
    return folder


def make_samples(count, *, pairs):
    """Returns samples that alternate between one and two images."""
    draw = np.random.RandomState(0)

    def draw_text(length):
        return " ".join(draw.permutation(WORDS)[:length])

    rows = []
    for number in range(count):
        images = [Image.fromarray(draw.randint(0, 255, (28, 28, 3), dtype=np.uint8)) for _ in range(1 + number % 2)]
        row = {"images": images, "prompt": "<boi> " * len(images) + draw_text(5)}
        answers = {"chosen": draw_text(4 + number % 3), "rejected": draw_text(5)}
        rows.append(row | (answers if pairs else {"completion": answers["chosen"]}))
    return Dataset.from_list(rows)


def fine_tune(folder, output, layout, trainer_class, dp_size=1):
    arguments = {} if layout is None else {"megatron_config": layout}
    model = AutoModelForImageTextToText.from_pretrained(folder, **arguments)
    config_class = {SFTTrainer: SFTConfig, DPOTrainer: DPOConfig}[trainer_class]
    trainer = trainer_class(
        model=model,
        args=config_class(
            str(output), per_device_train_batch_size=4 // dp_size, max_steps=20, max_length=None, **COMMON
        ),
        train_dataset=make_samples(16, pairs=trainer_class is DPOTrainer),
        processing_class=Gemma3Processor.from_pretrained(folder),
    )
    trainer.train()
    trainer.save_model(str(output / "saved"))
    return [{name: value for name, value in entry.items() if "runtime" not in name} for entry in get_train_log(trainer)]


def get_train_log(trainer):
    return [entry for entry in trainer.state.log_history if "loss" in entry]


def assert_logs_match(found, expected, tolerance):
    for log in found:
        assert len(log) == len(expected) == 20
        for entry, other in zip(log, expected, strict=True):
            reference = {name: value for name, value in other.items() if value is not None}
            assert {name: entry[name] for name in reference} == pytest.approx(reference, rel=tolerance, abs=tolerance)


@pytest.mark.parametrize("trainer_class", [SFTTrainer, DPOTrainer])
def test_trl_trainers_match_single_process(gemma, tmp_path, trainer_class):
    [expected] = run_ranks(fine_tune, 1, gemma, tmp_path / "one", None, trainer_class, timeout=300)
    for name, sizes in LAYOUTS.items():
        layout = ConfigUnderTest(**sizes)
        arguments = gemma, tmp_path / name, layout, trainer_class, layout.dp_size or 1
        assert_logs_match(run_ranks(fine_tune, 2, *arguments, timeout=300), expected, 1e-4)
        saved = tmp_path / name / "saved"
        assert {"processor_config.json", "tokenizer.json", "model.safetensors"} <= {
            file.name for file in saved.iterdir()
        }
        Gemma3Processor.from_pretrained(saved)
        Gemma3ForConditionalGeneration.from_pretrained(saved)


def make_single_samples(model):
    """Returns a dataset of single samples with one, two and no images."""
    rows = []
    for seed in range(6):
        batch = make_multimodal_batch(model, batch_size=3, seed=seed)
        for row in range(3):
            length = int(batch["attention_mask"][row].sum())
            rows.append({name: batch[name][row, :length] for name in ("input_ids", "labels", "mm_token_type_ids")})
        ends = batch["image_grid_thw"].prod(1).cumsum(0).tolist()
        pixels = batch["pixel_values"].tensor_split(ends[:-1])
        for row, images in zip(rows[-3:], ([0], [1, 2], []), strict=True):
            row["images"] = [(pixels[image], batch["image_grid_thw"][image]) for image in images]
    return rows


def collate(rows):
    """Pads the samples and concatenates their images."""
    names = {"input_ids": 0, "labels": -100, "mm_token_type_ids": 0}
    batch = {
        name: torch.nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True, padding_value=value)
        for name, value in names.items()
    }
    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    batch["attention_mask"] = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
    if images := [image for row in rows for image in row["images"]]:
        batch["pixel_values"] = torch.cat([pixels for pixels, _ in images])
        batch["image_grid_thw"] = torch.stack([grid for _, grid in images])
    return batch


def train_with_collator(tiny_model, output, layout, dp_size=1):
    rows = make_single_samples(tiny_model.load())
    trainer = Trainer(
        model=tiny_model.load(**({} if layout is None else {"megatron_config": layout})),
        args=TrainingArguments(
            str(output),
            per_device_train_batch_size=4 // dp_size,
            max_steps=20,
            remove_unused_columns=False,
            adam_epsilon=1e-5,
            **COMMON,
        ),
        train_dataset=rows,
        data_collator=collate,
    )
    trainer.train()
    return [{name: entry[name] for name in ("loss", "grad_norm")} for entry in get_train_log(trainer)]


@pytest.mark.parametrize("name", LAYOUTS)
def test_trainer_with_collator_matches_single_process(tmp_path, name):
    """Qwen2.5-VL on samples of unequal length with one, two and no images; the last batch is not full."""
    tiny_model = make_tiny_model(
        CONFIG_MAPPING["qwen2_5_vl"](), task="image", microbatches=2, min_layers=4, batch_size=4
    )
    [expected] = run_ranks(train_with_collator, 1, tiny_model, tmp_path / "one", None, timeout=300)
    layout = ConfigUnderTest(**LAYOUTS[name])
    logs = run_ranks(train_with_collator, 2, tiny_model, tmp_path / name, layout, layout.dp_size or 1, timeout=300)
    assert_logs_match(logs, expected, 1e-3)
