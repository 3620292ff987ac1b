"""Tests of adapters that transformers loads: `load_adapter`, folders in `from_pretrained` and `pipeline`."""

import shutil

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, pipeline

from hf_megatron import UnsupportedError
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.integrations.peft import loading
from tests.helpers.training import make_batch, parse_layout, shard_batch

LAYOUTS = ["tp2", "tp2+sp", "pp2", "dp2", "dp2+zero3"]


@pytest.fixture(scope="module")
def adapter(stories, tmp_path_factory):
    """Returns the folder of an adapter, saved by plain PEFT, that changes the model's outputs."""
    folder = tmp_path_factory.mktemp("adapter")
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(stories), config).save_pretrained(folder)
    return folder


def parse(text):
    return {} if text is None else {"megatron_config": parse_layout(text)}


def train(model):
    """Returns the loss and the total norm of the adapter's gradients."""
    loss = model.train()(**shard_batch(model, make_batch(0))).loss
    loss.backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert trained
    return loss.item(), float(torch.nn.utils.clip_grad_norm_(trained, 1e9))


def load_into(path, folder, text):
    model = AutoModelForCausalLM.from_pretrained(path, **parse(text))
    model.load_adapter(str(folder), is_trainable=True)
    return model


def load_folder(cls, folder, text):
    model = cls.from_pretrained(folder, **parse(text))
    assert not any(p.requires_grad for name, p in model.named_parameters() if "lora_" in name)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return model


def assert_equal(stories, adapter, text, load):
    [expected] = run_ranks(lambda: train(load(None)), 1)
    results = run_ranks(lambda: train(load(text)), 2)
    for result in results:
        assert result == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("text", LAYOUTS)
def test_adapters_are_loaded_into_a_model(stories, adapter, text):
    assert_equal(stories, adapter, text, lambda text: load_into(stories, adapter, text))


def add_to(path, text):
    model = AutoModelForCausalLM.from_pretrained(path, **parse(text))
    torch.manual_seed(1)
    model.add_adapter(LoraConfig(r=3, target_modules=["q_proj", "down_proj"], init_lora_weights=False), "new")
    return model


@pytest.mark.parametrize("text", LAYOUTS)
def test_adapters_are_added_to_a_model(stories, tmp_path, text):
    def on_rank(text):
        model = add_to(stories, text)
        counts = [model.num_parameters(exclude_embeddings=excluded) for excluded in (False, True)]
        result = (*train(model), *counts)
        model.save_pretrained(tmp_path / str(text))
        return result

    [expected] = run_ranks(on_rank, 1, None)
    assert run_ranks(on_rank, 2, text) == [pytest.approx(expected, rel=1e-4)] * 2
    saved, right = (load_file(tmp_path / name / "adapter_model.safetensors") for name in (text, "None"))
    assert saved.keys() == right.keys() and all(torch.equal(saved[name], right[name]) for name in right)


def test_a_rejected_adapter_is_not_added(stories):
    def on_rank():
        model = AutoModelForCausalLM.from_pretrained(stories, **parse("tp2"))
        with pytest.raises(UnsupportedError, match="adapter on lm_head"):
            model.add_adapter(LoraConfig(target_modules=["lm_head"]))
        assert not model._hf_peft_config_loaded
        return train(model)

    [expected] = run_ranks(lambda: train(AutoModelForCausalLM.from_pretrained(stories)), 1)
    assert run_ranks(on_rank, 2) == [pytest.approx(expected, rel=1e-4)] * 2


@pytest.mark.parametrize("text", ["tp2", "pp2", "dp2+zero3"])
@pytest.mark.parametrize("cls", [AutoModelForCausalLM, LlamaForCausalLM])
def test_a_folder_with_a_model_and_an_adapter(stories, adapter, tmp_path, text, cls):
    LlamaForCausalLM.from_pretrained(stories).save_pretrained(tmp_path)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(adapter / name, tmp_path)
    assert_equal(stories, adapter, text, lambda text: load_folder(cls, tmp_path, text))


@pytest.mark.parametrize("text", ["tp2", "pp2"])
@pytest.mark.parametrize("cls", [AutoModelForCausalLM, LlamaForCausalLM])
def test_folders_of_adapters_are_loaded(stories, adapter, text, cls):
    assert_equal(stories, adapter, text, lambda text: load_folder(cls, adapter, text))


def test_adapters_that_are_not_loaded_are_detected(stories, adapter, monkeypatch):
    monkeypatch.setattr(loading, "_WRAPPED", "base_model.")
    with pytest.raises(AssertionError):
        assert_equal(stories, adapter, "tp2", lambda text: load_into(stories, adapter, text))


@pytest.mark.parametrize("saves_alone", [False, True])
@pytest.mark.parametrize("text", ["tp2", "pp2"])
def test_loaded_adapters_are_saved(stories, adapter, tmp_path, text, saves_alone):
    def on_rank():
        model = load_into(stories, adapter, text)
        if not saves_alone:
            model.save_pretrained(tmp_path)
        state_dict = Accelerator(cpu=True).get_state_dict(model) if saves_alone else None
        if saves_alone and dist.get_rank() == 0:
            model.save_pretrained(tmp_path, state_dict=state_dict)

    run_ranks(on_rank, 2)
    saved, expected = (load_file(folder / "adapter_model.safetensors") for folder in (tmp_path, adapter))
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], weight) for name, weight in expected.items())
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(stories), tmp_path)
    assert train(model.base_model.model.requires_grad_(True))[0] == pytest.approx(
        run_ranks(lambda: train(load_into(stories, adapter, None)), 1)[0][0], rel=1e-5
    )


def test_pipelines_generate_with_the_adapter(stories, adapter):
    def on_rank(text):
        tokenizer = AutoTokenizer.from_pretrained(stories)
        generate = pipeline("text-generation", str(adapter), tokenizer=tokenizer, model_kwargs=parse(text), device=None)
        return generate("Once upon a time", max_new_tokens=8, do_sample=False)[0]["generated_text"]

    [expected] = run_ranks(on_rank, 1, None)
    assert run_ranks(on_rank, 2, "tp2") == [expected] * 2


def test_adapters_are_not_swapped_in_place(stories, adapter):
    def on_rank():
        model = load_into(stories, adapter, "tp2")
        with pytest.raises(
            UnsupportedError, match=r"Load the adapter under another name, and select it with set_adapter"
        ):
            model.load_adapter(str(adapter), hotswap=True)
        model.load_adapter(str(adapter), adapter_name="second", is_trainable=True)
        model.set_adapter("second")
        return train(model)

    [expected] = run_ranks(lambda: train(load_into(stories, adapter, None)), 1)
    assert run_ranks(on_rank, 2) == [pytest.approx(expected, rel=1e-4)] * 2
