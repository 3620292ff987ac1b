"""Tests that follow the cures of errors with PEFT adapters."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, BitsAndBytesConfig

from hf_megatron import UnsupportedError
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.models.registry import REGISTRY, register_model, registered_types
from hf_megatron.models.spec_helpers import family_spec
from hf_megatron.models.verification_gate import ConfigUnderTest
from hf_megatron.parallel_state import parallel_state
from hf_megatron.testing.measure import _full, _gradients
from tests.helpers.dp_training import shard_batch
from tests.helpers.shared_tiny_models import make_tiny_model
from tests.helpers.single_steps import assert_step_matches
from tests.helpers.training import make_batch, save_tiny
from tests.integration.integrations.peft.test_injection import compute_logits

# Quantization blocks align with the shards of two ranks.
WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
TP2, DP2 = ConfigUnderTest(tp_size=2), ConfigUnderTest(dp_size=2)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny(folder, tie_word_embeddings=False)
    return folder


def load(path, config=None, **kwargs):
    return AutoModelForCausalLM.from_pretrained(path, megatron_config=config, **kwargs)


def lora(**settings):
    return LoraConfig(**{"r": 4, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False} | settings)


def train_adapter(model, config, batch=None):
    """Adds an adapter; returns the loss and the full gradients of the adapter."""
    torch.manual_seed(0)
    wrapped = get_peft_model(model, config).train()
    inner = wrapped.get_base_model()
    loss = wrapped(**shard_batch(inner, batch or make_batch(0))).loss
    loss.backward()
    gradients = _full(inner, _gradients(inner))
    return loss.item(), {name: gradient for name, gradient in gradients.items() if gradient is not None}


def compare_adapters(on_rank, make_model, *configs, batch=None):
    """Compares the steps that all ranks return with single-process steps of the same adapters."""
    results = run_ranks(on_rank, 2)
    for number, config in enumerate(configs):
        [expected] = run_ranks(lambda config=config: train_adapter(make_model(), config, batch), 1)
        assert_step_matches([steps[number] for steps in results], expected)


def test_adapter_is_merged_in_one_process_or_with_zero_stage_2(tiny, tmp_path):
    def on_rank():
        wrapped = get_peft_model(load(tiny, ConfigUnderTest(dp_size=2, zero_stage=3)), lora())
        message = "Save the adapter, and merge it in a single process or with zero_stage=2"
        with pytest.raises(UnsupportedError, match=message):
            wrapped.merge_and_unload()
        wrapped.save_pretrained(tmp_path)
        logits = compute_logits(wrapped)
        replicated = PeftModel.from_pretrained(load(tiny, ConfigUnderTest(dp_size=2, zero_stage=2)), tmp_path)
        return logits, compute_logits(replicated.merge_and_unload())

    results = run_ranks(on_rank, 2)
    alone = compute_logits(PeftModel.from_pretrained(load(tiny), tmp_path).merge_and_unload())
    assert not torch.allclose(alone, compute_logits(load(tiny)))
    for adapted, merged in results:
        torch.testing.assert_close(adapted, alone, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(merged, alone, rtol=2e-5, atol=2e-5)


def test_megatron_config_of_lora_is_left_unset(tiny):
    def on_rank():
        model = load(tiny, TP2)
        with pytest.raises(UnsupportedError, match="Leave it unset; the layout was set by from_pretrained"):
            get_peft_model(model, lora(megatron_config={"tensor_model_parallel_size": 2}))
        return [train_adapter(model, lora())]

    compare_adapters(on_rank, lambda: load(tiny), lora())


def test_linear_with_gathered_output_is_no_dora_target():
    source = make_tiny_model(CONFIG_MAPPING["pegasus_x"](), task="seq2seq")
    everything, supported = ["encoder.layers.0.self_attn.q_proj", "fc1"], ["fc1"]

    def on_rank():
        message = (
            "use_dora is not supported on .*q_proj.*Remove it from target_modules, or load the model with tp_size=1"
        )
        with pytest.raises(UnsupportedError, match=message):
            get_peft_model(source.load(megatron_config=TP2), lora(target_modules=everything, use_dora=True))
        return [
            train_adapter(source.load(megatron_config=layout), lora(target_modules=targets, use_dora=True), batch)
            for layout, targets in ((TP2, supported), (ConfigUnderTest(pp_size=1, dp_size=2), everything))
        ]

    [batch] = source.batches
    configs = [lora(target_modules=targets, use_dora=True) for targets in (supported, everything)]
    compare_adapters(on_rank, source.load, *configs, batch=batch)


def make_dropout_spec(model):
    """Returns a user's plan, in which the MLP is replicated and one of its linears draws random numbers."""
    plan = {f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"} | {
        "embed_tokens": "embedding_rowwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.up_proj": "synced_dropout",
    }
    return family_spec(model, plan)


