"""Tests that follow the cures of errors in loading, quantizing, generating and saving models."""

import functools
from dataclasses import replace

import pytest
import torch
from peft import PeftModel, get_peft_model
from torchao.quantization import Int8WeightOnlyConfig, PerTensor
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    GPT2Config,
    MarianMTModel,
    QuantoConfig,
    TorchAoConfig,
)

from hf_megatron import ConfigError, MegatronConfig, UnsupportedError
from hf_megatron.conversion import TargetOptions, convert
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.models.verification_gate import ConfigUnderTest
from tests.helpers.dp_training import load_model
from tests.helpers.shared_tiny_models import make_tiny_model
from tests.helpers.single_steps import assert_step_matches, compare_steps, measure_step
from tests.helpers.training import make_batch
from tests.integration.cures.test_peft import WIDE, load, lora, train_adapter
from tests.integration.integrations.transformers.test_generation import generate, parse_layout, tokenize_prompts

TP2, DP2 = ConfigUnderTest(tp_size=2), ConfigUnderTest(dp_size=2)


def test_sharded_model_generates_with_generate(stories):
    expected = generate(stories, None, do_sample=False)

    def on_rank():
        model = load(stories, TP2)
        message = r"Use generate\(\), or serve the saved model with an inference engine"
        with pytest.raises(UnsupportedError, match=message):
            model.generate_batch([[1, 5]])
        return model.generate(**tokenize_prompts(stories), max_new_tokens=24, do_sample=False)

    assert parse_layout("tp2") == MegatronConfig(tp_size=2)
    for tokens in run_ranks(on_rank, 2):
        assert torch.equal(tokens, expected)


def test_router_settings_need_two_ranks():
    source = replace(make_tiny_model(CONFIG_MAPPING["qwen3_moe"]()), arguments={"output_router_logits": True})
    fields = {"router_z_loss_coef": 0.1}

    def load_alone(**fields):
        return source.load(megatron_config=ConfigUnderTest(**fields))

    message = r"Use two or more ranks \(dp_size\), or leave router_z_loss_coef at"
    with pytest.raises(ConfigError, match=message):
        load_alone(**fields)
    [batch] = source.batches
    expected = load_alone()(**batch).loss.item()

    def on_ranks():
        loss = source.load(megatron_config=ConfigUnderTest(dp_size=2, **fields)).train()(**batch).loss
        loss.backward()
        return loss.item()

    # Both ranks get the same samples; the router loss adds to the loss of a single process.
    for loss in run_ranks(on_ranks, 2):
        assert loss > expected


@functools.cache
def make_wide():
    return make_tiny_model(CONFIG_MAPPING["llama"](), changes=WIDE, batch_size=4)


def compare_quantized(invalid, message, valid, layout=DP2):
    """Provokes the error of a quantization config, then compares an adapter on a valid one with a single process."""
    source = make_wide()
    batch = make_batch(0)

    def train(settings, config):
        return train_adapter(load(source.directory, config, quantization_config=settings), lora(), batch)

    def on_rank():
        for settings in invalid:
            with pytest.raises(UnsupportedError, match=message):
                train(settings, layout)
        return [train(settings, layout) for settings in valid]

    [expected] = run_ranks(lambda: [train(settings, None) for settings in valid], 1)
    results = run_ranks(on_rank, 2)
    for number, step in enumerate(expected):
        assert_step_matches([steps[number] for steps in results], step)


EIGHT_BITS = functools.partial(BitsAndBytesConfig, load_in_8bit=True, llm_int8_threshold=0.0)


def test_settings_of_eight_bits_are_left_false():
    invalid = [EIGHT_BITS(llm_int8_has_fp16_weight=True), EIGHT_BITS(llm_int8_enable_fp32_cpu_offload=True)]
    compare_quantized(invalid, "stored in 8 bits on the rank's device. Leave both False", [EIGHT_BITS()])


def test_embeddings_are_not_quantized():
    rows = Int8WeightOnlyConfig()
    invalid = [TorchAoConfig(rows, include_input_output_embeddings=True)]
    valid = [TorchAoConfig(rows, include_input_output_embeddings=False)]
    compare_quantized(invalid, "include_input_output_embeddings .* Set it to False", valid, TP2)


def test_torchao_scales_rows():
    invalid = [TorchAoConfig(Int8WeightOnlyConfig(granularity=PerTensor()))]
    valid = [TorchAoConfig(Int8WeightOnlyConfig())]
    compare_quantized(invalid, r"Use Int8WeightOnlyConfig\(\) with one scale per row", valid, TP2)


