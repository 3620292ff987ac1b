"""Tests of rejected pre-Megatron-Core checkpoints: damaged, unknown, or from another model."""

import re
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hf_megatron.conversion import convert
from hf_megatron.errors import CheckpointError
from tests.helpers.megatron_pre_core import (
    extract_bert_weights,
    extract_gpt2_weights,
    extract_llama_weights,
    write_checkpoint,
)
from tests.helpers.tiny_models import build_tiny_model

LAYER = "layers.1.attention.query_key_value.weight"


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory) -> tuple[Path, object]:
    folder, model = tmp_path_factory.mktemp("gpt2") / "hf", build_tiny_model("gpt2")
    model.save_pretrained(folder)
    return folder, model


def change(path: Path, edit: Callable[[dict], object]) -> None:
    content = torch.load(path, weights_only=False)
    edit(content)
    torch.save(content, path)


def get_error(source: Path, config: Path) -> str:
    """Returns the conversion's error: one line with the checkpoint's path, and no output folder."""
    target = source.with_name("out")
    with pytest.raises(CheckpointError) as caught:
        convert(source, target, "hf", config=str(config))
    assert not target.exists()
    text = str(caught.value)
    assert "\n" not in text and str(source) in text
    return text


def layers(content: dict) -> dict:
    return content["model"]["language_model"]["transformer"]


def nest_in_itself(content: dict) -> None:
    content["model"]["language_model"]["embedding"]["more"] = content["model"]["language_model"]


def duplicate_tensor(content: dict) -> None:
    layers(content)["layers.1.self_attention.query_key_value.weight"] = layers(content)[LAYER]


