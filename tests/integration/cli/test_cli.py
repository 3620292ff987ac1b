"""Tests of `hf-megatron`: exit codes and output, as a subprocess and in this process."""

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from hf_megatron.cli import app
from hf_megatron.models.derive import derive_spec
from hf_megatron.models.registry import REGISTRY
from hf_megatron.models.verified import read_results


def run(*arguments):
    return CliRunner().invoke(app, list(arguments))


def test_check_passes_and_records_results(stories, tmp_path):
    file = tmp_path / "results.json"
    command = ["hf-megatron", "check", str(stories), "--layout", "tp2,tp2+sp", "--record", str(file)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "2 of 2 cases equal one process" in result.stdout
    rows = read_results(file.read_text())
    assert [row["layout"] for row in rows] == ["tp", "tp+sp"] and all(row["passed"] for row in rows)
    lines = {line for part in rows[0]["parts"] for line in part.lines}
    assert rows[0]["model_type"] == "llama" and "lm_head.weight is tied to model.embed_tokens.weight" in lines


def test_check_mismatch_reports_worst_tensor(monkeypatch):
    """Seeds a plan without the q_norm and k_norm entries: the model still runs, but their gradients are wrong."""

    def drop_qk_norms_from_plan(model):
        spec = derive_spec(model)
        plan = {name: style for name, style in spec.tp.plan.items() if not name.endswith(("q_norm", "k_norm"))}
        return spec.updated(plan=plan)

    monkeypatch.setitem(REGISTRY, "qwen3", drop_qk_norms_from_plan)
    result = run("check", "qwen3", "--layout", "tp2")
    assert result.exit_code == 1, result.output
    assert "DIFFERS" in result.stdout and "_norm.weight" in result.stdout


@pytest.mark.parametrize(("words", "is_said"), [(("xlnet", "--set", '{"d_inner": 90}'), True), (("llama",), False)])
def test_check_prints_low_sharded_fraction(words, is_said):
    """A plan that shards only the head saves almost no memory, and would otherwise pass without a hint."""
    result = run("check", *words, "--layout", "tp2")
    assert result.exit_code == 0, result.output
    assert ("% of its layers' parameters split" in result.stdout) is is_said


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("llama", "--class", "LlamaForTokenClassification", "--layout", "tp2"), 0, "equal"),
        (("gemma4_text", "--set", '{"num_kv_shared_layers": 12}', "--layout", "tp2"), 0, "equal"),
        (("phimoe", "--set", '{"input_jitter_noise": 0.3}', "--layout", "tp2,tp2+sp"), 0, "2 of 2 cases"),
        (("minimax_m2", "--set", '{"router_jitter_noise": 0.3}', "--layout", "tp2,tp2+sp"), 0, "2 of 2 cases"),
        (("mixtral", "--layout", "dp4+ep2"), 0, "equal"),
        # The head's bias is tied to a second bias, which is no longer used.
        (
            ("roberta", "--set", '{"tie_word_embeddings": false}', "--layout", "pp2"),
            1,
            "has no gradient in the single-process run",
        ),
        (("roberta", "--layout", "pp2"), 0, "equal"),
        *(((kind, "--layout", "pp2"), 0, "equal") for kind in ("camembert", "bamba", "rwkv")),
        (("modernbert", "--class", "ModernBertForMaskedLM", "--layout", "pp2"), 0, "equal"),
        (("albert", "--layout", "pp2"), 1, "refused  ConfigError"),
        (("hrm_text", "--layout", "pp2"), 1, "refused  UnsupportedError"),
    ],
)
def test_tiny_models_support_checked_features(words, code, said):
    result = run("check", *words)
    assert result.exit_code == code and said in result.stdout, result.output


def test_usage_errors():
    assert run("check", "no-such-model").exit_code == 2
    assert run("check", "llama", "--layout", "rr2").exit_code == 2
    assert run("check", "llama", "--task", "poetry").exit_code == 2
    assert run("check").exit_code == 2
    result = run("check", "llama", "--layout", "tp3")
    assert result.exit_code == 1 and "heads" in result.stdout


def test_plan_needs_no_weights():
    result = run("show", "llama", "--layout", "tp4+sp")
    assert result.exit_code == 0, result.output
    rows = {line.split()[0]: line for line in result.stdout.splitlines() if line.startswith(("model.", "lm_head"))}
    assert "split dim 0" in rows["model.layers.31.self_attn.q_proj.weight"]
    assert "split dim 1" in rows["model.layers.31.mlp.down_proj.weight"]
    assert "sum over tp" in rows["model.layers.0.input_layernorm.weight"]


def test_plan_with_many_ranks_forks_no_process(monkeypatch):
    def fail_on_fork():
        raise AssertionError("a process was forked")

    monkeypatch.setattr(os, "fork", fail_on_fork)
    result = run("show", "llama", "--layout", "tp8+pp16")
    assert result.exit_code == 0, result.output
    assert "stage" in result.stdout


def test_help_imports_nothing_heavy():
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom hf_megatron.cli import app\n"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0\n"
        "assert CliRunner().invoke(app, ['env', '--help']).exit_code == 0\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_help_lists_every_format():
    from hf_megatron.conversion.formats import FORMATS

    text = run("convert", "--help").output
    assert all(format.name in text and format.alias in text for format in FORMATS.values())


def test_invalid_paths_and_values_are_usage_errors(tmp_path):
    for words, message in (
        (("check", "llama", "--record", str(tmp_path / "no" / "verified.json")), "is not a folder"),
        (("check", "llama", "--device", "tpu"), "expected cpu or cuda"),
        (("check", "llama", "--timeout", "0"), "--timeout"),
        (("timeline", "llama", "--layers", "1", "--output", str(tmp_path / "out")), "layers = 1: expected 2"),
        (("merge", str(tmp_path), str(tmp_path / "out"), "--max-shard-size", "-5GB"), "max_shard_size='-5GB'"),
        (("convert", str(tmp_path), str(tmp_path / "out"), "--to", "hf", "--max-shard-size", "abc"), "'abc'"),
        (("pull", "a/b", str(tmp_path / "out"), "--config", str(tmp_path / "no.yaml")), "no.yaml: cannot be read"),
    ):
        result = run(*words)
        assert result.exit_code == 2 and message in result.output, (words, result.output)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads is 0: expected 1 or more"),
        ({"hidden_size": None}, "no readable config: "),
        ({"hidden_act": "nope"}, "the model cannot be built from its config: KeyError"),
        ({"vocab_size": 2, "pad_token_id": 7}, "the model cannot be built from its config: AssertionError"),
    ],
)
def test_plan_reports_invalid_config_in_one_line(stories, tmp_path, changes, said):
    config = json.loads((stories / "config.json").read_text("utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | changes), "utf-8")
    result = run("show", str(tmp_path))
    assert result.exit_code == 2 and said in result.output and len(result.output.splitlines()) == 1


def test_plan_resolves_t5_and_rejects_missing_folder():
    assert "decoder.final_layer_norm" in run("show", "t5", "--layout", "tp2").output
    result = run("show", "./nothing/here")
    assert result.exit_code == 2 and "the folder does not exist" in result.output


def test_check_rejects_tp_above_tiny_model_heads():
    result = run("check", "llama", "--layout", "tp8")
    assert result.exit_code == 2 and "tp_size = 8: tiny models have 4 attention heads" in result.output


def test_check_on_cuda_requires_gpu(monkeypatch):
    words = "check", "llama", "--layout", "tp2", "--device", "cuda"
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "no GPU" in run(*words).output
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert "recorded on CPU ranks only" in run(*words, "--record", "verified.json").output
