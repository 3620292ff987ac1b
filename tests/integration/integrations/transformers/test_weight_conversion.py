"""Tests of checkpoints whose layout differs from memory: read in full, converted, then sharded, and saved back."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.core.layouts import parse_layouts
from hf_megatron.models.verification_gate import ConfigUnderTest
from tests.helpers.shared_tiny_models import make_tiny_model

TASKS = {
    # Experts are `[expert, in, out]` in older files, `[expert, out, in]` in newer ones and in memory.
    "qwen3_vl_moe": "image",
    # One fused projection in files, several in memory.
    "hrm_text": "causal",
    "nomic_bert": "masked",
    # Rows of gate and up are interleaved in files.
    "inkling2_text": "causal",
    # Gate and up weights (stacked over experts) are separate in files and concatenated in memory.
    "step3p7": "image",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Maps names to checkpoints: model class, source folder, and the weights that a single process saves."""
    return {
        **{name: _save_with_single_process(name, tmp_path_factory.mktemp(name)) for name in TASKS},
        "transposed": _save_with_single_process(
            "qwen3_vl_moe", tmp_path_factory.mktemp("transposed"), _transpose_experts
        ),
    }


def _save_with_single_process(model_type, folder, change=None):
    tiny_model = make_tiny_model(CONFIG_MAPPING[model_type](), task=TASKS[model_type])
    cls, source = tiny_model.model_class, folder / "source"
    cls.from_pretrained(tiny_model.directory).save_pretrained(source)
    if change is not None:
        weights = load_file(source / "model.safetensors")
        change(weights)
        save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    cls.from_pretrained(source).save_pretrained(folder / "whole")
    return cls, source, load_file(folder / "whole" / "model.safetensors")


def _transpose_experts(weights):
    names = [name for name in weights if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    assert names
    for name in names:
        assert weights[name].shape[1] != weights[name].shape[2]
        weights[name] = weights[name].transpose(1, 2).contiguous()


def _save(cls, source, target, config):
    cls.from_pretrained(source, megatron_config=ConfigUnderTest(**config.to_dict())).save_pretrained(target)


def matches_single_process_save(found, target, text):
    cls, source, unsharded = found
    [config] = parse_layouts(text)
    run_ranks(_save, config.ranks_per_replica * (config.dp_size or 1), cls, source, target, config)
    saved = load_file(target / "model.safetensors")
    return saved.keys() == unsharded.keys() and all(torch.equal(saved[name], unsharded[name]) for name in unsharded)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("transposed", "tp2"),
        ("transposed", "dp2+ep2"),
        ("transposed", "tp2+dp2+zero3"),
        ("qwen3_vl_moe", "tp2"),
        ("hrm_text", "tp2"),
        ("hrm_text", "tp4"),
        ("nomic_bert", "tp2"),
        ("inkling2_text", "tp2"),
        ("inkling2_text", "dp2+ep2"),
        ("step3p7", "tp2"),
    ],
)
def test_saved_files_match_single_process(files, tmp_path, name, text):
    assert matches_single_process_save(files[name], tmp_path, text)


def test_sharding_before_conversion_is_detected(files, tmp_path, monkeypatch):
    monkeypatch.setattr("hf_megatron.integrations.transformers.loading.expose_full_tensors", lambda model, state: None)
    assert not matches_single_process_save(files["hrm_text"], tmp_path, "tp2")