def test_linear_of_another_style_is_no_target(tiny, monkeypatch):
    registered_types()
    monkeypatch.setitem(REGISTRY, "llama", None)
    register_model("llama", make_dropout_spec, replace=True)
    everything, supported = ["q_proj", "up_proj"], ["q_proj"]

    def on_rank():
        message = "'synced_dropout' modules are not .* Remove it from target_modules, or load the model with tp_size=1"
        with pytest.raises(UnsupportedError, match=message):
            get_peft_model(load(tiny, TP2), lora(target_modules=everything))
        return [
            train_adapter(load(tiny, layout), lora(target_modules=targets))
            for layout, targets in ((TP2, supported), (DP2, everything))
        ]

    compare_adapters(on_rank, lambda: load(tiny), lora(target_modules=supported), lora(target_modules=everything))


def test_quantized_base_is_dequantized_before_merging():
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    source = make_tiny_model(CONFIG_MAPPING["llama"](), changes=WIDE)

    def merge(model, how):
        torch.manual_seed(0)
        wrapped = get_peft_model(model, lora())
        if how == "dequantize":
            if parallel_state(model) is not None:
                message = (
                    r"Use merge_and_unload\(\), or call get_base_model\(\)\.dequantize\(\) before merge_adapter\(\)"
                )
                with pytest.raises(UnsupportedError, match=message):
                    wrapped.merge_adapter()
            wrapped.get_base_model().dequantize()
            wrapped.merge_adapter()
        else:
            wrapped = wrapped.merge_and_unload()
        return compute_logits(wrapped)

    def on_rank(config):
        return [
            merge(load(source.directory, config, quantization_config=settings), how) for how in ("dequantize", "unload")
        ]

    merged, unloaded = run_ranks(on_rank, 2, TP2)[0]
    torch.testing.assert_close(merged, unloaded, rtol=2e-5, atol=2e-5)

    def dequantize_alone():
        model = load(source.directory, quantization_config=settings).dequantize()
        return merge(model, "unload")

    torch.testing.assert_close(merged, run_ranks(dequantize_alone, 1)[0], rtol=2e-4, atol=2e-4)


def test_changed_initial_adapter_is_converted_in_one_process(tiny, tmp_path):
    def on_rank():
        model = get_peft_model(load(tiny, TP2), lora(init_lora_weights="pissa"))
        # As PEFT documents: the initial adapter is saved as an ordinary one.
        model.peft_config["default"].init_lora_weights = True
        model.save_pretrained(tmp_path / "initial")
        model.peft_config["default"].init_lora_weights = "pissa"
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.mul_(1.5)
        initial = str(tmp_path / "initial")
        with pytest.raises(UnsupportedError, match="Save both adapters, and convert in a single process"):
            model.save_pretrained(tmp_path / "out", path_initial_model_for_weight_conversion=initial)
        model.save_pretrained(tmp_path / "trained")
        return compute_logits(model)

    [logits, _] = run_ranks(on_rank, 2)
    model = PeftModel.from_pretrained(load(tiny), tmp_path / "trained", is_trainable=True)
    model.save_pretrained(tmp_path / "out", path_initial_model_for_weight_conversion=str(tmp_path / "initial"))
    converted = PeftModel.from_pretrained(load(tiny), tmp_path / "out")
    torch.testing.assert_close(compute_logits(converted), logits, rtol=1e-4, atol=1e-4)


def test_sharded_weights_are_target_modules(tiny):
    parameters = {"target_modules": [], "target_parameters": ["q_proj.weight"]}

    def on_rank():
        model = load(tiny, TP2)
        with pytest.raises(UnsupportedError, match="Use target_modules instead, or load the model with tp_size=1"):
            get_peft_model(model, lora(**parameters))
        return [
            train_adapter(model, lora(target_modules=["q_proj"])),
            train_adapter(load(tiny, DP2), lora(**parameters)),
        ]

    compare_adapters(on_rank, lambda: load(tiny), lora(target_modules=["q_proj"]), lora(**parameters))


def test_sharded_biases_of_experts_are_left_out():
    source = make_tiny_model(CONFIG_MAPPING["gpt_oss"]())
    both = {"target_modules": None, "target_parameters": ["experts.gate_up_proj", "experts.gate_up_proj_bias"]}
    matrices = both | {"target_parameters": ["experts.gate_up_proj"]}

    def on_rank():
        message = "a sharded 2-D parameter .*Leave it out, or load the model with tp_size=1 and ep_size=1"
        with pytest.raises(UnsupportedError, match=message):
            get_peft_model(source.load(megatron_config=TP2), lora(**both))
        return [
            train_adapter(source.load(megatron_config=layout), lora(**settings), batch)
            for layout, settings in ((TP2, matrices), (DP2, both))
        ]

    [batch] = source.batches
    compare_adapters(on_rank, source.load, lora(**matrices), lora(**both), batch=batch)
