"""Tests of `hf-megatron new-family`: its skeletons are valid, and right for models with plain layers."""

import pytest
from transformers import CONFIG_MAPPING
from typer.testing import CliRunner

from hf_megatron.cli import app
from hf_megatron.core.layouts import parse_layout
from hf_megatron.models.registry import REGISTRY, load_families, registered_spec
from hf_megatron.testing import new_family
from hf_megatron.testing.parity import check_tiny_model, make_tiny_model
from hf_megatron.testing.resolve_model import build_on_meta


def load_skeleton(source, model_type):
    """Runs a skeleton as a file of `models/families`, and returns the registered function."""
    names = {"__package__": "hf_megatron.models.families", "__name__": "hf_megatron.models.families.skeleton"}
    exec(compile(source, "skeleton.py", "exec"), names)
    return names[model_type]


@pytest.mark.parametrize("model_type", ["opt", "gptj"])
def test_full_skeleton_equals_the_family_file(model_type, monkeypatch):
    load_families()
    model = build_on_meta(model_type, CONFIG_MAPPING[model_type]())
    spec = registered_spec(model)
    monkeypatch.delitem(REGISTRY, model_type)
    builder = load_skeleton(new_family._write_full_plan(model, model_type), model_type)
    skeleton_spec = builder(model)
    assert skeleton_spec.tp.plan == spec.tp.plan
    assert skeleton_spec.tp.regions == spec.tp.regions


def test_full_skeleton_trains_like_one_process(monkeypatch):
    load_families()
    model = build_on_meta("opt", CONFIG_MAPPING["opt"]())
    monkeypatch.delitem(REGISTRY, "opt")
    load_skeleton(new_family._write_full_plan(model, "opt"), "opt")
    comparison = check_tiny_model(make_tiny_model(CONFIG_MAPPING["opt"]()), parse_layout("tp2"))
    assert comparison.passed, comparison.report()


def test_skeleton_of_a_known_structure_lists_its_plan(monkeypatch):
    source = new_family.make_family_skeleton(CONFIG_MAPPING["llama"]())
    assert "# model.layers.*.mlp.down_proj: rowwise" in source
    load_families()
    monkeypatch.setitem(REGISTRY, "llama", None)
    monkeypatch.delitem(REGISTRY, "llama")
    builder = load_skeleton(source, "llama")
    model = build_on_meta("llama", CONFIG_MAPPING["llama"]())
    assert builder(model).tp.plan["model.layers.*.mlp.down_proj"] == "rowwise"


def test_skeleton_of_a_type_with_classifiers_alone():
    source = new_family.make_family_skeleton(CONFIG_MAPPING["lilt"]())
    assert "# lilt.encoder.layer.*.output.dense: rowwise" in source


def test_registered_type_is_rejected():
    result = CliRunner().invoke(app, ["new-family", "opt"])
    assert result.exit_code == 2 and "registered in hf_megatron/models/families/opt.py" in result.output
