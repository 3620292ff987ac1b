"""Tests that follow the cures in errors of conversions."""

import json

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import hf_megatron
from hf_megatron import CheckpointError, MegatronConfig, UnsupportedError
from hf_megatron.conversion import TargetOptions, compare, convert
from hf_megatron.conversion.adapters import convert_adapter
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.testing.tiny_model import draw_parameters
from tests.helpers.tiny_models import build_tiny_model
from tests.integration.conversion.test_mtp_layers import add_hf_mtp_layers
from tests.integration.conversion.test_third_party_files import llama

IDS = torch.arange(3, 27).view(2, 12)


@pytest.fixture(scope="module")
def hf(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cures") / "hf"
    llama().save_pretrained(folder)
    return folder


def compute_logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_modules": ["q_proj"], "use_dora": True}, "only LoRA without DoRA"),
        ({"target_modules": ["q_proj", "lm_head"]}, "Megatron-Bridge has no adapters for lm_head"),
    ],
    ids=["dora", "lm_head"],
)
def test_unsupported_adapter_is_merged_and_converted(hf, tmp_path, settings, message):
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(hf), LoraConfig(r=4, **settings))
    draw_parameters(model, 1, trained_only=True)
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    with pytest.raises(UnsupportedError, match=f"{message}.*Merge the adapter into the base model and convert the mer"):
        convert_adapter(tmp_path / "adapter", tmp_path / "bridge", "bridge", hf)
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(hf), tmp_path / "adapter")
    expected = compute_logits(adapted)
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    convert(tmp_path / "merged", tmp_path / "core", "megatron_core")
    convert(tmp_path / "core", tmp_path / "back", "hf")
    torch.testing.assert_close(compute_logits(AutoModelForCausalLM.from_pretrained(tmp_path / "back")), expected)


def test_adapter_is_converted_with_config_of_its_base_model(hf, tmp_path):
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(hf), LoraConfig(r=4, target_modules="all-linear"))
    draw_parameters(model, 1, trained_only=True)
    model.save_pretrained(tmp_path / "adapter")
    convert_adapter(tmp_path / "adapter", tmp_path / "bridge", "bridge_canonical", hf)
    llama(num_hidden_layers=1).save_pretrained(tmp_path / "other")
    with pytest.raises(
        CheckpointError, match=r"do not belong to an adapter.*Check that the config is the base model's"
    ):
        convert_adapter(tmp_path / "bridge", tmp_path / "back", "peft", tmp_path / "other")
    convert_adapter(tmp_path / "bridge", tmp_path / "back", "peft", hf)
    expected, logits = (
        compute_logits(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(hf), tmp_path / name))
        for name in ("adapter", "back")
    )
    torch.testing.assert_close(logits, expected)


def test_folder_that_holds_the_weights_is_passed(hf, tmp_path):
    convert(hf, tmp_path / "run" / "checkpoint-10", "sharded")
    with pytest.raises(CheckpointError, match=r"not a checkpoint of a known format.*Pass the folder that holds these"):
        convert(tmp_path / "run", tmp_path / "out", "hf")
    convert(tmp_path / "run" / "checkpoint-10", tmp_path / "out", "hf")
    assert compare(tmp_path / "out", hf).equal


def test_missing_config_is_passed_or_put_there(hf, tmp_path):
    convert(hf, tmp_path / "core", "megatron_core")
    config = (tmp_path / "core" / "config.json").read_text("utf-8")
    (tmp_path / "core" / "config.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"architecture is unknown\. Put the model's config.json there; .*--config"
    ):
        convert(tmp_path / "core", tmp_path / "out", "hf", checksums=False)
    convert(tmp_path / "core", tmp_path / "out", "hf", config=str(hf), checksums=False)
    (tmp_path / "core" / "config.json").write_text(config, "utf-8")
    convert(tmp_path / "core", tmp_path / "other", "hf")
    assert compare(tmp_path / "out", hf).equal and compare(tmp_path / "other", hf).equal


def test_mtp_layers_are_written_for_one_pipeline_stage(tmp_path):
    build_tiny_model("deepseek_v3").save_pretrained(tmp_path / "hf")
    add_hf_mtp_layers(tmp_path / "hf", 1)
    config = json.loads((tmp_path / "hf" / "config.json").read_text("utf-8"))
    with pytest.raises(
        CheckpointError, match=r"multi-token prediction layers .* on one pipeline stage\. Use pp_size 1\."
    ):
        convert(
            tmp_path / "hf",
            tmp_path / "legacy",
            "megatron_legacy",
            options=TargetOptions(pp_size=config["num_hidden_layers"]),
        )
    report = convert(
        tmp_path / "hf", tmp_path / "legacy", "megatron_legacy", options=TargetOptions(pp_size=1), verify=True
    )
    assert report.comparison.equal


class Projection(PreTrainedModel):
    """Model that is not derived from a model class of transformers."""

    config_class = LlamaConfig

    def __init__(self, config):
        super().__init__(config)
        self.linear = torch.nn.Linear(config.hidden_size, 3)
        self.post_init()


def test_custom_model_is_saved_without_format(tmp_path):
    hf_megatron.enable()
    model = Projection(LlamaConfig(hidden_size=8, num_attention_heads=2))
    with pytest.raises(CheckpointError, match=r"Projection is not a transformers.*Call `save_pretrained` without `fo"):
        model.save_pretrained(tmp_path / "out", format="megatron_core")
    model.save_pretrained(tmp_path / "out")
    assert torch.equal(Projection.from_pretrained(tmp_path / "out").linear.weight, model.linear.weight)


def test_export_to_a_new_folder(hf, tmp_path):
    (tmp_path / "core").mkdir()

    def on_rank():
        model = AutoModelForCausalLM.from_pretrained(hf, megatron_config=MegatronConfig(tp_size=2))
        with pytest.raises(CheckpointError, match=r"core already exists\. Choose a folder that does not exist\."):
            model.save_pretrained(tmp_path / "core", format="megatron_core")
        model.save_pretrained(tmp_path / "core-2", format="megatron_core")

    run_ranks(on_rank, 2)
    assert compare(tmp_path / "core-2", hf).equal
