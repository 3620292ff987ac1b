"""Tests of saving a parallelized model whose class is remote code or a script's own: its code and names are kept."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.core.layouts import parse_layouts
from hf_megatron.data_parallel import fsdp

REMOTE_CODE = """
from transformers import LlamaForCausalLM

from .blocks import scale


class ScaledLlama(LlamaForCausalLM):
    def get_scale(self):
        return scale
"""


@pytest.fixture
def remote_source(tmp_path, monkeypatch):
    """A checkpoint with code of its own, which imports another file of its folder."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "remote_scaled"
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_attention_heads=4, num_hidden_layers=2, vocab_size=64
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "modeling_scaled.py").write_text(REMOTE_CODE)
    (folder / "blocks.py").write_text("scale = 2.0\n")
    fields = json.loads((folder / "config.json").read_text())
    fields |= {
        "architectures": ["ScaledLlama"],
        "auto_map": {"AutoModelForCausalLM": "modeling_scaled.ScaledLlama"},
    }
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def save_remote(source, target, config=None, sabotage=None):
    if sabotage is not None:
        sabotage()
    options = {} if config is None else {"megatron_config": config}
    model = AutoModelForCausalLM.from_pretrained(source, trust_remote_code=True, **options)
    assert type(model).__name__ == "ScaledLlama" or config is not None
    model.save_pretrained(target)


def read_saved(folder):
    """Returns the names of a folder's files and the contents of its code and config."""
    texts = {path.name: path.read_text() for path in folder.iterdir() if path.suffix in (".py", ".json")}
    # This library also writes a model card.
    return sorted({*os.listdir(folder)} - {"README.md"}), texts


@pytest.mark.parametrize("text", ["dp2", "dp2+zero3"])
def test_remote_code_is_saved(remote_source, tmp_path, text):
    """FSDP2 puts a class of torch in front of the model's, whose source file is not the model's code."""
    save_remote(remote_source, tmp_path / "expected")
    [config] = parse_layouts(text)
    run_ranks(save_remote, 2, remote_source, tmp_path / "saved", config)
    assert read_saved(tmp_path / "saved") == read_saved(tmp_path / "expected")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", trust_remote_code=True)
    assert (type(again).__name__, again.get_scale()) == ("ScaledLlama", 2.0)
    saved, original = (load_file(folder / "model.safetensors") for folder in (tmp_path / "saved", remote_source))
    assert all(torch.equal(saved[name], original[name]) for name in original)


def keep_name_of_fsdp_class():
    fsdp.keep_class_name = lambda model: None


def test_code_of_fsdp_is_detected(remote_source, tmp_path):
    [config] = parse_layouts("dp2+zero3")
    save_remote(remote_source, tmp_path / "expected")
    run_ranks(save_remote, 2, remote_source, tmp_path / "saved", config, keep_name_of_fsdp_class)
    assert read_saved(tmp_path / "saved") != read_saved(tmp_path / "expected")


class OwnLlama(LlamaForCausalLM):
    """A class of a script, which is not registered for an auto class."""


def test_own_class_is_saved_by_its_name(stories, tmp_path):
    [config] = parse_layouts("dp2+zero3")
    run_ranks(lambda: OwnLlama.from_pretrained(stories, megatron_config=config).save_pretrained(tmp_path), 2)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["OwnLlama"]
    assert not list(tmp_path.glob("*.py"))
    assert OwnLlama.from_pretrained(tmp_path).num_parameters() == 260_032
