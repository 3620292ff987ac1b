"""What trains silently wrong on split models today, as most of TRL's trainers: refused by name before work starts."""

import pytest
import transformers
from transformers import (
    AutoModelForCausalLM,
    CLIPConfig,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    ViTConfig,
)

from hf_megatron import MegatronConfig, UnsupportedError
from hf_megatron.integrations.gate import ConfigUnderTest
from hf_megatron.verify.ranks import run_ranks

TP2 = MegatronConfig(tp_size=2)


def test_adapters_of_transformers(stories):
    def wrap():
        from peft import LoraConfig

        model = AutoModelForCausalLM.from_pretrained(stories, megatron_config=TP2)
        config = LoraConfig(target_modules=["q_proj", "down_proj"])
        with pytest.raises(UnsupportedError, match="transformers' own adapters"):
            model.add_adapter(config)
        with pytest.raises(UnsupportedError, match="transformers' own adapters"):
            model.load_adapter("folder")

    run_ranks(wrap, 2)


@pytest.mark.parametrize("name", ["GRPO", "RLOO", "Distillation"])
def test_trl_trainers(stories, name, tmp_path):
    def build():
        import trl

        model = AutoModelForCausalLM.from_pretrained(stories, megatron_config=TP2)
        with pytest.raises(UnsupportedError, match=f"{name}Trainer: of TRL's trainers SFTTrainer, DPO"):
            getattr(trl, f"{name}Trainer")(model=model)

    run_ranks(build, 2)


@pytest.mark.parametrize("name", ["GRPO", "Distillation"])
def test_trl_trainers_refuse_a_name_before_it_is_loaded(name, tmp_path):
    import trl

    options = {"model_init_kwargs": {"megatron_config": TP2}, "use_cpu": True, "bf16": False}
    arguments = getattr(trl, f"{name}Config")(str(tmp_path), **options)
    with pytest.raises(UnsupportedError, match=f"{name}Trainer: of TRL's trainers SFTTrainer, DPO"):
        getattr(trl, f"{name}Trainer")("nobody/has-this-model", args=arguments)


def test_resize_and_distributed_checkpoint(stories, tmp_path):
    def call():
        model = AutoModelForCausalLM.from_pretrained(stories, megatron_config=TP2)
        with pytest.raises(UnsupportedError, match="resize_token_embeddings"):
            model.resize_token_embeddings(600)
        with pytest.raises(UnsupportedError, match="distributed_checkpoint"):
            model.save_pretrained(tmp_path, distributed_checkpoint=True)
        with pytest.raises(UnsupportedError, match="state_dict"):
            model.save_pretrained(tmp_path, state_dict={})

    run_ranks(call, 2)


SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
VISION = SMALL | {"image_size": 8, "patch_size": 4}
TOWERS = {
    "ViTForImageClassification": (ViTConfig(**VISION), "takes pixel_values"),
    "CLIPVisionModel": (CLIPVisionConfig(**VISION), "takes pixel_values"),
    "CLIPModel": (CLIPConfig(text_config=SMALL | {"vocab_size": 64}, vision_config=VISION), "has to have one list of"),
    "LlavaForConditionalGeneration": (
        LlavaConfig(
            vision_config=CLIPVisionConfig(**VISION),
            text_config=LlamaConfig(vocab_size=64, **SMALL),
            image_token_index=5,
        ),
        "has to have one list of",
    ),
}


@pytest.mark.parametrize("name", TOWERS)
def test_towers_over_pipeline_stages(tmp_path, name):
    config, match = TOWERS[name]
    getattr(transformers, name)(config).save_pretrained(tmp_path)

    def on_rank():
        with pytest.raises(UnsupportedError, match=f"pp_size.*{name} {match}"):
            getattr(transformers, name).from_pretrained(tmp_path, megatron_config=ConfigUnderTest(pp_size=2))

    run_ranks(on_rank, 2)
