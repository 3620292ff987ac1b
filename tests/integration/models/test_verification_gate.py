"""Tests of the verification gate, which rejects combinations never compared with a single process."""

import json
import random
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaModel, LlamaPreTrainedModel

from hf_megatron import MegatronConfig, UnsupportedError, UnverifiedLayoutError
from hf_megatron.core.fork_harness import run_ranks
from hf_megatron.models import verified
from hf_megatron.testing.measure import _on_all_ranks
from hf_megatron.testing.parity import check_tiny_model
from hf_megatron.testing.tiny_config import tiny_config
from tests.helpers import flips
from tests.helpers.shared_tiny_models import make_tiny_model

TP2, TP2_SP, PP2 = (
    MegatronConfig(tp_size=2),
    MegatronConfig(tp_size=2, sequence_parallel=True),
    MegatronConfig(pp_size=2),
)


def make_model(model_type, layout, changes, auto=AutoModelForCausalLM):
    config = tiny_config(CONFIG_MAPPING[model_type]())
    for name, value in changes.items():
        setattr(config, name, value)
    return auto.from_config(config, megatron_config=layout)


def build_model(model_type, layout, **changes):
    make_model(model_type, layout, changes)
    return True


def get_gate_error(model_type, layout, **changes):
    with pytest.raises(UnverifiedLayoutError) as error:
        make_model(model_type, replace(layout, unverified="raise"), changes)
    return str(error.value)


@pytest.mark.parametrize("layout", [TP2, TP2_SP, PP2], ids=MegatronConfig.layout)
def test_tied_gpt_neox_matches_single_process(layout):
    """Regression of 0.1.0: loss 6.526 instead of 5.056 with tensor parallelism, and a reinitialized head."""
    config = CONFIG_MAPPING["gpt_neox"](
        tie_word_embeddings=True, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, vocab_size=130
    )
    tiny_model = make_tiny_model(config, microbatches=2)
    comparison = check_tiny_model(tiny_model, layout)
    assert comparison.passed, comparison.report()


@pytest.mark.parametrize("layout", [TP2, TP2_SP, PP2], ids=MegatronConfig.layout)
@pytest.mark.parametrize("model_type", ["llama", "gpt_neox"])
def test_verified_combinations_pass(model_type, layout):
    for changes in ({}, {"tie_word_embeddings": True}, {"attention_dropout": 0.1}):
        assert all(run_ranks(build_model, 2, model_type, layout, **changes))


def test_new_combination_error_names_check_command():
    [message, _] = run_ranks(get_gate_error, 2, "qwen3", TP2, num_key_value_heads=1, attention_bias=True)
    assert "linears in copies: self_attn.k_proj: Linear(weight, bias) colwise; compared was Linear(weight)" in message
    assert (
        "hf-megatron check qwen3 --class Qwen3ForCausalLM --layout tp4 --set" in message
        and '"attention_bias": true' in message
    )


@pytest.fixture
def no_jitter_compared(monkeypatch):
    rows = [row | ({"draws": []} if row["model_type"] == "minimax" else {}) for row in verified.records()]
    monkeypatch.setattr(verified, "records", lambda: rows)


def test_unverified_rng_module_is_named(no_jitter_compared):
    [message, _] = run_ranks(get_gate_error, 2, "minimax", TP2, router_jitter_noise=0.3)
    assert "random numbers drawn at model.layers.*.mlp" in message


def test_failed_size_raises_although_another_passed(monkeypatch):
    """The failed record has the same kind of layout and the requested number of ranks."""
    rows = verified.records()
    four = [row for row in rows if row["class"] == "LlamaForCausalLM" and row.get("cp_size") == 4]
    bad = {"passed": False, "worst": "loss: 2 x the limit"}
    changed = tuple(row | bad if row in four and row["layout"] == "cp" else row for row in rows)
    monkeypatch.setattr(verified, "records", lambda: changed)
    text = run_ranks(get_gate_error, 4, "llama", MegatronConfig(cp_size=4, cp_comm_type="p2p"))[0]
    assert "cp: the parity check failed on the same number of ranks (loss: 2 x the limit)" in text
    assert all(run_ranks(build_model, 2, "llama", MegatronConfig(cp_size=2, cp_comm_type="p2p")))


def test_unsupported_error_precedes_gate():
    def on_rank():
        with pytest.raises(UnsupportedError, match="must have exactly one list of"):
            make_model("blt", PP2, {})

    run_ranks(on_rank, 2)


def test_unverified_layout_is_allowed_with_a_warning():
    def on_rank():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            layout = MegatronConfig(tp_size=2, unverified="allow")
            make_model("qwen3", layout, {"num_key_value_heads": 1, "attention_bias": True})
        return [str(warning.message) for warning in caught if "loaded without a comparison" in str(warning.message)]

    [first, second] = run_ranks(on_rank, 2)
    assert len(first) == 1 and "linears in copies" in first[0] and not second