def test_supported_quantization_is_used():
    message = r"Use BitsAndBytesConfig \(4 or 8 bits\) or TorchAoConfig\(Int8WeightOnlyConfig\(\)\)"
    valid = [EIGHT_BITS(), BitsAndBytesConfig(load_in_4bit=True), TorchAoConfig(Int8WeightOnlyConfig())]
    compare_quantized([QuantoConfig(weights="int8")], message, valid)


def test_conv1d_model_is_not_quantized(tmp_path):
    config = GPT2Config(vocab_size=512, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)

    def on_rank():
        with pytest.raises(UnsupportedError, match="is a Conv1D, .* Load the model without quantization_config"):
            load(tmp_path, TP2, quantization_config=BitsAndBytesConfig(load_in_4bit=True))
        return measure_step(load_model(tmp_path, TP2))

    compare_steps(tmp_path, on_rank)


def test_quantized_checkpoint_is_replaced_by_its_source(tmp_path):
    source, settings, batch = (
        make_wide(),
        BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
        make_batch(0),
    )
    load(source.directory, quantization_config=settings).save_pretrained(tmp_path)

    def on_rank():
        message = "Load the checkpoint that it was made from, with quantization_config= and megatron_config="
        with pytest.raises(UnsupportedError, match=message):
            load(tmp_path, TP2)
        return train_adapter(load(source.directory, TP2, quantization_config=settings), lora(), batch)

    [expected] = run_ranks(lambda: train_adapter(load(tmp_path), lora(), batch), 1)
    assert_step_matches(run_ranks(on_rank, 2), expected)


def test_quantized_model_is_saved_as_adapter_or_dense_weights(tmp_path):
    source, settings, batch = (
        make_wide(),
        BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
        make_batch(0),
    )

    def make(config):
        torch.manual_seed(0)
        return get_peft_model(load(source.directory, config, quantization_config=settings), lora()).eval()

    def on_rank():
        message = (
            r"Save the adapter \(PeftModel.save_pretrained\), or save the weights after model.dequantize\(\) or merge"
        )
        model = load(source.directory, TP2, quantization_config=settings)
        with pytest.raises(UnsupportedError, match=message):
            model.save_pretrained(tmp_path / "base")
        model.dequantize().save_pretrained(tmp_path / "base")
        wrapped = make(TP2)
        wrapped.save_pretrained(tmp_path / "adapter")
        wrapped.merge_and_unload().save_pretrained(tmp_path / "merged")

    run_ranks(on_rank, 2)

    @torch.no_grad()
    def compare_logits():
        ids = batch["input_ids"]
        with_adapter = PeftModel.from_pretrained(load(tmp_path / "base"), tmp_path / "adapter")(input_ids=ids).logits
        torch.testing.assert_close(load(tmp_path / "merged")(input_ids=ids).logits, with_adapter, rtol=1e-4, atol=1e-4)
        model = get_peft_model(load(source.directory, quantization_config=settings).dequantize(), lora())
        dense = PeftModel.from_pretrained(model.unload(), tmp_path / "adapter")
        torch.testing.assert_close(dense(input_ids=ids).logits, with_adapter, rtol=1e-4, atol=1e-4)

    run_ranks(compare_logits, 1)


def test_options_belong_to_another_format(stories, tmp_path):
    def on_rank():
        model = load_model(stories, TP2)
        options = TargetOptions(tp_size=2)
        with pytest.raises(ConfigError, match="Hugging Face files have no options. Pass format= too"):
            model.save_pretrained(tmp_path / "core", options=options)
        model.save_pretrained(tmp_path / "core", format="megatron_core", options=options)

    run_ranks(on_rank, 2)
    convert(tmp_path / "core", tmp_path / "hf", "hf")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    for name, weight in AutoModelForCausalLM.from_pretrained(stories).state_dict().items():
        assert torch.equal(saved[name], weight), name


def test_tables_of_a_class_are_resized_in_one_process(tmp_path):
    source = make_tiny_model(CONFIG_MAPPING["marian"](), model_class="MarianMTModel")
    [batch] = source.batches

    def on_rank():
        message = "Load it in a single process, resize and save it, and load the result with megatron_config"
        with pytest.raises(UnsupportedError, match=message):
            source.load(megatron_config=TP2).resize_token_embeddings(150)
        if torch.distributed.get_rank() == 0:
            model = source.load()
            model.resize_token_embeddings(150)
            model.save_pretrained(tmp_path)
        torch.distributed.barrier()
        model = MarianMTModel.from_pretrained(tmp_path, megatron_config=TP2)
        return len(model.get_input_embeddings().weight), model(**batch).loss.item()

    # The single-process call reads what the ranks have saved.
    results = run_ranks(on_rank, 2)
    [expected] = run_ranks(lambda: MarianMTModel.from_pretrained(tmp_path)(**batch).loss.item(), 1)
    assert results == [(150, pytest.approx(expected, rel=1e-5))] * 2
