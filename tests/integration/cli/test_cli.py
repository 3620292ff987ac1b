"""`hf-megatron`: exit codes and output, of the command itself and in this process."""

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


def test_check_equal_and_recorded(stories, tmp_path):
    file = tmp_path / "results.json"
    command = ["hf-megatron", "check", str(stories), "--layout", "tp2,tp2+sp", "--record", str(file)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "2 of 2 cases equal one process" in result.stdout
    rows = read_results(file.read_text())
    assert [row["layout"] for row in rows] == ["tp", "tp+sp"] and all(row["passed"] for row in rows)
    lines = {line for part in rows[0]["parts"] for line in part.lines}
    assert rows[0]["model_type"] == "llama" and "lm_head.weight is tied to model.embed_tokens.weight" in lines


def test_check_mismatch_names_the_worst_tensor(monkeypatch):
    """A plan that splits what must stay whole: the model still runs, the gradient is wrong."""

    def broken(model):
        spec = derive_spec(model)
        plan = {name: style for name, style in spec.tp.plan.items() if not name.endswith(("q_norm", "k_norm"))}
        return spec.updated(plan=plan)

    monkeypatch.setitem(REGISTRY, "qwen3", broken)
    result = run("check", "qwen3", "--layout", "tp2")
    assert result.exit_code == 1, result.output
    assert "DIFFERS" in result.stdout and "_norm.weight" in result.stdout


@pytest.mark.parametrize(("words", "is_said"), [(("xlnet", "--set", '{"d_inner": 90}'), True), (("llama",), False)])
def test_a_small_share_that_is_split_is_printed(words, is_said):
    """A plan of the head alone saves next to nothing, and would be called equal without a word."""
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
        # The head's bias is tied to another one, which is used no more.
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
def test_tiny_models_have_what_they_are_checked_for(words, code, said):
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


def test_plans_of_many_ranks_need_no_process(monkeypatch):
    def refuse():
        raise AssertionError("a process was forked")

    monkeypatch.setattr(os, "fork", refuse)
    result = run("show", "llama", "--layout", "tp8+pp16")
    assert result.exit_code == 0, result.output
    assert "stage" in result.stdout


def test_help_imports_nothing_heavy():
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom hf_megatron.cli import app\n"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0\n"
        "assert CliRunner().invoke(app, ['env']).exit_code == 0\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_help_names_every_format():
    from hf_megatron.conversion.formats import FORMATS

    text = run("convert", "--help").output
    assert all(format.name in text and format.alias in text for format in FORMATS.values())


def test_what_cannot_be_written_or_drawn_is_said_first(tmp_path):
    for words, said in (
        (("check", "llama", "--record", str(tmp_path / "no" / "verified.json")), "is not a folder"),
        (("check", "llama", "--device", "tpu"), "expected cpu or cuda"),
        (("check", "llama", "--timeout", "0"), "--timeout"),
        (("timeline", "llama", "--layers", "1", "--output", str(tmp_path / "out")), "layers = 1: expected 2"),
        (("merge", str(tmp_path), str(tmp_path / "out"), "--max-shard-size", "-5GB"), "max_shard_size='-5GB'"),
        (("convert", str(tmp_path), str(tmp_path / "out"), "--to", "hf", "--max-shard-size", "abc"), "'abc'"),
        (("pull", "a/b", str(tmp_path / "out"), "--config", str(tmp_path / "no.yaml")), "no.yaml: cannot be read"),
    ):
        result = run(*words)
        assert result.exit_code == 2 and said in result.output, (words, result.output)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_attention_heads": 0}, "num_attention_heads is 0: expected 1 or more"),
        ({"hidden_size": None}, "no readable config: "),
        ({"hidden_act": "nope"}, "the model cannot be built from its config: KeyError"),
        ({"vocab_size": 2, "pad_token_id": 7}, "the model cannot be built from its config: AssertionError"),
    ],
)
def test_plan_says_in_a_line_what_is_wrong_with_a_config(stories, tmp_path, changes, said):
    config = json.loads((stories / "config.json").read_text("utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | changes), "utf-8")
    result = run("show", str(tmp_path))
    assert result.exit_code == 2 and said in result.output and len(result.output.splitlines()) == 1


def test_plan_knows_heads_and_folders():
    assert "decoder.final_layer_norm" in run("show", "t5", "--layout", "tp2").output
    result = run("show", "./nothing/here")
    assert result.exit_code == 2 and "the folder does not exist" in result.output


def test_check_knows_how_many_heads_its_tiny_models_have():
    result = run("check", "llama", "--layout", "tp8")
    assert result.exit_code == 2 and "tp_size = 8: tiny models have 4 attention heads" in result.output


def test_a_check_on_gpus_needs_one(monkeypatch):
    words = "check", "llama", "--layout", "tp2", "--device", "cuda"
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "no GPU" in run(*words).output
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert "recorded on CPU ranks only" in run(*words, "--record", "verified.json").output