DAMAGED = {
    "a tensor is missing": (lambda content: layers(content).pop(LAYER), r"does not fit .*h\.1\.attn\.c_attn\.weight"),
    "embeddings are missing": (
        lambda content: content["model"]["language_model"].pop("embedding"),
        r"does not fit .*transformer\.wte\.weight",
    ),
    "a layer is missing": (
        lambda content: [layers(content).pop(name) for name in list(layers(content)) if "layers.1." in name],
        "num_layers is 1, but 2 in the model",
    ),
    "an unknown tensor": (
        lambda content: layers(content).update({"layers.0.inter_attention.query.weight": torch.zeros(1)}),
        r"transformer\.layers\.0\.inter_attention\.query\.weight is not a supported tensor of a GPT or BERT",
    ),
    "an unknown model": (
        lambda content: content["model"].update(classification_head={"weight": torch.zeros(2, 2)}),
        r"classification_head\.weight is not a supported tensor",
    ),
    "a decoder beside it": (
        lambda content: content["model"]["language_model"].update(decoder={"layers.0.x": torch.zeros(1)}),
        r"language_model\.decoder\.layers\.0\.x is not a supported tensor",
    ),
    "one tensor under two names": (duplicate_tensor, "linear_qkv.weight twice"),
    "no tensor": (lambda content: layers(content).update({LAYER: "text"}), "linear_qkv.weight is not a tensor"),
    "deeper tables": (
        lambda content: content["model"]["language_model"]["embedding"]["word_embeddings"].update(more={"weight": {}}),
        r"word_embeddings\.more is not a supported tensor",
    ),
    "a table that holds itself": (nest_in_itself, "repeats shared objects"),
    "a number as a name": (lambda content: layers(content).update({5: torch.zeros(1)}), "not a dict with string keys"),
    "rows that do not divide": (
        lambda content: layers(content).update({LAYER: layers(content)[LAYER][:-1].clone()}),
        "191 rows of query, key and value on 1 ranks do not match 4 heads",
    ),
    "version 1.5": (lambda content: content.update(checkpoint_version=1.5), "checkpoint_version is 1.5, expected 0"),
    "version 4.0": (lambda content: content.update(checkpoint_version=4.0), "checkpoint_version is 4.0, expected 0"),
    "version -1": (lambda content: content.update(checkpoint_version=-1), "checkpoint_version is -1, expected 0"),
    "no number": (
        lambda content: content.update(checkpoint_version="2.0"),
        "checkpoint_version or iteration has an invalid type",
    ),
    "a truth value": (
        lambda content: content.update(checkpoint_version=True),
        "checkpoint_version or iteration has an invalid type",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damage_is_reported(gpt2, tmp_path, case):
    folder, model = gpt2
    edit, message = DAMAGED[case]
    source = write_checkpoint(tmp_path / "megatron", extract_gpt2_weights(model), "2020", 0)
    change(next(source.rglob("*.pt")), edit)
    assert re.search(message, get_error(source, folder))


ARGUMENTS = {
    "heads": ({"num_attention_heads": 8}, "num_attention_heads is 8, but 4 in the config"),
    "norms": ({"layernorm_epsilon": 1e-6}, "norm_epsilon is 1e-06, but 1e-05 in the config"),
    "ranks": ({"model_parallel_size": 2}, "mp_rank_01 is missing"),
    "residual": (
        {"apply_residual_connection_post_layernorm": True},
        "apply_residual_connection_post_layernorm is True",
    ),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_arguments_must_match_config(gpt2, tmp_path, case):
    folder, model = gpt2
    args, message = ARGUMENTS[case]
    same = {"num_layers": 2, "num_attention_heads": 4, "layernorm_epsilon": 1e-5, "model_parallel_size": 1}
    source = write_checkpoint(tmp_path / "megatron", extract_gpt2_weights(model), "2020", 1.0, args={**same, **args})
    assert message in get_error(source, folder)
    source = write_checkpoint(
        tmp_path / "same", extract_gpt2_weights(model), "2020", 1.0, args={"kv_channels": None, **same}
    )
    convert(source, tmp_path / "hf", "hf", config=str(folder))


def test_mixed_rank_versions_are_rejected(gpt2, tmp_path):
    folder, model = gpt2
    source = write_checkpoint(tmp_path / "megatron", extract_gpt2_weights(model), "2020", 2.0, tp=2)
    change(sorted(source.rglob("*.pt"))[1], lambda content: content.update(checkpoint_version=1.0))
    assert "checkpoint_version is 1.0, but another rank has 2.0" in get_error(source, folder)


def test_old_versions_reject_grouped_queries(tmp_path):
    """Grouped-query attention was added long after version 2.0."""
    model = build_tiny_model("llama")
    model.save_pretrained(tmp_path / "hf")
    source = write_checkpoint(tmp_path / "megatron", extract_llama_weights(model), "2023", 3.0)
    change(next(source.rglob("*.pt")), lambda content: content.update(checkpoint_version=1.0))
    assert "4 heads and 2 groups in checkpoint_version 1.0" in get_error(source, tmp_path / "hf")


def test_other_model_type_is_rejected(gpt2, tmp_path):
    folder, _ = gpt2
    source = write_checkpoint(tmp_path / "megatron", extract_bert_weights(build_tiny_model("megatron_bert")), "2020", 0)
    error = get_error(source, folder)
    assert "have no counterpart in GPT2LMHeadModel" in error and "Check that the config belongs to this" in error
    build_tiny_model("megatron_bert").save_pretrained(tmp_path / "bert")
    assert convert(source, tmp_path / "hf", "hf", config=str(tmp_path / "bert"), verify=True).comparison.equal


def test_too_small_vocabulary_is_rejected(gpt2, tmp_path):
    folder, model = gpt2
    parts = extract_gpt2_weights(model)
    parts.embeddings["word"] = parts.embeddings["word"][:128].clone()
    source = write_checkpoint(tmp_path / "megatron", parts, "2020", 0, rows=128)
    assert "(128, 64)" in get_error(source, folder)


def test_old_loss_scalers_are_ignored(gpt2, tmp_path, monkeypatch):
    """Their module, `fp16.loss_scaler`, is not part of Megatron's package and is never imported."""
    folder, model = gpt2
    module = types.ModuleType("fp16.loss_scaler")
    scaler = type("DynamicLossScaler", (), {"__module__": "fp16.loss_scaler"})
    module.DynamicLossScaler = scaler
    source = write_checkpoint(tmp_path / "megatron", extract_gpt2_weights(model), "2020", 0)
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "fp16", types.ModuleType("fp16"))
        patched.setitem(sys.modules, "fp16.loss_scaler", module)
        change(
            next(source.rglob("*.pt")),
            lambda content: content.update(optimizer={"loss_scaler": scaler()}, total_iters=5, args=None),
        )
    convert(source, tmp_path / "out", "hf", config=str(folder))