def test_recorded_failure_raises_without_another_check(monkeypatch):
    rows = tuple(
        row | ({"passed": False, "worst": "loss: 2 x the limit"} if row["class"] == "LlamaForCausalLM" else {})
        for row in verified.records()
    )
    monkeypatch.setattr(verified, "records", lambda: rows)

    def on_rank():
        with pytest.raises(UnverifiedLayoutError, match="loss: 2 x the limit") as error:
            make_model("llama", TP2, {})
        return str(error.value)

    assert all('unverified="allow"' in message for message in run_ranks(on_rank, 2))


class Scores(LlamaPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.model, self.score = LlamaModel(config), nn.Linear(config.hidden_size, 1)
        self.post_init()

    def forward(self, input_ids):
        return self.score(self.model(input_ids)[0])


@pytest.mark.parametrize("unverified", ["check", "raise"])
def test_class_without_loss_raises_before_check(unverified):
    def on_rank():
        config, layout = tiny_config(CONFIG_MAPPING["llama"]()), MegatronConfig(tp_size=2, unverified=unverified)
        with pytest.raises(UnsupportedError, match="Scores computes no loss.*AutoModelForCausalLM"):
            Scores._from_config(config, megatron_config=layout)

    run_ranks(on_rank, 2)


@pytest.mark.parametrize("layout", [TP2, TP2_SP, PP2], ids=MegatronConfig.layout)
def test_base_model_is_verified_with_its_head_model(layout):
    def on_rank():
        make_model("llama", layout, {}, AutoModel)
        make_model("gpt2", layout, {}, AutoModel)

    run_ranks(on_rank, 2)


def test_new_base_model_error_names_check_command():
    def on_rank():
        with pytest.raises(UnverifiedLayoutError) as error:
            layout = replace(TP2, unverified="raise")
            make_model("qwen3", layout, {"num_key_value_heads": 1, "attention_bias": True}, AutoModel)
        return str(error.value)

    for message in run_ranks(on_rank, 2):
        assert (
            "linears in copies: self_attn.k_proj: Linear(weight, bias) colwise; compared was Linear(weight)" in message
        )
        assert "hf-megatron check qwen3 --class Qwen3Model --layout tp4 --set" in message


def test_small_sharded_fraction_warns():
    def on_rank():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            make_model("doge", TP2, {})
        return [str(warning.message) for warning in caught if "tp_size = 2 shards only" in str(warning.message)]

    [first, second] = run_ranks(on_rank, 2)
    assert len(first) == 1 and "of the parameters in the layers of DogeForCausalLM" in first[0] and not second


def test_gradient_missing_on_one_rank_is_nan():
    def on_rank():
        rank = torch.distributed.get_rank()
        parameters = {"both": torch.nn.Parameter(torch.ones(2)), "none": torch.nn.Parameter(torch.ones(2))}
        gradients = _on_all_ranks({"both": None if rank else torch.ones(2), "none": None}, parameters)
        return gradients["both"].isnan().all().item(), gradients["none"] is None

    assert run_ranks(on_rank, 2) == [(False, True), (True, True)]


RECORDED = json.loads(flips.FILE.read_text("utf-8"))


def test_records_cover_every_field():
    assert RECORDED.keys() == set(flips.TYPES) and len(RECORDED) == 10
    for model_type, results in RECORDED.items():
        assert sorted(results) == flips.list_config_fields(model_type)
        assert {result["judgment"] for result in results.values()} <= {
            "equal",
            "new",
            "cannot be built",
            "cannot be split",
        }
    judgments = [result["judgment"] for results in RECORDED.values() for result in results.values()]
    assert judgments.count("equal") >= 100 and judgments.count("new") >= 5


@pytest.mark.parametrize("model_type", flips.TYPES)
def test_gate_matches_recorded_flips(model_type):
    different = {}
    for field, before in RECORDED[model_type].items():
        judgment = flips.flip_field(model_type, field, compares=False)["judgment"]
        # Some models fail only when they run.
        allowed = ("equal", "cannot be built") if judgment == "let through" else (judgment,)
        if before["judgment"] not in allowed:
            different[field] = judgment, before["judgment"]
    assert different == {}


@pytest.mark.parametrize("model_type", flips.TYPES)
def test_sampled_flips_match_records(model_type):
    compared = [field for field, result in RECORDED[model_type].items() if result["judgment"] == "equal"]
    field = random.Random(model_type).choice(sorted(compared))
    outcome = flips.flip_field(model_type, field)
    assert outcome["judgment"] == RECORDED[model_type][field]["judgment"], f"{model_type} {field}: {outcome}"
