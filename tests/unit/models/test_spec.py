"""Tests of ModelSpec fields: set by name and stored in one sub-record per parallel axis."""

from dataclasses import fields

import pytest

from hf_megatron import ModelSpec
from hf_megatron.errors import PlanError

RECORDS = ("tp", "sp", "pp", "cp", "moe")


def test_field_names_belong_to_one_sub_record():
    spec = ModelSpec("llama")
    assert [member.name for member in fields(spec)] == ["model_type", *RECORDS]
    names = [member.name for record in RECORDS for member in fields(getattr(spec, record))]
    assert len(names) == len(set(names))
    for record in RECORDS:
        for member in fields(getattr(spec, record)):
            assert spec.get_field(member.name) == getattr(getattr(spec, record), member.name)


def test_fields_are_set_by_name():
    spec = ModelSpec.from_fields("llama", plan={"lm_head": "colwise"}, layers="model.layers", sequence_dim=0)
    assert spec.model_type == "llama" and spec.tp.plan == {"lm_head": "colwise"}
    assert spec.pp.layers == "model.layers" and spec.sp.sequence_dim == 0 and not spec.cp.sequence_dims
    changed = spec.updated(model_type="qwen3", layers=None, experts={"mlp": "num_experts"})
    assert changed.model_type == "qwen3" and changed.pp.layers is None
    assert changed.moe.experts == {"mlp": "num_experts"} and changed.tp == spec.tp
    assert spec.pp.layers == "model.layers" and not spec.moe.experts


@pytest.mark.parametrize(
    "use",
    [
        lambda spec: ModelSpec.from_fields("llama", token_dim=0),
        lambda spec: spec.updated(token_dim=0),
        lambda spec: spec.get_field("token_dim"),
    ],
)
def test_unknown_field_error_lists_valid_names(use):
    with pytest.raises(PlanError, match=r"no field 'token_dim'.*\bsequence_dim\b"):
        use(ModelSpec("llama"))
