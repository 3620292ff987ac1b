"""Tests that follow the cures in errors of model classes, planning and model cards."""

from pathlib import Path

import pytest
import torch
from huggingface_hub import ModelCard, ModelCardData
from transformers import CONFIG_MAPPING, CLIPConfig, CLIPModel
from typer.testing import CliRunner

from hf_megatron import ConfigError, MegatronConfig, UnsupportedError
from hf_megatron.cli import app
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.core.layouts import parse_layout
from hf_megatron.model_cards import check_card
from hf_megatron.models.registry import REGISTRY, load_families
from hf_megatron.models.verification_gate import ConfigUnderTest
from hf_megatron.planner.training import Training
from hf_megatron.testing import new_family
from hf_megatron.testing.parity import check_tiny_model
from hf_megatron.testing.tiny_config import tiny_config
from tests.helpers.shared_tiny_models import make_tiny_model
from tests.integration.models.test_verification_gate import Scores
from tests.integration.testing.test_new_family import load_skeleton

ROOT = Path(__file__).parents[3]


def test_class_with_a_head_returns_hidden_states():
    config = tiny_config(CONFIG_MAPPING["llama"]())
    ids = torch.arange(3, 19).view(2, 8)

    def compute_hidden_states(model):
        with torch.no_grad():
            return model.eval()(input_ids=ids, output_hidden_states=True).hidden_states

    tiny_model = make_tiny_model(CONFIG_MAPPING["llama"]())

    def on_rank():
        layout = MegatronConfig(tp_size=2)
        message = r"Load a class with a head, such as AutoModelForCausalLM, and read outputs\.hidden_states"
        with pytest.raises(UnsupportedError, match=message):
            Scores._from_config(config, megatron_config=layout)
        return compute_hidden_states(tiny_model.load(megatron_config=layout))

    expected = compute_hidden_states(tiny_model.load())
    for states in run_ranks(on_rank, 2):
        for state, other in zip(states, expected, strict=True):
            torch.testing.assert_close(state, other, rtol=1e-4, atol=1e-5)


def test_coupled_batches_are_not_split():
    tiny_model = make_tiny_model(CONFIG_MAPPING["doge"](), changes={"is_moe": True})

    def on_rank():
        for fields in ({"dp_size": 2}, {"pp_size": 2}):
            with pytest.raises(UnsupportedError, match=r"Load it with dp_size=1 and pp_size=1\."):
                tiny_model.load(megatron_config=ConfigUnderTest(**fields))

    run_ranks(on_rank, 2)
    comparison = check_tiny_model(tiny_model, ConfigUnderTest(tp_size=2, dp_size=1, pp_size=1))
    assert comparison.passed, comparison.report()


def test_z_loss_needs_router_logits():
    tiny_model = make_tiny_model(CONFIG_MAPPING["qwen3_moe"](), changes={"num_experts": 4})
    batch = tiny_model.batches[0]

    def load(**kwargs):
        coefficient = kwargs.pop("coefficient", 0.0)
        config = MegatronConfig(tp_size=2, router_z_loss_coef=coefficient)
        return tiny_model.load(megatron_config=config, **kwargs).train()

    def on_rank():
        message = r"Load it with output_router_logits=True if it supports it, or set router_z_loss_coef=0\."
        with pytest.raises(ConfigError, match=message):
            load(coefficient=0.1, output_router_logits=False)
        losses = []
        for kwargs in ({"coefficient": 0.1, "output_router_logits": True}, {"output_router_logits": False}):
            loss = load(**kwargs)(**batch).loss
            loss.backward()
            losses.append(loss.item())
        return losses

    expected = tiny_model.load(output_router_logits=False).train()(**batch).loss.item()
    for with_z_loss, without in run_ranks(on_rank, 2):
        assert without == pytest.approx(expected, rel=1e-5) and with_z_loss > without + 1e-4


def test_quantized_plan_has_an_adapter():
    with pytest.raises(ConfigError, match=r"quantized weights cannot be trained\. Set lora_rank above 0\."):
        Training(quantized="nf4")
    assert Training(quantized="nf4", lora_rank=8).quantized == "nf4"


def test_registered_family_file_is_edited(monkeypatch):
    result = CliRunner().invoke(app, ["new-family", "opt"])
    message = "registered in hf_megatron/models/families/opt.py. Edit that file."
    assert result.exit_code == 2 and message in " ".join(result.output.split())
    # An edit of that file that replicates the MLP takes effect, and the model still trains like a single process.
    lines = (
        (ROOT / "hf_megatron/models/families/opt.py").read_text("utf-8").split("\n\nregister_facts(")[0].splitlines()
    )
    source = "\n".join(line for line in lines if ".fc1" not in line and ".fc2" not in line)
    load_families()
    monkeypatch.delitem(REGISTRY, "opt")
    load_skeleton(source, "opt")
    tiny_model = make_tiny_model(CONFIG_MAPPING["opt"]())

    def require_replicated_mlp(model):
        layer = model.model.decoder.layers[0]
        assert layer.fc1.weight.placements[0].is_replicate()
        assert layer.self_attn.q_proj.weight.placements[0].is_shard()

    comparison = check_tiny_model(tiny_model, parse_layout("tp2"), prepare=require_replicated_mlp)
    assert comparison.passed, comparison.report()


def test_unneeded_family_file_is_checked_and_deleted(monkeypatch):
    source = new_family.make_family_skeleton(CONFIG_MAPPING["llama"]())
    first, second = source.splitlines()[:2]
    assert first.endswith("Check it first, and delete this file if the check passes:")
    command = second.removeprefix("#").split()
    assert command == ["hf-megatron", "check", "llama", "--layout", "tp2,tp2+sp,pp2"]
    load_families()
    assert "llama" not in REGISTRY
    result = CliRunner().invoke(app, command[1:])
    assert result.exit_code == 0, result.output


def test_unknown_license_is_named_as_other():
    data = ModelCardData(license="house-license")
    with pytest.raises(
        ConfigError, match=r"'house-license' is not known to the Hub\. Use `other` with a license_name\."
    ):
        check_card(ModelCard(f"---\n{data.to_yaml()}\n---\n"))
    data = ModelCardData(license="other", license_name="house-license")
    check_card(ModelCard(f"---\n{data.to_yaml()}\n---\n"))


def test_models_with_two_encoders(tmp_path):
    """Loading without a layout."""
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
    config = CLIPConfig(
        text_config=tower | {"vocab_size": 99}, vision_config=tower | {"image_size": 16, "patch_size": 8}
    )
    CLIPModel(config).save_pretrained(tmp_path)

    def on_rank():
        with pytest.raises(UnsupportedError, match="CLIPModel is not supported: .*Load it without megatron_config."):
            CLIPModel.from_pretrained(tmp_path, megatron_config=MegatronConfig(tp_size=2))
        ids, pixels = torch.arange(6).view(1, 6), torch.ones(1, 3, 16, 16)
        return CLIPModel.from_pretrained(tmp_path)(input_ids=ids, pixel_values=pixels).logits_per_text.item()

    first, second = run_ranks(on_rank, 2)
    assert first == second
